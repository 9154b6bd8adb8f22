"""Prints the folder of an installed PyTorch that the operators can be built with; otherwise says why on stderr."""

import importlib.util
import pathlib
import re
import sys

MINIMUM = (2, 10)

spec = importlib.util.find_spec("torch")
if spec is None or not spec.submodule_search_locations:
    sys.exit("no torch in this Python (pip install torch, then pip install --no-build-isolation .)")
folder = pathlib.Path(spec.submodule_search_locations[0])
version = re.search(r"__version__ = '(\d+)\.(\d+)", (folder / "version.py").read_text())
if version is None or tuple(map(int, version.groups())) < MINIMUM:
    sys.exit(f"torch >= {MINIMUM[0]}.{MINIMUM[1]} is needed, {folder} has {version and '.'.join(version.groups())}")
if not (folder / "include/torch/csrc/stable/library.h").exists():
    sys.exit(f"{folder} has no headers of the stable ABI")
print(folder)

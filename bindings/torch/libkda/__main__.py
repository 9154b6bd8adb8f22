"""python -m libkda info: what this installation can do."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import sys
from typing import Any

import libkda


def operators() -> tuple[str | None, str]:
    """Version of torch that torch.ops.libkda runs in, or None and why it does not."""
    if importlib.util.find_spec("torch") is None:
        return None, "torch is not installed"
    try:
        importlib.import_module("libkda.torch")
    except ImportError as error:
        return None, str(error)
    return importlib.import_module("torch").__version__, ""


def facts() -> dict[str, Any]:
    torch_version, why = operators()
    return {
        "version": libkda.version(),
        "source_hash": libkda.source_hash(),
        "library": libkda.library_path(),
        "include": libkda.get_include(),
        "python": platform.python_version(),
        "cpu_isas": libkda.cpu_isas(),
        "devices": [device._asdict() for device in libkda.devices()],
        "torch": torch_version,
        "torch_operators": why or "yes",
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m libkda", description="Kimi Delta Attention runtime")
    verbs = parser.add_subparsers(dest="verb", required=True)
    info = verbs.add_parser("info", help="version, library, instruction sets, devices, PyTorch operators")
    info.add_argument("--json", action="store_true", help="machine-readable")
    arguments = parser.parse_args()
    found = facts()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, value in found.items():
        if name == "devices":
            for device in value:
                capability = ".".join(map(str, device["compute_capability"]))
                extra = "" if device["device"] == "cpu" else f", compute capability {capability}"
                print(f"{'device':16} {device['device']}: {device['name']}, {device['multiprocessors']} processors{extra}")
        else:
            print(f"{name:16} {', '.join(value) if isinstance(value, list) else value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Loads the operator library into torch."""

from __future__ import annotations

import ctypes
import pathlib

import torch

from libkda._library import library

_PATH = pathlib.Path(__file__).parent.parent / "lib" / "libkda_torch.so"
MINIMUM = (2, 10)


def load() -> ctypes.CDLL:
    """Registers torch.ops.libkda.*, once per process. ImportError says how to get the operators."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MINIMUM:
        raise ImportError(f"libkda.torch: wanted torch >= {MINIMUM[0]}.{MINIMUM[1]}, got {torch.__version__}")
    if not _PATH.exists():
        raise ImportError(
            "libkda.torch: this libkda was installed without the PyTorch operators, because torch was not visible to its"
            " build. Install it with torch present: pip install --no-build-isolation ."
        )
    library()  # the same libkda.so, found before the loader looks for it
    torch.ops.load_library(str(_PATH))
    operators = ctypes.CDLL(str(_PATH))
    operators.libkda_torch_enter.restype = ctypes.c_void_p
    operators.libkda_torch_enter.argtypes = [ctypes.c_void_p]
    operators.libkda_torch_lend.restype = None
    operators.libkda_torch_lend.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    operators.libkda_torch_plans.restype = ctypes.c_size_t
    operators.libkda_torch_plans.argtypes = []
    operators.libkda_torch_measure.restype = ctypes.c_size_t
    operators.libkda_torch_measure.argtypes = [ctypes.c_int32]
    return operators


OPERATORS = load()

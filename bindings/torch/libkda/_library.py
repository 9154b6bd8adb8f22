"""Loads libkda.so and declares its functions."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

from libkda import _abi
from libkda._errors import BY_STATUS, Error

_FOLDER = pathlib.Path(__file__).parent


def library_path() -> str:
    """Path of libkda.so, as loaded. The variable LIBKDA_LIBRARY replaces the one of the package."""
    chosen = os.environ.get("LIBKDA_LIBRARY")
    if chosen:
        return chosen
    found = sorted((_FOLDER / "lib").glob("libkda.so.*"))
    if not found:
        raise ImportError(f"libkda: no libkda.so in {_FOLDER / 'lib'}")
    return str(found[0])


def get_include() -> str:
    """Folder of the C and C++ headers (``#include <kda/kda.h>``)."""
    return str(_FOLDER / "include")


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library, its functions declared."""
    lib = ctypes.CDLL(library_path())
    for name, (result, parameters) in _abi.FUNCTIONS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, parameters
    return lib


def check(status: int) -> None:
    """Raises the exception of a status that is not OK."""
    if status != _abi.KDA_OK:
        name = library().kda_status_name(status).decode()
        raise BY_STATUS.get(name, Error)(library().kda_last_error().decode())


def listing(function: Callable[..., int], *arguments: Any, texts: int = 1) -> list[tuple[str, ...]]:
    """What a function of the form ``f(..., i, const char**...)`` gives for i = 0, 1, ... until NOT_FOUND."""
    found: list[tuple[str, ...]] = []
    while True:
        out = [ctypes.c_char_p() for _ in range(texts)]
        status = function(*arguments, len(found), *(ctypes.byref(text) for text in out))
        if status == _abi.KDA_NOT_FOUND:
            return found
        check(status)
        found.append(tuple((text.value or b"").decode() for text in out))


def version() -> str:
    """Version of the loaded library, "0.1.0"."""
    return library().kda_version_string().decode()


def source_hash() -> str:
    """Hash over the sources that the library was built from."""
    return library().kda_source_hash().decode()


def cpu_isas() -> list[str]:
    """Instruction sets of the CPU backend that this machine can run, best first."""
    return library().kda_cpu_isas().decode().split(",")

"""Contexts: what plans are made on. Devices and their candidates."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple

from libkda import _abi
from libkda._library import check, library
from libkda._structs import fill, route


class Device(NamedTuple):
    """Facts of a device."""

    device: str
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int


class Candidate(NamedTuple):
    """An implementation of an operator: whether it would be chosen, and every unmet condition, one a line."""

    name: str
    chosen: bool
    reasons: str


def parse_device(device: str) -> _abi.kda_device:
    """ "cpu", "cuda" or "cuda:1"; ValueError for anything else."""
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"device: wanted 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    return _abi.kda_device(_abi.KDA_CUDA if kind == "cuda" else _abi.KDA_CPU, int(index or 0))


def devices() -> list[Device]:
    """Every device that this build and this machine have; the CPU comes first."""
    found = []
    for kind, label in ((_abi.KDA_CPU, "cpu"), (_abi.KDA_CUDA, "cuda")):
        count = ctypes.c_int32()
        if library().kda_device_count(kind, ctypes.byref(count)) != _abi.KDA_OK:
            continue
        for index in range(count.value):
            info = _abi.kda_device_info(struct_size=ctypes.sizeof(_abi.kda_device_info))
            check(library().kda_device_get_info(_abi.kda_device(kind, index), ctypes.byref(info)))
            found.append(
                Device(
                    label if kind == _abi.KDA_CPU else f"{label}:{index}",
                    info.name.decode(),
                    (info.compute_major, info.compute_minor),
                    info.multiprocessors,
                    info.memory_bytes,
                )
            )
    return found


class Context:
    """Where plans run: a device and, on the CPU, a number of threads (0: all cores of this process).

    Raises Unsupported if this build has no backend for the device. Plans keep their context alive. Any thread may use it.
    """

    def __init__(self, device: str = "cpu", *, num_threads: int = 0) -> None:
        options = _abi.kda_context_options(
            struct_size=ctypes.sizeof(_abi.kda_context_options), device=parse_device(device), num_threads=num_threads
        )
        handle = ctypes.c_void_p()
        check(library().kda_context_create(ctypes.byref(options), ctypes.byref(handle)))
        self.handle = handle
        self.device = options.device
        self._finalizer = weakref.finalize(self, library().kda_context_destroy, handle)

    @property
    def isa(self) -> str:
        """Instruction set or architecture in use."""
        return library().kda_context_isa(self.handle).decode()

    @property
    def num_threads(self) -> int:
        """Threads that a run may use."""
        return library().kda_context_num_threads(self.handle)

    def seal(self) -> None:
        """After this, making a plan raises PreconditionFailed."""
        check(library().kda_context_seal(self.handle))


def candidates(context: Context, operator: str, **description: Any) -> list[Candidate]:
    """Who would serve a problem, and why not the others: every candidate of `operator` ("prefill", "decode", ...) in order.

    `description` is what the operator's plan takes. Makes no plan.
    """
    from libkda import plans

    kind = next((k for k in plans.PLANS if k.operator == operator), None)
    if kind is None:
        raise ValueError(f"operator: wanted one of {', '.join(k.operator for k in plans.PLANS)}, got {operator!r}")
    desc, keep = fill(kind.new_desc(), route(kind._desc, description))
    found: list[Candidate] = []

    @_abi.kda_explain_fn
    def add(_user: Any, name: bytes, reasons: bytes, chosen: int) -> None:
        found.append(Candidate(name.decode(), bool(chosen), reasons.decode()))

    number = getattr(_abi, f"KDA_OP_{operator.upper()}")
    check(library().kda_explain(context.handle, number, ctypes.byref(desc), add, None))
    del keep
    return found

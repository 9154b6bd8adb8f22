"""Tensors without a framework: views taken from and given to others through DLPack; nothing is ever copied."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from libkda import _abi
from libkda._library import check, library

if TYPE_CHECKING:
    from libkda.context import Context

DTYPES = {
    "float32": _abi.KDA_FP32, "bfloat16": _abi.KDA_BF16, "float16": _abi.KDA_FP16, "float64": _abi.KDA_FP64,
    "int8": _abi.KDA_INT8, "int16": _abi.KDA_INT16, "int32": _abi.KDA_INT32, "int64": _abi.KDA_INT64,
    "bool": _abi.KDA_BOOL, "uint8": _abi.KDA_UINT8,
}  # fmt: skip
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
# DLPack's (type code, bits) of each; codes: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool.
_DLPACK = {
    (2, 32): _abi.KDA_FP32, (4, 16): _abi.KDA_BF16, (2, 16): _abi.KDA_FP16, (2, 64): _abi.KDA_FP64,
    (0, 8): _abi.KDA_INT8, (0, 16): _abi.KDA_INT16, (0, 32): _abi.KDA_INT32, (0, 64): _abi.KDA_INT64,
    (6, 8): _abi.KDA_BOOL, (1, 8): _abi.KDA_UINT8,
}  # fmt: skip
_DLPACK_CPU, _DLPACK_CUDA = 1, 2


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_python = ctypes.pythonapi
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_CAPSULE = b"dltensor"

# Exported tensors by the address of their DLManagedTensor, until their consumer frees them.
_exported: dict[int, tuple[Any, ...]] = {}


_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _python))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _python))
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@_Deleter
def _forget(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


@_Destructor
def _capsule_gone(capsule: int) -> None:
    # Whoever consumed it has renamed it and calls the deleter.
    if _is_valid(capsule, _CAPSULE):
        _exported.pop(_pointer_of(capsule, _CAPSULE), None)


def dtype_code(dtype: Any, where: str = "dtype") -> int:
    """The C ABI's number of "bfloat16", "bf16", numpy.float32, torch.bfloat16, ...; ValueError for others."""
    text = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    text = text.rsplit(".", 1)[-1]
    code = DTYPES.get(_SHORT.get(text, text))
    if code is None:
        raise ValueError(f"{where}: wanted one of {', '.join(DTYPES)}, got {dtype!r}")
    return code


class Tensor:
    """A strided view: ``shape``, ``strides`` (in elements), ``dtype``, ``device``, ``pointer``. Exports itself through
    DLPack: ``torch.from_dlpack(t)``, ``numpy.from_dlpack(t)``. Keeps what owns the memory alive."""

    def __init__(self, c: _abi.kda_tensor, owner: Any = None) -> None:
        self.c = c
        self._owner = owner

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.c.shape[: self.c.rank])

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(self.c.strides[: self.c.rank])

    @property
    def dtype(self) -> str:
        return next(name for name, code in DTYPES.items() if code == self.c.dtype)

    @property
    def device(self) -> str:
        return "cpu" if self.c.device.type == _abi.KDA_CPU else f"cuda:{self.c.device.index}"

    @property
    def pointer(self) -> int:
        return self.c.data or 0

    def __repr__(self) -> str:
        return f"libkda.Tensor(shape={self.shape}, strides={self.strides}, dtype={self.dtype}, device={self.device})"

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_DLPACK_CPU if self.c.device.type == _abi.KDA_CPU else _DLPACK_CUDA, self.c.device.index)

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        """A DLPack capsule of the same memory. Work on it must be ordered by the caller's streams."""
        if copy:
            raise BufferError("libkda.Tensor: wanted copy=None or False, got True")
        if dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__():
            raise BufferError(f"libkda.Tensor: lies on {self.__dlpack_device__()}, wanted {tuple(dl_device)}")
        code, bits = next(pair for pair, number in _DLPACK.items() if number == self.c.dtype)
        shape = (ctypes.c_int64 * 6)(*self.c.shape)
        strides = (ctypes.c_int64 * 6)(*self.c.strides)
        managed = _DLManagedTensor()
        kind, index = self.__dlpack_device__()
        managed.tensor = _DLTensor(self.c.data, kind, index, self.c.rank, code, bits, 1, shape, strides, 0)
        managed.deleter = _forget
        address = ctypes.addressof(managed)
        _exported[address] = (managed, shape, strides, self)
        return _python.PyCapsule_New(address, _CAPSULE, ctypes.cast(_capsule_gone, ctypes.c_void_p))


def from_dlpack(array: Any) -> Tensor:
    """A view of any tensor with ``__dlpack__`` on the CPU or a CUDA device, rank 0 to 6. No copy, no synchronisation: on
    CUDA, runs are ordered by the stream that they are given. TypeError if the object has no DLPack export, ValueError
    for a dtype or device that libkda does not know."""
    return view(array, "array")


def view(array: Any, where: str) -> Tensor:
    if isinstance(array, Tensor):
        return array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{where}: wanted a tensor with __dlpack__, got {type(array).__name__}")
    # stream -1: the producer does not synchronise.
    on_device = int(array.__dlpack_device__()[0]) != _DLPACK_CPU
    capsule = array.__dlpack__(stream=-1) if on_device else array.__dlpack__()
    managed = ctypes.cast(_python.PyCapsule_GetPointer(capsule, _CAPSULE), ctypes.POINTER(_DLManagedTensor))
    t = managed.contents.tensor
    if t.device_type not in (_DLPACK_CPU, _DLPACK_CUDA):
        raise ValueError(f"{where}: wanted a tensor on the CPU or a CUDA device, got DLPack device type {t.device_type}")
    dtype = _DLPACK.get((t.code, t.bits)) if t.lanes == 1 else None
    if dtype is None:
        raise ValueError(f"{where}: wanted one of {', '.join(DTYPES)}, got DLPack type ({t.code}, {t.bits}, {t.lanes})")
    if t.ndim > _abi.KDA_MAX_RANK:
        raise ValueError(f"{where}: wanted at most {_abi.KDA_MAX_RANK} dimensions, got {t.ndim}")
    c = _abi.kda_tensor(dtype=dtype, rank=t.ndim)
    c.data = (t.data or 0) + t.byte_offset or None
    c.device.type = _abi.KDA_CPU if t.device_type == _DLPACK_CPU else _abi.KDA_CUDA
    c.device.index = t.device_id
    stride = 1
    for i in reversed(range(t.ndim)):
        c.shape[i] = t.shape[i]
        c.strides[i] = t.strides[i] if t.strides else stride
        stride *= t.shape[i]
    # The capsule is not consumed: it frees its export when it goes, and the view does not outlive either.
    return Tensor(c, (array, capsule))


def empty(shape: Sequence[int], dtype: Any, context: Context) -> Tensor:
    """Memory on the context's device, aligned to 256 bytes, contents unspecified; freed with the last view of it."""
    c = _abi.kda_tensor(dtype=dtype_code(dtype), rank=len(shape), device=context.device)
    stride = 1
    for i in reversed(range(len(shape))):
        c.shape[i], c.strides[i] = shape[i], stride
        stride *= shape[i]
    bytes_ = math.prod(shape) * library().kda_dtype_size(c.dtype)
    memory = ctypes.c_void_p()
    kind = _abi.KDA_MEMORY_DEVICE
    check(library().kda_memory_allocate(context.handle, kind, bytes_, ctypes.byref(memory)))
    c.data = memory.value
    tensor = Tensor(c, context)
    weakref.finalize(tensor, library().kda_memory_free, context.handle, kind, memory)
    return tensor

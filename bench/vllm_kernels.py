"""vLLM's own KDA kernels: of the vLLM that is installed, or of the files under a folder that holds its package.

load(None)    imports them as vLLM's layers do.
load(FOLDER)  executes the kernels' files FOLDER/vllm/..., as they are, without the packages around them, which need a complete
              installation; what those files import from elsewhere in vLLM is stood in for here (the platform's facts, names
              of Triton, two constants, a base class, a copy). Native kernels come from FOLDER/vllm/*.so where they are.
"""

import contextlib
import importlib
import pathlib
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

PARTS = {
    "kda": "vllm.models.kimi_k3.nvidia.ops.third_party.kda",
    "conv": "vllm.model_executor.layers.mamba.ops.causal_conv1d",
    "gather": "vllm.model_executor.layers.mamba.ops.gather_initial_states",
    "norm": "vllm.third_party.flash_linear_attention.ops.kda",
}
NATIVE = {"flashkda": "_flashkda_C.abi3.so", "decode": "_C_stable_libtorch.abi3.so"}


@dataclass
class Kernels:
    """Modules by PARTS; which of the native kernels are there, or why not; version of vLLM."""

    kda: Any
    conv: Any
    gather: Any
    norm: Any
    native: dict[str, str]
    version: str


class _Platform:
    """vllm.platforms.current_platform, as far as the kernels' files ask."""

    def __init__(self):
        self._cuda = torch.cuda.is_available()

    def is_cuda(self):
        return self._cuda

    is_cuda_alike = is_cuda

    def is_cpu(self):
        return False  # else the CPU's functions take the kernels' names

    def is_arch_support_pdl(self):
        return self._cuda and torch.cuda.get_device_capability()[0] >= 9

    def has_device_capability(self, wanted):
        return self._cuda and torch.cuda.get_device_capability() >= (wanted // 10, wanted % 10)

    def is_device_capability_family(self, wanted, device_id=0):
        return self._cuda and torch.cuda.get_device_capability(device_id)[0] == wanted // 10


class _CustomOp(torch.nn.Module):
    @classmethod
    def register(cls, name):
        return lambda layer: layer


def _stand_ins():
    return {
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {
            "triton": triton,
            "tl": tl,
            "tldevice": libdevice,
        },
        "vllm.model_executor.custom_op": {"CustomOp": _CustomOp},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
        "vllm.utils.torch_utils": {"async_tensor_h2d": lambda t, device, dtype: t.to(device, dtype, non_blocking=True)},
    }


def _without_packages(folder):
    """Modules for the packages on the way to the kernels' files: paths alone, nothing of theirs is executed."""
    kda = PARTS["kda"]
    for name in (*PARTS.values(), *_stand_ins(), "vllm.utils.math_utils"):
        parents = name.split(".")[:-1]
        for n in range(1, len(parents) + 1):
            package = ".".join(parents[:n])
            if package not in sys.modules and package != kda:
                module = sys.modules[package] = types.ModuleType(package)
                module.__path__ = [str(folder.joinpath(*parents[:n]))]
    for name, names in _stand_ins().items():
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update(names)


def _native(folder):
    found = {}
    for name, file in NATIVE.items():
        path = folder / "vllm" / file
        try:
            if not path.exists():
                raise OSError(f"no {file}")
            torch.ops.load_library(str(path))
            found[name] = "loaded"
        except (OSError, RuntimeError) as why:
            found[name] = str(why).splitlines()[0]
    return found


def load(folder: str | None) -> Kernels:
    if folder is None:
        vllm = importlib.import_module("vllm")
        root = pathlib.Path(vllm.__file__).resolve().parents[1]
        version = vllm.__version__
    else:
        root = pathlib.Path(folder).resolve()
        if not (root / "vllm").is_dir():
            raise FileNotFoundError(f"{root}: wanted a folder that holds the package vllm")
        _without_packages(root)
        names: dict[str, Any] = {}
        exec((root / "vllm" / "_version.py").read_text(), names)
        version = f"{names['__version__']}, the kernels' files alone"
    modules = {part: importlib.import_module(name) for part, name in PARTS.items()}
    return Kernels(**modules, native=_native(root), version=version)

"""KDA layers of safetensors checkpoints: which there are, their shapes, their parameters by one set of names
(kda/layer.h, spec L-1 to L-5, L-10, L-11)."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import weakref
from collections.abc import Mapping
from typing import Any

from libkda import _abi
from libkda._errors import NotFound
from libkda._library import check, library
from libkda._structs import enumerator
from libkda.tensors import Tensor, view

_FAMILIES = {_abi.KDA_GATE_SOFTPLUS: "softplus", _abi.KDA_GATE_BOUNDED: "bounded"}
_GATES = {_abi.KDA_OUTPUT_GATE_LOW_RANK: "low_rank", _abi.KDA_OUTPUT_GATE_FULL_RANK: "full_rank"}

PARAMETERS = (
    "q_proj.weight", "k_proj.weight", "v_proj.weight", "b_proj.weight", "f_a_proj.weight", "f_b_proj.weight",
    "g_a_proj.weight", "g_b_proj.weight", "g_b_proj.bias", "g_proj.weight", "o_proj.weight", "o_norm.weight",
    "A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "q_conv1d.bias", "k_conv1d.bias",
    "v_conv1d.bias",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Shapes and numeric form of a layer: hidden D, num_heads H, num_value_heads HV (0: H), key_dim K, value_dim V, gate_rank
    (of f_a_proj), output_gate "low_rank" (with output_gate_rank) or "full_rank", conv_width W, gate_family "softplus" or
    "bounded" (with lower_bound < 0)."""

    hidden: int
    num_heads: int
    key_dim: int
    value_dim: int
    gate_rank: int
    num_value_heads: int = 0
    output_gate: str = "low_rank"
    output_gate_rank: int = 0
    conv_width: int = 4
    gate_family: str = "softplus"
    lower_bound: float | None = None
    allow_neg_eigval: bool = False
    conv_bias: bool = False
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.num_value_heads == 0:
            object.__setattr__(self, "num_value_heads", self.num_heads)
        self.share(1, 0)  # validates

    @classmethod
    def of_model(cls, name: str) -> LayerSpec:
        """Of a published model: "kimi-linear", "kimi-k3", "glm-5.3-flash", and "tiny", which is nobody's."""
        spec = _abi.kda_layer_spec()
        check(library().kda_model_spec(name.encode(), ctypes.byref(spec), None))
        return cls.from_struct(spec)

    @classmethod
    def from_struct(cls, s: Any) -> LayerSpec:
        bounded = s.gate_family == _abi.KDA_GATE_BOUNDED
        same = ("hidden", "num_heads", "key_dim", "value_dim", "gate_rank", "num_value_heads", "output_gate_rank", "conv_width")
        return cls(
            **{name: getattr(s, name) for name in same}, output_gate=_GATES[s.output_gate],
            gate_family=_FAMILIES[s.gate_family], lower_bound=s.lower_bound if bounded else None,
            allow_neg_eigval=s.allow_neg_eigval != 0, conv_bias=s.conv_bias != 0, norm_eps=s.norm_eps,
        )  # fmt: skip

    def struct(self) -> Any:
        values = dataclasses.asdict(self)
        values["output_gate"] = enumerator("kda_output_gate", "output_gate_" + self.output_gate, "output_gate")
        values["gate_family"] = enumerator("kda_gate_family", self.gate_family, "gate_family")
        values["lower_bound"] = self.lower_bound or 0.0
        return _abi.kda_layer_spec(**values)

    def share(self, ranks: int, rank: int) -> LayerSpec:
        """One of `ranks` equal shares (spec L-6); InvalidArgument unless the heads divide."""
        whole, mine = self.struct(), _abi.kda_layer_spec()
        check(library().kda_layer_spec_share(ctypes.byref(whole), ranks, rank, ctypes.byref(mine)))
        if ranks == 1:
            return self
        return dataclasses.replace(self, num_heads=mine.num_heads, num_value_heads=mine.num_value_heads)


class Checkpoint:
    """An opened checkpoint: a .safetensors file, an index, or a folder of them. Files are mapped, headers and names checked
    at once; NotFound and InvalidArgument name file and tensor."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        handle = ctypes.c_void_p()
        check(library().kda_checkpoint_open(os.fspath(path).encode(), ctypes.byref(handle)))
        self.handle = handle
        self._finalizer = weakref.finalize(self, library().kda_checkpoint_close, handle)

    def layers(self) -> list[tuple[int, LayerSpec]]:
        """KDA layers in ascending order: number in the model, description. Without a config the gate is softplus."""
        found: list[tuple[int, LayerSpec]] = []
        number, spec = ctypes.c_int64(), _abi.kda_layer_spec()
        while library().kda_checkpoint_layer(self.handle, len(found), ctypes.byref(number), ctypes.byref(spec)) == _abi.KDA_OK:
            found.append((number.value, LayerSpec.from_struct(spec)))
        return found

    def parameter(self, layer: int, name: str) -> Tensor:
        """A parameter of KDA layer `layer` (its place in ``layers()``), a view of the mapped file: one of PARAMETERS, whatever
        the file calls it. NotFound if the layer has none."""
        tensor = _abi.kda_tensor()
        check(library().kda_checkpoint_parameter(self.handle, layer, name.encode(), ctypes.byref(tensor)))
        return Tensor(tensor, self)

    def parameters(self, layer: int) -> dict[str, Tensor]:
        """All parameters that the layer has, by name."""
        return _collect(lambda name: self.parameter(layer, name))


def resolve(spec: LayerSpec, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parameters among tensors in host memory (anything dense with __dlpack__, fp32 or bf16) under any of the names that
    checkpoints have, without prefix. InvalidArgument names what is missing, unknown or of another size."""
    views = {name: view(tensor, name) for name, tensor in tensors.items()}
    names = [name.encode() for name in views]
    named = (_abi.kda_named_tensor * max(1, len(views)))()
    for entry, name, tensor in zip(named, names, views.values(), strict=False):
        entry.name, entry.tensor = name, tensor.c
    struct = spec.struct()

    def find(name: str) -> Tensor:
        tensor = _abi.kda_tensor()
        check(library().kda_layer_parameter(ctypes.byref(struct), named, len(views), name.encode(), ctypes.byref(tensor)))
        return Tensor(tensor, (views, names))

    return _collect(find)


def _collect(find: Any) -> dict[str, Tensor]:
    found = {}
    for name in PARAMETERS:
        try:
            found[name] = find(name)
        except NotFound:
            continue
    return found

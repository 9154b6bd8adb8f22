"""The KDA layer as a torch module: from hidden states to hidden states on paged pools (spec L-7)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

import libkda
from libkda.checkpoint import Checkpoint, LayerSpec, resolve
from libkda.torch._options import Form, PlanOptions
from libkda.torch.serving import Group, Mixer, Step

_Tensor = torch.Tensor
_BIASES = ("g_b_bias", "conv_bias")  # what only some layers have
_OWN = ("in_proj", "f_b_proj", "g_b_proj", "o_proj", "conv_weight", "A_log", "dt_bias", "norm_weight", *_BIASES)


@dataclasses.dataclass
class LayerState:
    """Pools of one layer: state [slots,HV,V,K], conv [slots,L,channels]; slot s of both belongs to one request. Pages need not
    be cleared: a request's first prefill starts from zero."""

    state: _Tensor
    conv: _Tensor


class KDALayer(torch.nn.Module):
    """x [T,D] -> [T,D]: projections by ``torch.nn.functional.linear``, everything between by ``torch.ops.libkda``.

    spec: the whole layer. heads: (first, count) of the query/key heads that this rank holds, for tensor parallelism (default:
    all); the output is then a partial sum, to be added over ranks (``libkda.distributed.TensorParallel`` does). dtype: the
    io dtype, of x, projections and output. plan: null_slot, backend, ... of the operators. Inference only.

    ``load_state_dict`` takes a layer's tensors under any of the names of checkpoints (Kimi-Linear, Kimi-K3, GLM-5.3-Flash,
    FLA; fused projections; any shape of A_log) or the module's own; ``from_checkpoint`` reads safetensors files.
    """

    def __init__(
        self,
        spec: LayerSpec,
        *,
        heads: tuple[int, int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: Any = None,
        plan: PlanOptions | None = None,
    ) -> None:
        super().__init__()
        first, count = (0, spec.num_heads) if heads is None else heads
        if not (first >= 0 and count >= 0 and first + count <= spec.num_heads):
            raise libkda.InvalidArgument(f"heads: wanted a range of {spec.num_heads} heads, got ({first}, {count})")
        ratio = spec.num_value_heads // spec.num_heads
        self.whole, self.heads, self.plan = spec, (first, count), PlanOptions() if plan is None else plan
        self.num_heads, self.num_value_heads = count, count * ratio
        self.key_channels, self.value_channels = count * spec.key_dim, self.num_value_heads * spec.value_dim
        self.channels = 2 * self.key_channels + self.value_channels
        self.full_rank = spec.output_gate == "full_rank"
        self.gate_rows = self.value_channels if self.full_rank else spec.output_gate_rank
        # Rows of in_proj: q, k, v, g (or g_a), f_a, b, and zeros up to a multiple of 16, so that rows of its output are
        # aligned whatever the number of heads.
        used = self.channels + self.gate_rows + spec.gate_rank + self.num_value_heads
        rows = {
            "in_proj": ((used + 15) // 16 * 16, spec.hidden),
            "f_b_proj": (self.num_value_heads * spec.key_dim, spec.gate_rank),
            "g_b_proj": None if self.full_rank else (self.value_channels, spec.output_gate_rank),
            "g_b_bias": None,
            "o_proj": (spec.hidden, self.value_channels),
        }
        small = {
            "conv_weight": (self.channels, spec.conv_width),
            "A_log": (self.num_value_heads,),
            "conv_bias": (self.channels,) if spec.conv_bias else None,
            "dt_bias": (self.num_value_heads, spec.key_dim),
            "norm_weight": (spec.value_dim,),
        }
        for names, kind in ((rows, dtype), (small, torch.float32)):
            for name, shape in names.items():
                tensor = None if shape is None else torch.zeros(shape, dtype=kind, device=device)
                self.register_buffer(name, tensor)

    # -- parameters ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint | str | os.PathLike[str],
        layer: int = 0,
        *,
        lower_bound: float | None = None,
        ranks: int = 1,
        rank: int = 0,
        heads: tuple[int, int] | None = None,
        **options: Any,
    ) -> KDALayer:
        """KDA layer number `layer` (counting KDA layers alone) of a safetensors file, index or folder. lower_bound: for files
        without a config.json, the bounded gate's. ranks, rank: an equal share of the heads (spec L-6); heads: any share."""
        checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        layers = checkpoint.layers()
        if not 0 <= layer < len(layers):
            raise libkda.NotFound(f"layer: wanted below {len(layers)}, got {layer}")
        spec = layers[layer][1]
        if lower_bound is not None:
            if spec.lower_bound not in (None, lower_bound):
                raise libkda.InvalidArgument(f"lower_bound: wanted {spec.lower_bound} as the config says, got {lower_bound}")
            spec = dataclasses.replace(spec, gate_family="bounded", lower_bound=lower_bound)
        if ranks > 1:
            count = spec.share(ranks, rank).num_heads
            heads = (rank * count, count)
        module = cls(spec, heads=heads, **options)
        module._fill({name: torch.from_dlpack(t) for name, t in checkpoint.parameters(layer).items()})
        return module

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *rest: Any) -> None:
        mine = {name[len(prefix) :]: t for name, t in state_dict.items() if name.startswith(prefix)}
        if mine and not mine.keys() <= set(_OWN):
            self.load_parameters(mine)
            mine = {name: t for name in _OWN if (t := getattr(self, name)) is not None}
            state_dict = {**state_dict, **{prefix + name: t for name, t in mine.items()}}
            rest = (*rest[:1], [], *rest[2:])  # the checkpoint's own names are not unexpected
        for name in _BIASES:
            if getattr(self, name) is None and prefix + name in state_dict:
                setattr(self, name, torch.zeros_like(state_dict[prefix + name], device=self.o_proj.device))
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *rest)

    def load_parameters(self, tensors: Mapping[str, _Tensor]) -> None:
        """Takes the whole layer's tensors ("q_proj.weight", ..., any of the accepted names) and keeps this rank's heads of
        them. InvalidArgument names what is missing, unknown or of another size."""
        kept = {
            name: (t.detach() if t.dtype in (torch.float32, torch.bfloat16) else t.detach().float()).cpu().contiguous()
            for name, t in tensors.items()
        }
        self._fill({name: torch.from_dlpack(t) for name, t in resolve(self.whole, kept).items()})

    @torch.no_grad()
    def _fill(self, p: Mapping[str, _Tensor]) -> None:
        s, (first, count) = self.whole, self.heads
        ratio = s.num_value_heads // s.num_heads
        keys = slice(first * s.key_dim, (first + count) * s.key_dim)
        gates = slice(first * ratio * s.key_dim, (first + count) * ratio * s.key_dim)
        values = slice(first * ratio * s.value_dim, (first + count) * ratio * s.value_dim)
        value_heads = slice(first * ratio, (first + count) * ratio)
        gate = p["g_proj.weight"][values] if self.full_rank else p["g_a_proj.weight"]
        parts = (
            p["q_proj.weight"][keys], p["k_proj.weight"][keys], p["v_proj.weight"][values], gate, p["f_a_proj.weight"],
            p["b_proj.weight"][value_heads],
        )  # fmt: skip
        _stack(self.in_proj, parts)
        self.f_b_proj.copy_(p["f_b_proj.weight"][gates])
        if not self.full_rank:
            self.g_b_proj.copy_(p["g_b_proj.weight"][values])
        bias = p.get("g_b_proj.bias")
        self.g_b_bias = None if bias is None else bias[values].to(self.o_proj)
        self.o_proj.copy_(p["o_proj.weight"][:, values])
        parts = (("q", keys), ("k", keys), ("v", values))
        if "q_conv1d.weight" in p:
            _stack(self.conv_weight, [p[f"{name}_conv1d.weight"][rows] for name, rows in parts])
        else:  # no short convolution (spec L-11): the newest input passes
            self.conv_weight.copy_(torch.tensor([0.0, 1.0]))
        biases = [p[f"{name}_conv1d.bias"][rows] for name, rows in parts] if "q_conv1d.bias" in p else None
        self.conv_bias = None if biases is None else torch.cat(biases).to(self.conv_weight)
        self.A_log.copy_(p["A_log"][value_heads])
        self.dt_bias.copy_(p["dt_bias"][value_heads])
        self.norm_weight.copy_(p["o_norm.weight"])

    # -- states -------------------------------------------------------------------------------------------------------

    def new_state(self, slots: int, *, drafts: int = 0, dtype: torch.dtype = torch.float32) -> LayerState:
        """Pools for `slots` requests' states, with window columns for `drafts` speculative tokens. dtype: of the recurrent
        state (float32, bfloat16, float16). Zeroed, though nothing asks for it."""
        shape = (slots, self.num_value_heads, self.whole.value_dim, self.whole.key_dim)
        window = (slots, self.whole.conv_width - 1 + drafts, self.channels)
        new = self.o_proj.new_zeros
        return LayerState(new(shape, dtype=dtype), new(window))

    # -- running ------------------------------------------------------------------------------------------------------

    @property
    def form(self) -> Form:
        """The numeric form of the attention operators."""
        form = Form(gate_family=self.whole.gate_family, A_log=self.A_log, dt_bias=self.dt_bias)
        if self.whole.lower_bound is not None:
            form["lower_bound"] = self.whole.lower_bound
        if self.whole.allow_neg_eigval:
            form["allow_neg_eigval"] = True
        return form

    def mixer(self, states: LayerState) -> Mixer:
        """What lies between the projections, for ``torch.ops.libkda.attention`` too."""
        return Mixer(
            [self.conv_weight], [states.conv], states.state, self.form, norm_weight=self.norm_weight,
            norm_eps=self.whole.norm_eps, conv_bias=None if self.conv_bias is None else [self.conv_bias], plan=self.plan,
        )  # fmt: skip

    def project_qkv(self, x: _Tensor) -> _Tensor:
        """Raw q | k | v of rows x: [T,channels]."""
        return functional.linear(x, self.in_proj[: self.channels])

    def project_gates(self, x: _Tensor) -> tuple[_Tensor, _Tensor]:
        """Raw gate [T,HV,K] and beta logits [T,HV]."""
        return self._gates(functional.linear(x, self.in_proj[self.channels + self.gate_rows :]))

    def project_z(self, x: _Tensor) -> _Tensor:
        """Raw output gate [T,HV,V]."""
        return self._z(functional.linear(x, self.in_proj[self.channels : self.channels + self.gate_rows]))

    def _gates(self, y: _Tensor) -> tuple[_Tensor, _Tensor]:
        rank = self.whole.gate_rank
        gate = functional.linear(y[:, :rank], self.f_b_proj)
        return gate.unflatten(-1, (self.num_value_heads, -1)), y[:, rank : rank + self.num_value_heads]

    def _z(self, y: _Tensor) -> _Tensor:
        z = y if self.full_rank else functional.linear(y, self.g_b_proj, self.g_b_bias)
        return z.unflatten(-1, (self.num_value_heads, -1))

    def forward(self, x: _Tensor, states: LayerState | None = None, step: Step | None = None) -> _Tensor:
        """A serving step of token rows x [T,D]: prompt, decode and verify rows side by side (``Step``). Returns [T,D]; rows of
        no sequence, or of an inactive one, are zero where x is finite. Without a step: a dry run, zeros, no pool is touched
        (spec L-12)."""
        if step is None or self.num_heads == 0:
            return torch.zeros_like(x)
        if states is None:
            raise libkda.InvalidArgument("states: wanted the layer's pools (new_state), got none")
        y = functional.linear(x, self.in_proj)
        gate, beta = self._gates(y[:, self.channels + self.gate_rows :])
        z = self._z(y[:, self.channels : self.channels + self.gate_rows])
        core = x.new_zeros(x.shape[0], self.num_value_heads, self.whole.value_dim)
        self.mixer(states)([y[:, : self.channels]], gate, beta, z, core, step)
        return self.project_out(core)

    def project_out(self, core: _Tensor) -> _Tensor:
        """o_proj of normed rows [T,HV,V]."""
        return functional.linear(core.flatten(1), self.o_proj)

    def prefill(
        self, x: _Tensor, states: LayerState, cu_seqlens: _Tensor, slots: _Tensor, has_initial_state: _Tensor | None = None
    ) -> _Tensor:
        """Prompts or pieces of them: rows cu_seqlens[n] .. cu_seqlens[n+1] of x continue slot slots[n] where
        has_initial_state[n], else start it (default: all start)."""
        if has_initial_state is None:
            has_initial_state = torch.zeros(slots.shape[0], dtype=torch.bool, device=x.device)
        return self(x, states, Step(prefill=_group(cu_seqlens, slots, has_initial_state=has_initial_state)))

    def decode(self, x: _Tensor, states: LayerState, slots: _Tensor) -> _Tensor:
        """One token a request: row n of x continues slot slots[n]."""
        begin = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        return self(x, states, Step(decode=Group(begin, torch.ones_like(begin), slots)))

    def verify(
        self, x: _Tensor, states: LayerState, cu_seqlens: _Tensor, slots: _Tensor, accepted: _Tensor | None = None
    ) -> _Tensor:
        """A base token and drafts a request: the state after token t goes to slots[n,t]; accepted int32 [N] (1 and up, default
        1) says how many tokens of the step before were kept."""
        return self(x, states, Step(spec=_group(cu_seqlens, slots, accepted=accepted), width=slots.shape[1]))

    def extra_repr(self) -> str:
        s = self.whole
        return f"D={s.hidden}, heads={self.heads[0]}..{sum(self.heads)} of {s.num_heads}, K={s.key_dim}, V={s.value_dim}"


def _stack(to: _Tensor, parts: Any) -> None:
    row = 0
    for part in parts:
        to[row : row + part.shape[0]].copy_(part)
        row += part.shape[0]


def _group(cu_seqlens: _Tensor, slots: _Tensor, **more: Any) -> Group:
    return Group(cu_seqlens[:-1], cu_seqlens[1:] - cu_seqlens[:-1], slots, **more)

"""A layer's mixer on a mixed serving step, by layer name: what a serving plug-in calls once per layer and step.

with libkda.torch.serving(layers=mixers, step=step):      # around the model's forward
    torch.ops.libkda.attention([qkv], gate, beta, z, out, "model.layers.0.attn")
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

import libkda
from libkda import torch as ops
from libkda.torch._load import OPERATORS
from libkda.torch._options import Form, PlanOptions

_Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows of one kind: begin and length int [n] in the token buffer, slots int [n] (or [n,width]), has_initial_state bool
    [n] (prefill), accepted int32 [n] (speculative)."""

    begin: _Tensor
    length: _Tensor
    slots: _Tensor
    has_initial_state: _Tensor | None = None
    accepted: _Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """The step's groups; a group that is None has no rows. width: 1 + drafts of the speculative group."""

    prefill: Group | None = None
    decode: Group | None = None
    spec: Group | None = None
    width: int = 1

    @classmethod
    def from_tables(cls, tables: ops.StepTables, *, width: int = 1) -> Step:
        """From ``libkda.torch.metadata`` (called with a slot table): padded to capacity, so that shapes never change and the
        step can be captured. Empty rows cost nothing."""
        t = tables
        return cls(
            Group(t.prefill_begin, t.prefill_length, t.prefill_slots, has_initial_state=t.has_initial_state),
            Group(t.decode_begin, t.decode_length, t.decode_slots),
            Group(t.spec_begin, t.spec_length, t.spec_slots, accepted=t.num_accepted) if width > 1 else None,
            width,
        )


@dataclasses.dataclass
class Mixer:
    """Parameters and pools of one layer. conv_weight, conv_state: one tensor (merged) or three; norm_weight None: the output
    is not normed. Shapes as in ``decode_step``. form: gate_family, lower_bound, A_log, dt_bias, ...; plan: null_slot, ..."""

    conv_weight: Sequence[_Tensor]
    conv_state: Sequence[_Tensor]
    state: _Tensor
    form: Form
    norm_weight: _Tensor | None = None
    norm_eps: float = 1e-5
    conv_bias: Sequence[_Tensor] | None = None
    layout: str = "SD"
    plan: PlanOptions = dataclasses.field(default_factory=PlanOptions)

    def __call__(self, x: Sequence[_Tensor], gate: _Tensor, beta: _Tensor, z: _Tensor | None, out: _Tensor, step: Step) -> None:
        """Runs the step's rows in place: x raw projections [T,channels], gate [T,HV,K], beta [T,HV], z and out [T,HV,V]. Rows
        of no group are left alone."""
        if (z is None) != (self.norm_weight is None):
            raise ValueError("z: wanted exactly where the layer has a norm_weight")
        for group, width in ((step.decode, 1), (step.spec, step.width)):
            if group is not None:
                self._decode(x, gate, beta, z, out, group, width)
        if step.prefill is not None:
            self._prefill(x, gate, beta, z, out, step.prefill)

    def _decode(
        self,
        x: Sequence[_Tensor],
        gate: _Tensor,
        beta: _Tensor,
        z: _Tensor | None,
        out: _Tensor,
        group: Group,
        width: int,
    ) -> None:
        rows = {"begin": group.begin, "length": group.length, "slots": group.slots, "accepted": group.accepted}
        if self.conv_bias is None:
            ops.decode_step(
                x, self.conv_weight, self.conv_state, gate, beta, self.state, z=z, norm_weight=self.norm_weight,
                norm_eps=self.norm_eps, out=out, width=width, layout=self.layout, **rows, **self.form, **self.plan,
            )  # fmt: skip
            return
        # decode_step has no bias; its bits are those of the operators one after another.
        y = ops.conv_update(
            x, self.conv_weight, self.conv_state, bias=self.conv_bias, width=width, layout=self.layout, **rows, **self.plan
        )
        q, k, v = self._split(y, gate, out)
        raw = ops.decode(
            q, k, v, gate, beta, self.state, out=None if z is not None else out, width=width, **rows, **self.form, **self.plan
        )
        self._norm(raw, z, out, group)

    def _prefill(
        self, x: Sequence[_Tensor], gate: _Tensor, beta: _Tensor, z: _Tensor | None, out: _Tensor, group: Group
    ) -> None:
        rows = {"begin": group.begin, "length": group.length, "slots": group.slots}
        rows["has_initial_state"] = group.has_initial_state
        y = ops.conv_prefill(x, self.conv_weight, self.conv_state, layout=self.layout, bias=self.conv_bias, **rows, **self.plan)
        q, k, v = self._split(y, gate, out)
        raw = ops.prefill(
            q, k, v, gate, beta, state=self.state, out=None if z is not None else out, **rows, **self.form, **self.plan
        )
        self._norm(raw, z, out, group)

    def _split(self, y: Sequence[_Tensor], gate: _Tensor, out: _Tensor) -> tuple[_Tensor, ...]:
        """q, k and v per head of the convolution's output."""
        keys, values = gate.shape[-1], out.shape[-1]
        if len(y) == 1:
            v_channels = gate.shape[-2] * values
            y = y[0].split([(y[0].shape[-1] - v_channels) // 2] * 2 + [v_channels], dim=-1)
        return tuple(t.unflatten(-1, (-1, size)) for t, size in zip(y, (keys, keys, values), strict=True))

    def _norm(self, raw: _Tensor, z: _Tensor | None, out: _Tensor, group: Group) -> None:
        """The gated norm of the group's rows of `raw` into `out`; without a norm `raw` is `out`."""
        if z is None:
            return
        normed = ops.gated_norm(raw, z, self.norm_weight, eps=self.norm_eps)
        covered = _covered(group, out.shape[0])
        out.copy_(torch.where(covered[:, None, None], normed, out))


def _covered(group: Group, rows: int) -> _Tensor:
    """bool [rows]: rows of the token buffer that belong to the group."""
    r = torch.arange(rows, device=group.begin.device)[:, None]
    return ((r >= group.begin) & (r < group.begin + group.length)).any(dim=1)


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """What is active on a thread: copy plans and mixers by layer name, and the step."""

    copies: libkda.CopySet | None
    layers: Mapping[str, Callable[..., None]]
    step: Step | None


_active = threading.local()


@contextlib.contextmanager
def serving(
    copies: libkda.CopySet | None = None,
    *,
    layers: Mapping[str, Callable[..., None]] | None = None,
    step: Step | None = None,
) -> Iterator[LayerContext]:
    """Makes a published copy set (for state_gather, state_scatter), mixers and the step (for ``attention``) active on this
    thread until the block ends. Blocks may nest."""
    context = LayerContext(copies, layers or {}, step)
    before = getattr(_active, "context", None)
    set_before = OPERATORS.libkda_torch_enter(copies.handle if copies is not None else None)
    _active.context = context
    try:
        yield context
    finally:
        _active.context = before
        OPERATORS.libkda_torch_enter(set_before)


def _attention(x: list[_Tensor], gate: _Tensor, beta: _Tensor, z: _Tensor | None, core_attn_out: _Tensor, layer: str) -> None:
    context = getattr(_active, "context", None)
    if context is None or context.step is None:
        raise libkda.PreconditionFailed(
            f"layer {layer!r}: wanted an active step (with libkda.torch.serving(layers=..., step=...)), got none on this thread"
        )
    mixer = context.layers.get(layer)
    if mixer is None:
        raise libkda.NotFound(f"layer: wanted one of {', '.join(sorted(context.layers))}, got {layer!r}")
    mixer(x, gate, beta, z, core_attn_out, context.step)


_library = torch.library.Library("libkda", "IMPL")
for _key in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _key)


def attention(
    x: Sequence[_Tensor], gate: _Tensor, beta: _Tensor, z: _Tensor | None, core_attn_out: _Tensor, layer: str
) -> None:
    """Runs a layer's mixer, found by name in the active context, on the active step; opaque to compilers. Shapes as in
    ``Mixer``. ``libkda.PreconditionFailed`` without an active step, ``libkda.NotFound`` for an unknown layer."""
    torch.ops.libkda.attention(list(x), gate, beta, z, core_attn_out, layer)

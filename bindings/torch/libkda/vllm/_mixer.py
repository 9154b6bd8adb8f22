"""What a layer does on a step: libkda's operators, straight on the step's buffers and the layer's pools.

decode and speculative rows   decode_step: conv, recurrence and gated norm in one pass, slots in place
prefill rows                  conv, prefill (initial states read and final states and checkpoints written by slot), gated norm

Scratch and the two intermediates of a prefill (conv output, output before the norm) come from vLLM's workspace, booked for the
engine's bounds before it is locked; no view is kept between calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from libkda import torch as kt
from libkda.vllm._metadata import Group, Rows, Step

_Tensor = torch.Tensor
NULL_SLOT = 0  # vLLM's null block
_ALIGNMENT = 256  # bytes


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer's sizes on this rank, its numeric form and the engine's bounds."""

    heads: int
    head_dim: int
    lower_bound: float | None
    dtype: torch.dtype
    state_dtype: torch.dtype
    conv_dtype: torch.dtype
    conv_columns: int
    width: int  # 1 + drafts
    layout: str  # of the conv pool: SD or DS
    norm_eps: float | None  # None: the layer norms after the mixer
    max_tokens: int
    max_sequences: int
    batch_invariant: bool


@dataclasses.dataclass(frozen=True)
class Parameters:
    """conv weights fp32 (one of q, k and v merged, or three), A_log fp32 [H], dt_bias fp32
    [H*K], norm weight fp32 [V]."""

    conv: list[_Tensor]
    A_log: _Tensor
    dt_bias: _Tensor
    norm: _Tensor | None


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The layer's parameters and a step's rows, at most those that belong to requests: x per conv part [T, channels], gate
    [T,H,K], beta [T,H], z and out [T,H,V]; pools: conv per part and state."""

    parameters: Parameters
    x: list[_Tensor]
    gate: _Tensor
    beta: _Tensor
    z: _Tensor | None
    out: _Tensor
    conv: list[_Tensor]
    state: _Tensor


_own: dict[torch.device, _Tensor] = {}


def _workspace(device: torch.device, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[_Tensor]:
    """vLLM's workspace of this micro-batch, or one of our own where there is none (CPU)."""
    if is_workspace_manager_initialized():
        return current_workspace_manager().get_simultaneous(*wanted)
    sizes = [(torch.Size(shape).numel() * dtype.itemsize + 255) // 256 * 256 for shape, dtype in wanted]
    memory = _own.get(device)
    if memory is None or memory.numel() < sum(sizes) + 256:
        memory = _own[device] = torch.empty(sum(sizes) + 256, dtype=torch.uint8, device=device)
    begin, views = -memory.data_ptr() % 256, []
    for (shape, dtype), size in zip(wanted, sizes, strict=True):
        exact = torch.Size(shape).numel() * dtype.itemsize
        views.append(memory[begin : begin + exact].view(dtype).reshape(shape))
        begin += size
    return views


class Mixer:
    """The operators' calls of one layer."""

    def __init__(self, shape: Shape, *, prefill_backend: str | None) -> None:
        self.shape = shape
        family = "softplus" if shape.lower_bound is None else "bounded"
        plan = dict(
            null_slot=NULL_SLOT, batch_invariant=shape.batch_invariant, max_tokens=shape.max_tokens,
            max_sequences=shape.max_sequences,
        )  # fmt: skip
        form = dict(gate_family=family, lower_bound=shape.lower_bound)
        eps = {} if shape.norm_eps is None else {"norm_eps": shape.norm_eps}
        self._decode_words = kt.plan_words(**form, **plan, **eps, layout=shape.layout)
        self._spec_words = kt.plan_words(**form, **plan, **eps, layout=shape.layout, width=shape.width)
        self._conv_words = kt.plan_words(**plan, layout=shape.layout)
        self._prefill_words = kt.plan_words(**form, **plan, backend=prefill_backend)
        self._scratch = {"prefill": 0, "decode": 0, "spec": 0}

    def book(self, phases: Sequence[str], inputs: Inputs) -> None:
        """Makes the plans of `phases` for tensors laid out as `inputs` are, and reserves their workspace. Runs nothing.
        libkda.Unsupported (a RuntimeError) says with every unmet condition why a phase cannot be served."""
        device = inputs.out.device
        for phase in phases:
            between = self._memory(inputs, phase, 0)[:-1]
            with kt.measure() as need:
                for group in self._examples(device, phase):
                    kt._call(self._run, phase, inputs, group, between)
            self._scratch[phase] = max(self._scratch[phase], need.bytes)
            self._memory(inputs, phase, self._scratch[phase])

    def __call__(self, inputs: Inputs, step: Step) -> None:
        """Writes the step's rows of `out`, the slots' states and windows, and checkpoints. Each phase has the workspace to
        itself: what one leaves there the next does not read."""
        for phase in ("decode", "spec", "prefill"):
            group = getattr(step, phase)
            if group is None:
                continue
            need = self._scratch[phase]
            *between, scratch = self._memory(inputs, phase, need)
            with kt.scratch(scratch if need else None):
                self._run(phase, inputs, group, between)

    def _memory(self, i: Inputs, phase: str, scratch: int) -> list[_Tensor | None]:
        """A prefill's conv output per part and, before a norm, its raw output; and the operators' scratch, last."""
        s = self.shape
        wanted: list[tuple[tuple[int, ...], torch.dtype]] = []
        if phase == "prefill":
            wanted += [((s.max_tokens, weight.shape[0]), s.dtype) for weight in i.parameters.conv]
            if s.norm_eps is not None:
                wanted.append(((s.max_tokens, s.heads, s.head_dim), s.dtype))
        if not wanted and not scratch:
            return [None]
        return list(_workspace(i.out.device, *wanted, ((scratch and scratch + _ALIGNMENT,), torch.uint8)))

    def _examples(self, device: torch.device, phase: str) -> list[Group]:
        """One request of one token, each way a plan of the phase may be asked for."""
        one = torch.ones(1, dtype=torch.int32, device=device)
        rows = Rows({"begin": torch.zeros_like(one), "length": one}, slice(0, 1), slice(0, 1))
        if phase == "decode":
            return [Group(rows, one)]
        if phase == "spec":
            return [Group(rows, one[:, None].expand(1, self.shape.width).contiguous(), accepted=one)]
        flags = torch.zeros(1, dtype=torch.bool, device=device)
        return [Group(rows, one, flags), Group(rows, one, flags, None, one[:, None], one[:, None])]

    def _run(self, phase: str, i: Inputs, group: Group, between: list[_Tensor | None]) -> None:
        if phase == "prefill":
            self._prefill(i, group, between)
            return
        p = i.parameters
        torch.ops.libkda.decode_step(
            i.x, p.conv, i.conv, i.gate, i.beta, i.out, i.state, self._decode_words if phase == "decode" else self._spec_words,
            z=i.z, norm_weight=p.norm, slots=group.slots, accepted=group.accepted, A_log=p.A_log, dt_bias=p.dt_bias,
            **group.rows.sequences,
        )  # fmt: skip

    def _prefill(self, i: Inputs, group: Group, between: list[_Tensor | None]) -> None:
        p, s, ops, tokens = i.parameters, self.shape, torch.ops.libkda, i.out.shape[0]
        rows = dict(
            slots=group.slots, has_initial_state=group.has_initial_state, checkpoint_offsets=group.checkpoint_offsets,
            checkpoint_slots=group.checkpoint_slots, **group.rows.sequences,
        )  # fmt: skip
        convolved = [between[part][:tokens] for part in range(len(p.conv))]
        ops.conv_prefill(i.x, p.conv, i.conv, convolved, self._conv_words, **rows)
        qkv = convolved if len(convolved) == 3 else convolved[0].chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (s.heads, s.head_dim)) for t in qkv)
        raw = i.out if s.norm_eps is None else between[-1][:tokens]
        ops.prefill(q, k, v, i.gate, i.beta, raw, i.state, self._prefill_words, A_log=p.A_log, dt_bias=p.dt_bias, **rows)
        if s.norm_eps is None:
            return
        at = group.rows.tokens
        norm = dict(eps=s.norm_eps, max_tokens=s.max_tokens)
        if isinstance(at, slice):
            ops.gated_norm(raw[at], i.z[at], p.norm, i.out[at], **norm)
        else:  # between speculative rows, which are normed already
            raw, z = raw[at], i.z[at]
            i.out.index_copy_(0, at, kt.gated_norm(raw, z, p.norm, **norm))

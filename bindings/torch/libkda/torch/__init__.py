"""PyTorch operators: ``torch.ops.libkda.*`` on CPU and CUDA, and a function for each that allocates what is left out.

Dimension letters: N sequences, T token rows, H query/key heads, HV value heads (a multiple of H), K key dim, V value dim,
W conv width, L window columns. io dtype: float32, bfloat16 or float16, of q, k, v, x, z and out alike; gate and beta: io
dtype or float32; pools: any of the three. Token tensors may have any outer strides (slices of one projection included);
nothing is copied or made contiguous, and what cannot be read is refused.

Pools are updated in place. Calls run on the current stream, allocate nothing but results and scratch from PyTorch's
allocator, never synchronise, can be captured in CUDA graphs (after one eager call, which makes the plan) and trace under
``torch.compile(fullgraph=True)``. There is no backward pass.

Errors: ValueError names the argument, what was wanted and what came, and nothing was written; ``libkda.Unsupported`` (a
RuntimeError) if no implementation, or not the named one, can serve the call, with every unmet condition; ``libkda.NotFound``
(a KeyError) for an unknown layer. Index *values* are never an error (``checked=True`` reports them). The raw operators raise
RuntimeError where it is not ValueError.

The raw operators take what does not change from call to call as words: ``plan_words(gate_family="softplus", width=3)`` gives
their ``plan`` argument, "gate_family=softplus width=3".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import Unpack

from libkda._errors import BY_STATUS
from libkda.torch import _fakes
from libkda.torch._options import (
    AttentionOptions,
    ConvOptions,
    Form,
    PlanOptions,
    Sequences,
    Slots,
    SummaryOptions,
    plan_words,
    split,
)

_fakes.register()
_ops = torch.ops.libkda
_Tensor = torch.Tensor


def _call(op: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The operator's call; an error that names a status gets the status's type (spec G-5)."""
    if torch.compiler.is_compiling():
        return op(*arguments, **keywords)
    try:
        return op(*arguments, **keywords)
    except RuntimeError as error:
        status, _, message = str(error).partition(": ")
        if status in BY_STATUS:
            raise BY_STATUS[status](message) from None
        raise


# The tensors behind `plan` of decode and decode_step, in the order of their schemas: by position they are parsed sooner.
_ROWS = (
    "slots", "write_slots", "accepted", "has_initial_state", "A_log", "dt_bias", "cu_seqlens", "begin", "length", "num_active",
    "out_rows",
)  # fmt: skip


def _rows(tensors: dict[str, Any], **own: Any) -> list[_Tensor | None]:
    """Takes them out of `tensors`; what is left there the operator does not know."""
    tensors.update(own)
    return [tensors.pop(name, None) for name in _ROWS]


def _out(rows: _Tensor, shape: Sequence[int], o: AttentionOptions | ConvOptions) -> _Tensor:
    """Output rows that no sequence covers are zero when the operator's function makes the output."""
    covered = o.get("cu_seqlens") is None and o.get("begin") is None and o.get("num_active") is None
    return rows.new_empty(shape) if covered else rows.new_zeros(shape)


def prefill(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    gate: _Tensor,
    beta: _Tensor,
    *,
    state: _Tensor | None = None,
    out: _Tensor | None = None,
    out_rows: _Tensor | None = None,
    final_state: _Tensor | None = None,
    checkpoint_offsets: _Tensor | None = None,
    checkpoint_slots: _Tensor | None = None,
    checkpoint_states: _Tensor | None = None,
    chunk_indices: _Tensor | None = None,
    chunk_offsets: _Tensor | None = None,
    stages: _Tensor | None = None,
    fresh: bool = False,
    store_final: bool = True,
    **options: Unpack[AttentionOptions],
) -> _Tensor:
    """Chunked attention over whole prompts or pieces of them. Returns out [T,HV,V].

    q, k [T,H,K], v [T,HV,V], gate [T,HV,K], beta [T,HV], or all with a batch dimension in front. ``state``: a pool
    [slots,HV,V,K] with ``slots``, or packed [N,HV,V,K]; read at the start (unless ``fresh``, or by has_initial_state) and
    written at the end (unless not ``store_final``), or to ``final_state`` [N,HV,V,K]. Checkpoints: offsets [N,Ck] in tokens,
    to ``checkpoint_slots`` [N,Ck] of the pool or ``checkpoint_states`` [N,Ck,HV,V,K]. ``out_rows`` int [T]: row r goes to
    out[out_rows[r]]. chunk_indices, chunk_offsets: from ``metadata``.
    stages: from ``segment_prepare`` of the same tokens and sequences.
    """
    if out is None:
        out = _out(v, v.shape, options)
    plan, tensors = split(options, fresh=fresh, store_final=store_final)
    _call(
        _ops.prefill,
        q, k, v, gate, beta, out, state, plan,
        final_state=final_state, checkpoint_offsets=checkpoint_offsets, checkpoint_slots=checkpoint_slots,
        checkpoint_states=checkpoint_states, chunk_indices=chunk_indices, chunk_offsets=chunk_offsets,
        out_rows=out_rows, stages=stages, **tensors,
    )  # fmt: skip
    return out


def decode(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    gate: _Tensor,
    beta: _Tensor,
    state: _Tensor,
    *,
    out: _Tensor | None = None,
    out_rows: _Tensor | None = None,
    accepted: _Tensor | None = None,
    width: int = 1,
    final_only: bool = False,
    fresh: bool = False,
    **options: Unpack[AttentionOptions],
) -> _Tensor:
    """One token, or a window of up to ``width`` (base and drafts), per sequence. Returns out [T,HV,V].

    Tensors as in ``prefill``; B sequences of one token are [B,1,...]. With width > 1 ``slots`` is [N,width]: the state after
    token t goes to slots[n,t], and ``accepted`` int32 [N] (1..width) says which column of the last step to start from.
    ``final_only``: only the last state is stored, to slots[n] or slots[n,0].
    """
    if out is None:
        out = _out(v, v.shape, options)
    plan, tensors = split(options, width=width, final_only=final_only, fresh=fresh)
    rows = _rows(tensors, accepted=accepted, out_rows=out_rows)
    _call(_ops.decode, q, k, v, gate, beta, out, state, plan, *rows, **tensors)
    return out


def verify_record(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    gate: _Tensor,
    beta: _Tensor,
    state: _Tensor,
    record_u: _Tensor,
    record_kg: _Tensor,
    record_count: _Tensor,
    *,
    width: int,
    out: _Tensor | None = None,
    out_rows: _Tensor | None = None,
    record_rows: _Tensor | None = None,
    accepted: _Tensor | None = None,
    fold: bool = False,
    fresh: bool = False,
    **options: Unpack[AttentionOptions],
) -> _Tensor:
    """A verify window per sequence with one state and a record per token, for ``commit``. Returns out [T,HV,V].

    record_u fp32 [rows,HV,width,V], record_kg [rows,HV,width,2K] of the gate's dtype, record_count int32 [rows]; the row of a
    sequence is its slot, or record_rows [N]. ``fold``: the previous step's records are committed first, by ``accepted``.
    """
    if out is None:
        out = _out(v, v.shape, options)
    plan, tensors = split(options, width=width, fold=fold, fresh=fresh)
    _call(
        _ops.verify_record,
        q, k, v, gate, beta, out, state, record_u, record_kg, record_count, plan,
        record_rows=record_rows, accepted=accepted, out_rows=out_rows, **tensors,
    )  # fmt: skip
    return out


def commit(
    state: _Tensor,
    slots: _Tensor,
    accepted: _Tensor,
    record_u: _Tensor,
    record_kg: _Tensor,
    record_count: _Tensor,
    *,
    record_rows: _Tensor | None = None,
    conv_state: Sequence[_Tensor] | None = None,
    conv_width: int = 0,
    layout: str = "SD",
    num_active: _Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> None:
    """Replays the first accepted[n] (0..count) recorded tokens into the state; record_count becomes 0.

    state [slots,HV,V,K], slots [N], accepted int32 [N], records as in ``verify_record``; conv_state: the conv pools (one or
    three) whose windows move along, with ``conv_width`` = W and their ``layout``. Takes A_log, dt_bias and the gate's form.
    """
    plan, tensors = split(options, conv_width=conv_width, layout=layout)
    _call(
        _ops.commit,
        state, slots, accepted, record_u, record_kg, record_count, plan,
        record_rows=record_rows, conv_state=None if conv_state is None else list(conv_state), num_active=num_active, **tensors,
    )  # fmt: skip


def decode_step(
    x: Sequence[_Tensor],
    conv_weight: Sequence[_Tensor],
    conv_state: Sequence[_Tensor],
    gate: _Tensor,
    beta: _Tensor,
    state: _Tensor,
    *,
    value_dim: int | None = None,
    z: _Tensor | None = None,
    norm_weight: _Tensor | None = None,
    norm_eps: float = 1e-5,
    out: _Tensor | None = None,
    out_rows: _Tensor | None = None,
    record_u: _Tensor | None = None,
    record_kg: _Tensor | None = None,
    record_count: _Tensor | None = None,
    record_rows: _Tensor | None = None,
    accepted: _Tensor | None = None,
    width: int = 1,
    fold: bool = False,
    final_only: bool = False,
    fresh: bool = False,
    layout: str = "SD",
    **options: Unpack[AttentionOptions],
) -> _Tensor:
    """Conv, SiLU, attention and gated norm of a decode step in one pass. Returns out [T,HV,V]; the same bits as
    ``conv_update``, ``decode`` (or ``verify_record``) and ``gated_norm`` one after another.

    x: raw projections, one [T, 2*H*K + HV*V] (q, k, v merged) or three [T,channels]; conv_weight fp32 [channels,W] or
    [channels,1,W]; conv_state pools [slots,L,channels] (layout "SD") or [slots,channels,L] ("DS"), L >= W-1+drafts. z [T,HV,V]
    and norm_weight fp32 [V]; without z the output is not normed. State, slots, width, accepted as in ``decode``; with the
    three record tensors, records as in ``verify_record`` (then L >= W+drafts).
    """
    if out is None:
        shape = [*beta.shape, value_dim if value_dim is not None else state.shape[-2]]
        out = _out(x[0], shape, options)
    plan, tensors = split(options, norm_eps=norm_eps, width=width, fold=fold, final_only=final_only, fresh=fresh, layout=layout)
    rows = _rows(tensors, accepted=accepted, out_rows=out_rows)
    _call(
        _ops.decode_step,
        list(x), list(conv_weight), list(conv_state), gate, beta, out, state, plan,
        z, norm_weight, record_u, record_kg, record_count, record_rows, *rows, **tensors,
    )  # fmt: skip
    return out


def conv_prefill(
    x: Sequence[_Tensor],
    weight: Sequence[_Tensor],
    state: Sequence[_Tensor] | None = None,
    *,
    bias: Sequence[_Tensor] | None = None,
    out: Sequence[_Tensor] | None = None,
    out_rows: _Tensor | None = None,
    checkpoint_offsets: _Tensor | None = None,
    checkpoint_slots: _Tensor | None = None,
    fresh: bool = False,
    activation: bool = True,
    layout: str = "SD",
    **options: Unpack[ConvOptions],
) -> list[_Tensor]:
    """Short causal convolution and SiLU over prompts. Returns one tensor [T,channels] for each of x.

    x: one tensor (q, k, v merged) or three, [T,channels]; weight fp32 [channels,W] or [channels,1,W]; bias fp32 [channels].
    state: pools as in ``decode_step``; the last W-1 inputs of each sequence go to its slot, and what was there comes before
    its first token (unless ``fresh``, or by has_initial_state).
    """
    outs = [_out(t, t.shape, options) for t in x] if out is None else list(out)
    plan, tensors = split(options, fresh=fresh, activation=activation, layout=layout)
    _call(
        _ops.conv_prefill,
        list(x), list(weight), None if state is None else list(state), outs, plan,
        bias=None if bias is None else list(bias), checkpoint_offsets=checkpoint_offsets,
        checkpoint_slots=checkpoint_slots, out_rows=out_rows, **tensors,
    )  # fmt: skip
    return outs


def conv_update(
    x: Sequence[_Tensor],
    weight: Sequence[_Tensor],
    state: Sequence[_Tensor],
    *,
    bias: Sequence[_Tensor] | None = None,
    out: Sequence[_Tensor] | None = None,
    out_rows: _Tensor | None = None,
    accepted: _Tensor | None = None,
    record_count: _Tensor | None = None,
    record_rows: _Tensor | None = None,
    width: int = 1,
    records: bool = False,
    fold: bool = False,
    fresh: bool = False,
    activation: bool = True,
    layout: str = "SD",
    **options: Unpack[ConvOptions],
) -> list[_Tensor]:
    """The convolution of a decode step or verify window of up to ``width`` tokens. Returns one tensor [T,channels] per x.

    Tensors as in ``conv_prefill``; L >= W-1+drafts columns. ``accepted`` int32 [N]: where the window starts; ``records``: as
    in ``verify_record`` (L >= W+drafts), with ``fold``, record_count int32 [rows] and record_rows.
    """
    outs = [_out(t, t.shape, options) for t in x] if out is None else list(out)
    plan, tensors = split(options, width=width, records=records, fold=fold, fresh=fresh, activation=activation, layout=layout)
    _call(
        _ops.conv_update,
        list(x), list(weight), list(state), outs, plan,
        bias=None if bias is None else list(bias), accepted=accepted, record_count=record_count, record_rows=record_rows,
        out_rows=out_rows, **tensors,
    )  # fmt: skip
    return outs


def gated_norm(
    o: _Tensor,
    z: _Tensor,
    weight: _Tensor,
    *,
    out: _Tensor | None = None,
    eps: float = 1e-5,
    backend: str | None = None,
    max_tokens: int = 0,
) -> _Tensor:
    """o * rsqrt(mean(o^2) + eps) * weight * sigmoid(z) per value head. o, z [T,HV,V], weight fp32 [V]; returns [T,HV,V]."""
    if out is None:
        out = o.new_empty(o.shape)
    _call(_ops.gated_norm, o, z, weight, out, eps=eps, backend=backend, max_tokens=max_tokens)
    return out


def segment_summary(k: _Tensor, v: _Tensor, gate: _Tensor, beta: _Tensor, **options: Unpack[SummaryOptions]) -> _Tensor:
    """Each sequence's map of states, St_out = St_in*M + B: fp32 [N,HV,V+K,K], rows 0..V-1 = B, then M. Tensors as in
    ``prefill``."""
    plan, tensors = split(options)
    return _call(_ops.segment_summary, k, v, gate, beta, plan, **tensors)


def segment_prepare(
    q: _Tensor, k: _Tensor, v: _Tensor, gate: _Tensor, beta: _Tensor, **options: Unpack[SummaryOptions]
) -> tuple[_Tensor, _Tensor]:
    """``segment_summary``, and the tokens' preparation for a ``prefill`` on the same tensors, parameters and sequences, which
    takes it as ``stages`` and gives the same bits sooner: uint8 [bytes], none where the implementation keeps nothing. 1.2 KiB a
    token and value head on CUDA."""
    plan, tensors = split(options)
    return _call(_ops.segment_prepare, q, k, v, gate, beta, plan, **tensors)


def segment_merge(
    summaries: _Tensor,
    *,
    initial_state: _Tensor | None = None,
    present: _Tensor | None = None,
    backend: str | None = None,
) -> tuple[_Tensor, _Tensor]:
    """Start states fp32 [P,HV,V,K] and final state fp32 [HV,V,K] of P shards from their summaries fp32 [P,HV,V+K,K] in token
    order. initial_state fp32 [HV,V,K]: default zero; present bool [P]: false = an empty shard, whose summary is not read."""
    return _call(_ops.segment_merge, summaries, initial_state=initial_state, present=present, backend=backend)


def state_gather(pool: _Tensor, indices: _Tensor, has_initial_state: _Tensor | None, layer: str) -> _Tensor:
    """packed[i] = pool[indices[i]], zeros for an index outside the pool or a false flag. pool [slots,HV,V,K] of any dtype and
    slot stride, indices int32 or int64 [n], has_initial_state bool [n]; returns dense [n,HV,V,K]. ``layer`` names a plan of
    the copy set that ``libkda.torch.serving`` made active on this thread; ``libkda.PreconditionFailed`` if there is none."""
    return _call(_ops.state_gather, pool, indices, has_initial_state, layer)


def state_scatter(pool: _Tensor, indices: _Tensor, packed: _Tensor, layer: str) -> None:
    """pool[indices[i]] = packed[i] for every index inside the pool; nothing else changes. As ``state_gather``."""
    _call(_ops.state_scatter, pool, indices, packed, layer)


class StepTables(NamedTuple):
    """Tables of a serving step (include/kda/metadata.h says what each holds). Row lists are padded with -1; the slot tables
    are empty without slot_table."""

    counts: _Tensor
    prefill_rows: _Tensor
    decode_rows: _Tensor
    spec_rows: _Tensor
    prefill_begin: _Tensor
    prefill_length: _Tensor
    decode_begin: _Tensor
    decode_length: _Tensor
    spec_begin: _Tensor
    spec_length: _Tensor
    non_spec_query_start_loc: _Tensor
    spec_query_start_loc: _Tensor
    prefill_query_start_loc: _Tensor
    non_spec_token_indx: _Tensor
    spec_token_indx: _Tensor
    prefill_slots: _Tensor
    decode_slots: _Tensor
    spec_slots: _Tensor
    has_initial_state: _Tensor
    num_accepted: _Tensor
    spec_sequence_masks: _Tensor
    chunk_indices: _Tensor
    chunk_offsets: _Tensor


def metadata(
    query_start_loc: _Tensor,
    *,
    num_tokens: int,
    max_tokens: int,
    max_sequences: int,
    computed: _Tensor | None = None,
    has_state: _Tensor | None = None,
    prefilling: _Tensor | None = None,
    drafts: _Tensor | None = None,
    num_active: _Tensor | None = None,
    accepted: _Tensor | None = None,
    slot_table: _Tensor | None = None,
    width: int = 1,
    chunk: int = 64,
    by_drafts: bool = False,
    null_slot: int = -1,
    checked: bool = False,
    backend: str | None = None,
    out: StepTables | None = None,
) -> StepTables:
    """Sorts the rows of a step into prefill, decode and speculative groups, on the device and without a host copy.

    query_start_loc int32 or int64 [N+1]; computed int32 [N] or has_state bool [N]; prefilling bool [N], drafts int32 [N] (-1:
    none), accepted int32 [N], slot_table int [N] or [N,>=width]; num_tokens: rows of the token buffer. ``out``: persistent
    tables of an earlier call, written in place (for graphs).
    """
    step = dict(
        computed=computed, has_state=has_state, prefilling=prefilling, drafts=drafts, num_active=num_active,
        accepted=accepted, slot_table=slot_table, num_tokens=num_tokens, max_tokens=max_tokens,
        max_sequences=max_sequences, width=width, chunk=chunk, by_drafts=by_drafts, null_slot=null_slot, checked=checked,
        backend=backend,
    )  # fmt: skip
    if out is None:
        return StepTables(*_call(_ops.metadata, query_start_loc, **step))
    tables = out._asdict()
    if slot_table is None:
        tables.update(prefill_slots=None, decode_slots=None, spec_slots=None)
    _call(_ops.metadata_out, query_start_loc, **step, **tables)
    return out


from libkda.torch._scratch import measure, scratch
from libkda.torch.serving import Group, LayerContext, Mixer, Step, attention, serving

# After what it is made of.
from libkda.torch.layer import KDALayer, LayerState  # isort: skip

__all__ = [
    "AttentionOptions",
    "ConvOptions",
    "Form",
    "Group",
    "KDALayer",
    "LayerContext",
    "LayerState",
    "Mixer",
    "PlanOptions",
    "Sequences",
    "Slots",
    "Step",
    "StepTables",
    "SummaryOptions",
    "attention",
    "commit",
    "conv_prefill",
    "conv_update",
    "decode",
    "decode_step",
    "gated_norm",
    "measure",
    "metadata",
    "plan_words",
    "prefill",
    "scratch",
    "segment_merge",
    "segment_prepare",
    "segment_summary",
    "serving",
    "state_gather",
    "state_scatter",
    "verify_record",
]

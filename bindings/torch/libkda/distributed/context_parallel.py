"""Context-parallel prefill: the tokens of a batch over several ranks (spec S-9).

A layer has two collectives: the conv history (the last W-1 raw rows of every piece), then one for the recurrent states.
A rank's share of the second, for each piece of a sequence that several ranks hold: its map of states St_out = St_in*M + B,
fp32 [HV,V+K,K]. From the maps in token order all ranks work out the same start states and final states, bit for bit.

A piece is cut into local segments, which run side by side where heads are few: their maps are found first, composed into
the piece's map (and the map of every prefix of it), and, once the piece's start state is there, one product gives every
segment's start state, from which outputs are computed. What each part costs: docs/distributed.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

import libkda
from libkda import torch as ops
from libkda.distributed.peers import Peers, Pending
from libkda.distributed.shards import Piece, Shards
from libkda.torch._options import SummaryOptions
from libkda.torch.layer import KDALayer, LayerState

_Tensor = torch.Tensor
_Result = TypeVar("_Result")
_SHORTEST = 1024  # tokens of a local segment, unless it is asked for


def local_segments(device: torch.device, value_heads: int, length: int) -> int:
    """Into how many segments a piece is cut: as many as fill a GPU's multiprocessors with one (segment, head) each."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(16, processors // value_heads, length // _SHORTEST))


def _kept(method: Callable[[Any, int], _Result]) -> Callable[[Any, int], _Result]:
    """A method of one number whose results its object keeps."""

    @functools.wraps(method)
    def call(self: Any, number: int) -> _Result:
        key = method.__name__, number
        if key not in self._results:
            self._results[key] = method(self, number)
        return self._results[key]

    return call


class Layout:
    """What follows from the shards alone, as index tensors on a device; made once for all layers of a step."""

    def __init__(self, shards: Shards, rank: int, device: Any, *, replicate: bool = True, segments: int | None = None) -> None:
        if not 0 <= rank < shards.ranks:
            raise libkda.InvalidArgument(f"shards: wanted rows for rank {rank}, got {shards.ranks} ranks")
        self.shards, self.rank, self.device, self.replicate = shards, rank, torch.device(device), replicate
        self.segments = segments
        self._results: dict[tuple[str, int], Any] = {}
        self.pieces = shards.pieces[rank]
        self.split = [p for p in self.pieces if shards.is_split(p.sequence)]
        self.whole = [p for p in self.pieces if not shards.is_split(p.sequence)]
        everyone = [n for n in range(len(shards.lengths)) if replicate or shards.owner(n) == rank]
        # Sequences whose last state goes to this rank's pool; those of whole pieces elsewhere come as states.
        self.stored = [n for n in everyone if replicate or shards.is_split(n) or not shards.lengths[n]]

    def ints(self, values: Sequence[int]) -> _Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)

    def ranges(self, pieces: Sequence[Piece]) -> dict[str, _Tensor]:
        """begin and length of pieces in this rank's rows."""
        rows = torch.tensor([[p.begin for p in pieces], [p.length for p in pieces]], dtype=torch.int32, device=self.device)
        return {"begin": rows[0], "length": rows[1]}

    @functools.cached_property
    def whole_rows(self) -> dict[str, _Tensor]:
        return self.ranges(self.whole)

    @functools.cached_property
    def all_rows(self) -> dict[str, _Tensor]:
        return self.ranges(self.pieces)

    @functools.cached_property
    def whole_sequences(self) -> _Tensor:
        return self.ints(p.sequence for p in self.whole)

    @functools.cached_property
    def piece_sequences(self) -> _Tensor:
        return self.ints(p.sequence for p in self.pieces)

    @functools.cached_property
    def stored_sequences(self) -> _Tensor:
        return self.ints(self.stored)

    @_kept
    def cut(self, value_heads: int) -> tuple[list[list[Piece]], dict[str, _Tensor], _Tensor]:
        """Segments of each split piece, their rows, and the sequence of each."""
        cuts = []
        for piece in self.split:
            count = self.segments or local_segments(self.device, value_heads, piece.length)
            step = -(-piece.length // (64 * count)) * 64
            starts = range(0, piece.length, step)
            cuts.append(
                [
                    dataclasses.replace(piece, first=piece.first + s, begin=piece.begin + s, length=min(step, piece.length - s))
                    for s in starts
                ]
            )
        flat = [s for segments in cuts for s in segments]
        return cuts, self.ranges(flat), self.ints(s.sequence for s in flat)

    @functools.cached_property
    def blocks(self) -> list[dict[int, int]]:
        """By rank: what it sends for each sequence, and where: in units of (V+K)*K for maps of split pieces (0), which come
        first, then states (1) of whole pieces."""
        found = []
        for pieces in self.shards.pieces:
            split = [p.sequence for p in pieces if self.shards.is_split(p.sequence)]
            states = [p.sequence for p in pieces if not self.shards.is_split(p.sequence)] if self.replicate else []
            found.append(dict(enumerate_from(split, states)))
        return found

    def sent(self, rank: int) -> tuple[int, int]:
        """Maps and states that a rank sends."""
        pieces = self.shards.pieces[rank]
        split = sum(self.shards.is_split(p.sequence) for p in pieces)
        return split, len(pieces) - split if self.replicate else 0

    @functools.cached_property
    def exchanges(self) -> bool:
        """Whether there is a second collective at all."""
        return any(sum(self.sent(r)) for r in range(self.shards.ranks))

    # -- conv history -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def most_pieces(self) -> int:
        return max(map(len, self.shards.pieces))

    @_kept
    def tails(self, width: int) -> _Tensor:
        """Local rows that this rank sends: the last `width` of each piece, most_pieces * width of them; what a short or
        missing piece lacks is row 0, which nobody reads."""
        rows = [max(0, p.begin + p.length - back) for p in self.pieces for back in range(width, 0, -1)]
        return self.ints(rows + [0] * (self.most_pieces * width - len(rows)))

    @_kept
    def windows(self, width: int) -> tuple[_Tensor, _Tensor]:
        """Rows of the table [cached windows | gathered tails] that make the history of each local piece, and the last window
        of each sequence."""
        n = len(self.shards.lengths)

        def row(sequence: int, place: tuple[Piece | None, int]) -> int:
            piece, back = place
            if piece is None:
                return sequence * width + back
            return n * width + (piece.rank * self.most_pieces + piece.number + 1) * width - back

        history = [row(p.sequence, at) for p in self.pieces for at in self.shards.history(p.sequence, p.first, width)]
        last = [row(i, at) for i in self.stored_windows for at in self.shards.history(i, self.shards.lengths[i], width)]
        return self.ints(history), self.ints(last)

    @functools.cached_property
    def stored_windows(self) -> list[int]:
        return [n for n in range(len(self.shards.lengths)) if self.replicate or self.shards.owner(n) == self.rank]

    @functools.cached_property
    def window_sequences(self) -> _Tensor:
        return self.ints(self.stored_windows)


def enumerate_from(split: Sequence[int], states: Sequence[int]) -> list[tuple[int, int]]:
    return [(n, i) for i, n in enumerate((*split, *states))]


@dataclasses.dataclass
class _Conv:
    """A convolution whose history is on its way."""

    pending: Pending
    cached: list[_Tensor]


@dataclasses.dataclass
class _Core:
    """A prefill whose states are on their way."""

    pending: Pending | None
    tokens: tuple[_Tensor, ...]
    out: _Tensor
    first: _Tensor | None  # initial states fp32 of the sequences that need them, by sequence
    prefixes: list[_Tensor]  # per split piece: maps of what lies before each of its segments
    stages: _Tensor | None = None  # the split pieces' preparation, made once for maps and outputs
    rows: _Tensor | None = None  # where the start states of the split pieces' segments lie among themselves; -1: inactive


class ContextParallel:
    """Prefill of a batch whose token rows lie on the ranks of a group.

    Every rank calls the same methods in the same order with its own rows; slots, flags and pools are those of the whole batch
    on every rank: pools hold the same initial states everywhere. With ``replicate`` (default) every rank ends with every
    sequence's state and window, the same bits; without, only the rank that holds a sequence's last token does.

    group, timeout, store: as in ``Peers``. Where a rank fails or is gone, the others raise ``PeerError`` within the timeout.
    """

    def __init__(self, group: Any = None, *, timeout: float = 60.0, store: Any = None, peers: Peers | None = None) -> None:
        self.peers = Peers(group, timeout=timeout, store=store) if peers is None else peers
        self._copies: dict[Any, Any] = {}

    @property
    def rank(self) -> int:
        return self.peers.rank

    def layout(self, shards: Shards, device: Any, *, replicate: bool = True, segments: int | None = None) -> Layout:
        """For all layers of a step. segments: local segments of a piece instead of the built-in choice."""
        if shards.ranks != self.peers.ranks:
            raise libkda.InvalidArgument(f"shards: wanted rows for {self.peers.ranks} ranks, got {shards.ranks}")
        return Layout(shards, self.rank, device, replicate=replicate, segments=segments)

    # -- the whole layer ----------------------------------------------------------------------------------------------

    def layer(
        self,
        layer: KDALayer,
        x: _Tensor,
        states: LayerState,
        layout: Layout,
        slots: _Tensor,
        has_initial_state: _Tensor | None = None,
    ) -> _Tensor:
        """A KDA layer on this rank's rows x [rows,D]; slots [N], has_initial_state bool [N] (default: all start from zero) of
        the whole batch. Returns [rows,D]; with a tensor-parallel share, its partial sum. Both collectives run beside
        projections that do not wait for them: gates beside the history, the output gate beside the states."""
        with self.peers.telling():
            flags = _flags(has_initial_state, slots)
            qkv = layer.project_qkv(x)
            conv = self.start_conv([qkv], [states.conv], layout, layer.whole.conv_width, slots, flags, layer.plan)
            gate, beta = layer.project_gates(x)
            taps, bias = [layer.conv_weight], None if layer.conv_bias is None else [layer.conv_bias]
            (y,) = self.finish_conv(conv, [qkv], taps, [states.conv], layout, slots, {**layer.plan, "bias": bias})
            sizes = [layer.key_channels, layer.key_channels, layer.value_channels]
            heads = (layer.num_heads, layer.num_heads, layer.num_value_heads)
            q, k, v = (t.unflatten(-1, (n, -1)) for t, n in zip(y.split(sizes, dim=-1), heads, strict=True))
            options = {**layer.form, **layer.plan}
            core = self.start_prefill(q, k, v, gate, beta, states.state, layout, slots, flags, **options)
            z = layer.project_z(x)
            o = self.finish_prefill(core, states.state, layout, slots, flags, **options)
            if x.shape[0] > 0:
                o = ops.gated_norm(o, z, layer.norm_weight, eps=layer.whole.norm_eps)
            return layer.project_out(o)

    def prefill(
        self, q: _Tensor, k: _Tensor, v: _Tensor, gate: _Tensor, beta: _Tensor, *, state: _Tensor, layout: Layout,
        slots: _Tensor, has_initial_state: _Tensor | None = None, **options: Any,
    ) -> _Tensor:  # fmt: skip
        """``libkda.torch.prefill`` of this rank's rows (tensors as there, after the convolution). Returns out [rows,HV,V]."""
        with self.peers.telling():
            flags = _flags(has_initial_state, slots)
            core = self.start_prefill(q, k, v, gate, beta, state, layout, slots, flags, **options)
            return self.finish_prefill(core, state, layout, slots, flags, **options)

    def conv_prefill(
        self, x: Sequence[_Tensor], weight: Sequence[_Tensor], state: Sequence[_Tensor], *, layout: Layout, slots: _Tensor,
        has_initial_state: _Tensor | None = None, **options: Any,
    ) -> list[_Tensor]:  # fmt: skip
        """``libkda.torch.conv_prefill`` of this rank's rows; pools [slots,L,channels], or [slots,channels,L] with layout_name
        "DS"."""
        with self.peers.telling():
            flags = _flags(has_initial_state, slots)
            conv = self.start_conv(x, state, layout, weight[0].shape[-1], slots, flags, options)
            return self.finish_conv(conv, x, weight, state, layout, slots, options)

    # -- convolution --------------------------------------------------------------------------------------------------

    def start_conv(
        self, x: Sequence[_Tensor], state: Sequence[_Tensor], layout: Layout, width: int, slots: _Tensor, flags: _Tensor,
        plan: Any,
    ) -> _Conv:  # fmt: skip
        """Sends the last rows of this rank's pieces and reads the cached windows."""
        h = width - 1
        ds = plan.get("layout", "SD") == "DS"
        live = _live(slots, state[0].shape[0], plan.get("null_slot", -1)) & flags
        at = slots.clamp(0, max(0, state[0].shape[0] - 1)).long()
        cached = []
        for pool in state:
            window = pool[at].transpose(1, 2) if ds else pool[at]
            cached.append(torch.where(live[:, None, None], window[:, :h], 0))
        rows = torch.cat([t.to(c.dtype) for t, c in zip(x, cached, strict=True)], dim=-1)
        if rows.shape[0] == 0:
            sent = rows.new_zeros(layout.most_pieces * h, rows.shape[1])
        else:
            sent = rows.index_select(0, layout.tails(h))
        return _Conv(self.peers.gather(sent), cached)

    def finish_conv(
        self, conv: _Conv, x: Sequence[_Tensor], weight: Sequence[_Tensor], state: Sequence[_Tensor], layout: Layout,
        slots: _Tensor, plan: Any,
    ) -> list[_Tensor]:  # fmt: skip
        """The rank's rows; the last windows go to the pools."""
        h = weight[0].shape[-1] - 1
        null = plan.get("null_slot", -1)
        gathered = conv.pending.wait().flatten(0, 1)
        history, last = layout.windows(h)
        local, ends = [], []
        for cached, tail in zip(conv.cached, gathered.split([c.shape[-1] for c in conv.cached], dim=-1), strict=True):
            table = torch.cat([cached.flatten(0, 1), tail])
            local.append(table.index_select(0, history).view(-1, h, tail.shape[-1]))
            ends.append(table.index_select(0, last))
        options = {name: plan[name] for name in ("backend", "batch_invariant", "activation", "bias") if name in plan}
        outs = [t.new_empty(t.shape) for t in x]
        if layout.pieces:
            live = _live(slots, state[0].shape[0], null).index_select(0, layout.piece_sequences)
            number = torch.arange(len(layout.pieces), device=slots.device)
            ops.conv_prefill(
                x, weight, local, out=outs, slots=torch.where(live, number, -1), **layout.all_rows, **options
            )  # fmt: skip
        if layout.stored_windows:
            # A window's rows as a sequence of their own leave exactly that window, in any layout of the pool.
            cu = torch.arange(len(layout.stored_windows) + 1, dtype=torch.int32, device=slots.device) * h
            targets = slots.index_select(0, layout.window_sequences)
            rows = [e.to(t.dtype) for e, t in zip(ends, x, strict=True)]
            ops.conv_prefill(
                rows, weight, state, cu_seqlens=cu, slots=targets, fresh=True, null_slot=null,
                layout=plan.get("layout", "SD"), **options,
            )  # fmt: skip
        return outs

    # -- attention ----------------------------------------------------------------------------------------------------

    def start_prefill(
        self, q: _Tensor, k: _Tensor, v: _Tensor, gate: _Tensor, beta: _Tensor, state: _Tensor, layout: Layout,
        slots: _Tensor, flags: _Tensor, **options: Any,
    ) -> _Core:  # fmt: skip
        """Finds what this rank's pieces do to the states and sends it; whole sequences are done where nobody waits for them."""
        heads, values, keys = v.shape[-2], v.shape[-1], k.shape[-1]
        out = v.new_empty(v.shape)
        core = _Core(None, (q, k, v, gate, beta), out, None, [])
        # The longest part first: while the device is at it, the host makes ready what follows the exchange.
        maps = self._summaries(core, layout, options)
        live = _live(slots, state.shape[0], options.get("null_slot", -1))
        if any(layout.shards.is_split(n) or not length for n, length in enumerate(layout.shards.lengths)):
            at = slots.clamp(0, max(0, state.shape[0] - 1)).long()
            core.first = torch.where((live & flags)[:, None, None, None], state[at].float(), 0)
        if layout.split:
            mine = live.index_select(0, layout.cut(heads)[2])
            core.rows = torch.where(mine, torch.arange(mine.shape[0], device=mine.device), -1)
        finals = None
        if layout.whole and layout.replicate:
            finals = v.new_zeros(len(layout.whole), heads, values, keys, dtype=torch.float32)
            self._run_whole(core, state, layout, slots, flags, finals, options)
        if layout.exchanges:
            most = max(m * (values + keys) + s * values for m, s in map(layout.sent, range(layout.shards.ranks)))
            sent = k.new_zeros(most, heads, keys, dtype=torch.float32)
            mine = [m.transpose(0, 1) for m in maps] + ([] if finals is None else list(finals.transpose(1, 2)))
            row = 0
            for block in mine:
                sent[row : row + block.shape[0]].copy_(block)
                row += block.shape[0]
            core.pending = self.peers.gather(sent)
        if layout.whole and not layout.replicate:
            self._run_whole(core, state, layout, slots, flags, None, options)
        return core

    def finish_prefill(
        self, core: _Core, state: _Tensor, layout: Layout, slots: _Tensor, flags: _Tensor, **options: Any
    ) -> _Tensor:
        """Outputs of this rank's rows; last states go to the pool."""
        q, k, v, gate, beta = core.tokens
        values = v.shape[-1]
        gathered = None if core.pending is None else core.pending.wait()
        starts: dict[int, _Tensor] = {}  # of this rank's piece, by sequence
        finals: dict[int, _Tensor] = {}
        for n, pieces in enumerate(layout.shards.by_sequence):
            is_mine = any(p.rank == self.rank for p in pieces)
            if len(pieces) > 1 and (is_mine or n in layout.stored):
                maps = torch.stack([_block(gathered, layout, p.rank, n, values) for p in pieces])
                before, finals[n] = ops.segment_merge(maps, initial_state=core.first[n])
                for i, p in enumerate(pieces):
                    if p.rank == self.rank:
                        starts[n] = before[i]
            elif len(pieces) == 1 and layout.replicate:
                finals[n] = _block(gathered, layout, pieces[0].rank, n, values)
            elif not pieces and n in layout.stored:
                finals[n] = core.first[n]
        if layout.split:
            self._run_split(core, starts, layout, options)
        if layout.stored:
            packed = torch.stack([finals[n] for n in layout.stored]).to(state.dtype)
            targets = slots.index_select(0, layout.stored_sequences)
            null = options.get("null_slot", -1)
            self._scatter(state, torch.where(targets == null, -1, targets), packed)
        return core.out

    def _summaries(self, core: _Core, layout: Layout, options: Any) -> list[_Tensor]:
        """The map of each split piece [HV,V+K,K]; core.prefixes gets those of what lies before each segment."""
        if not layout.split:
            return []
        k, v = core.tokens[1:3]
        heads, values, keys = v.shape[-2], v.shape[-1], k.shape[-1]
        cuts, rows, _ = layout.cut(heads)
        maps, core.stages = ops.segment_prepare(*core.tokens, **rows, **_summary_options(options))
        found = []
        for own in maps.split([len(segments) for segments in cuts]):
            # St -> St*M + B for [0; I] instead of a state gives B over M: one merge composes maps.
            identity = own.new_zeros(heads, values + keys, keys)
            identity[:, values:].diagonal(dim1=-2, dim2=-1).fill_(1)
            if own.shape[0] == 1:
                core.prefixes.append(identity[None])
                found.append(own[0])
                continue
            wide = torch.cat([own[:, :, :values], torch.zeros_like(own[:, :, values:]), own[:, :, values:]], dim=2)
            prefixes, whole = ops.segment_merge(wide, initial_state=identity)
            core.prefixes.append(prefixes)
            found.append(whole)
        return found

    def _run_whole(
        self, core: _Core, state: _Tensor, layout: Layout, slots: _Tensor, flags: _Tensor, finals: _Tensor | None, options: Any
    ) -> None:
        own = layout.whole_sequences
        ops.prefill(
            *core.tokens, out=core.out, state=state, final_state=finals, slots=slots.index_select(0, own),
            has_initial_state=flags.index_select(0, own), **layout.whole_rows, **options,
        )  # fmt: skip

    def _run_split(self, core: _Core, starts: dict[int, _Tensor], layout: Layout, options: Any) -> None:
        heads = core.tokens[2].shape[-2]
        cuts, rows, _ = layout.cut(heads)
        states = []
        for segments, prefixes in zip(cuts, core.prefixes, strict=True):
            start, count = starts[segments[0].sequence], len(segments)
            if count == 1:
                states.append(start[None])
                continue
            # Segments beside one another as if they were heads: one step of a merge for all of them.
            spread = start.expand(count, *start.shape).reshape(count * heads, *start.shape[1:])
            _, after = ops.segment_merge(prefixes.flatten(0, 1)[None], initial_state=spread)
            states.append(after.view(count, *start.shape))
        options = {name: value for name, value in options.items() if name != "null_slot"}
        ops.prefill(
            *core.tokens, out=core.out, state=torch.cat(states), slots=core.rows, store_final=False, stages=core.stages,
            **rows, **options,
        )  # fmt: skip

    def _scatter(self, pool: _Tensor, slots: _Tensor, packed: _Tensor) -> None:
        key = (pool.device, pool.dtype, pool.shape[1:], pool.stride(), pool.shape[0], slots.dtype)
        plan = self._copies.get(key)
        if plan is None or packed.shape[0] > plan[1]:
            context = libkda.Context(str(pool.device))
            plan = libkda.StateCopyPlan(context, pool=pool, max_selected=packed.shape[0]), packed.shape[0]
            self._copies[key] = plan
        stream = torch.cuda.current_stream(pool.device).cuda_stream if pool.is_cuda else None
        plan[0].scatter(pool=pool, indices=slots, packed=packed, stream=stream)


def _flags(given: _Tensor | None, slots: _Tensor) -> _Tensor:
    return torch.zeros(slots.shape[0], dtype=torch.bool, device=slots.device) if given is None else given


def _live(slots: _Tensor, rows: int, null_slot: int) -> _Tensor:
    return (slots >= 0) & (slots < rows) & (slots != null_slot)  # spec P-5; null_slot -1 is below 0 anyway


def _block(gathered: _Tensor | None, layout: Layout, rank: int, sequence: int, values: int) -> _Tensor:
    """What a rank sent for a sequence: [HV,V+K,K] or [HV,V,K]."""
    assert gathered is not None
    keys = gathered.shape[-1]
    number, (maps, _) = layout.blocks[rank][sequence], layout.sent(rank)
    begin = min(number, maps) * (values + keys) + max(0, number - maps) * values
    end = begin + (values + keys if number < maps else values)
    return gathered[rank, begin:end].transpose(0, 1)


def _summary_options(options: Any) -> SummaryOptions:
    return {name: value for name, value in options.items() if name != "null_slot"}  # type: ignore[return-value]

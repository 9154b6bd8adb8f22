"""Fake kernels: what tracing compilers run instead of the operators. They look at metadata alone and refuse what the real
kernels would refuse for it; results have the true shape, dtype, strides and device (spec Q-3, Q-4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from libkda.torch import _load
from libkda.torch._options import read_words

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INDEX = (torch.int32, torch.int64)
_Tensor = torch.Tensor | None


class Check:
    """Sizes seen so far by letter: the first tensor that has a dimension sets it, later ones must agree."""

    def __init__(self, name: str, first: torch.Tensor, **sizes: Any) -> None:
        self.device_name, self.device, self.sizes = name, first.device, dict(sizes)

    def __call__(self, name: str, t: _Tensor, dims: str, dtypes: tuple[torch.dtype, ...] = (), *, dense: int = 0) -> None:
        """dims: letters or numbers with spaces between; "..." stands for the leading dimensions of the token tensors."""
        if t is None:
            return
        wanted = dims.split()
        if t.device != self.device:
            raise ValueError(f"{name}: wanted {self.device} as {self.device_name} has, got {t.device}")
        if dtypes and t.dtype not in dtypes:
            raise ValueError(f"{name}: wanted {' or '.join(map(str, dtypes))}, got {t.dtype}")
        if wanted[0] == "...":
            lead = self.sizes["..."]
            wanted = [f"_{i}" for i in range(len(lead))] + wanted[1:]
            self.sizes.update({f"_{i}": size for i, size in enumerate(lead)})
        if t.dim() != len(wanted):
            raise ValueError(f"{name}: wanted [{dims.replace(' ', ', ')}], got {t.dim()} dimensions")
        for i, letter in enumerate(wanted):
            size = int(letter) if letter.isdigit() else self.sizes.setdefault(letter, t.shape[i])
            self.that(t.shape[i] == size, f"{name}: wanted size {size} in dimension {i} ({letter}), got {t.shape[i]}")
        stride = 1
        for i in range(t.dim() - 1, t.dim() - 1 - dense, -1):
            self.that(t.stride(i) == stride, f"{name}: wanted its last {dense} dimensions dense, got stride {t.stride(i)}")
            stride = stride * t.shape[i]

    @staticmethod
    def that(condition: Any, message: str) -> None:
        torch._check_value(condition, lambda: message)

    def elements(self, name: str, t: _Tensor, count: Any) -> None:
        if t is None:
            return
        if t.dtype != torch.float32:
            raise ValueError(f"{name}: wanted torch.float32, got {t.dtype}")
        self.that(t.numel() == count, f"{name}: wanted {count} values, got {t.numel()}")

    def sequences(self, token: torch.Tensor, row_dims: int, o: dict[str, Any]) -> None:
        """Sets N and the token tensors' leading dimensions."""
        cu, begin, length = o.get("cu_seqlens"), o.get("begin"), o.get("length")
        if cu is not None and (begin is not None or length is not None):
            raise ValueError("sequences: wanted cu_seqlens or begin and length, got both")
        if (begin is None) != (length is None):
            raise ValueError("sequences: wanted begin and length, got one")
        most = row_dims if cu is not None or begin is not None else row_dims + 1
        if not row_dims <= token.dim() <= most:
            raise ValueError(f"{self.device_name}: wanted a tensor of rank {row_dims} to {most}, got {token.dim()}")
        self.sizes["..."] = tuple(token.shape[: token.dim() - row_dims + 1])
        self.sizes["N"] = token.shape[0] if token.dim() > row_dims else 1
        if cu is not None:
            self("cu_seqlens", cu, "N+1", _INDEX)
            self.sizes["N"] = cu.shape[0] - 1
        elif begin is not None:
            self.sizes["N"] = begin.shape[0]
            self("begin", begin, "N", _INDEX)
            self("length", length, "N", _INDEX)
        self("num_active", o.get("num_active"), "1", (torch.int32,))

    def rows(self, o: dict[str, Any]) -> None:
        """slots, counts and flags of the sequences."""
        for name in ("slots", "write_slots"):
            t = o.get(name)
            self(name, t, "N" if t is None or t.dim() < 2 else f"N {name}.columns", _INDEX)
        self("accepted", o.get("accepted"), "N", (torch.int32,))
        self("has_initial_state", o.get("has_initial_state"), "N", (torch.bool,))

    def attention(self, gate: torch.Tensor, beta: torch.Tensor, io: torch.dtype, o: dict[str, Any]) -> None:
        family, logits = o.get("gate_family"), o.get("beta_is_logits") != "0"
        if family not in ("softplus", "bounded", "plain"):
            raise ValueError(f"gate_family: wanted 'softplus', 'bounded' or 'plain', got {family!r}")
        self("gate", gate, "... HV K", (torch.float32,) if family == "plain" else (io, torch.float32))
        self("beta", beta, "... HV", (io, torch.float32) if logits else (torch.float32,))
        if family == "softplus" and o.get("A_log") is None:
            raise ValueError("A_log: wanted float32 [HV] with gate_family 'softplus', got none")
        self.elements("A_log", o.get("A_log"), self.sizes["HV"])
        self.elements("dt_bias", o.get("dt_bias"), self.sizes["HV"] * self.sizes["K"])

    def state(self, name: str, t: _Tensor, rows: str) -> None:
        self(name, t, f"{rows} HV V K", _FLOATS, dense=3)

    def out(self, t: torch.Tensor, o: dict[str, Any], dims: str, io: torch.dtype) -> None:
        rows = o.get("out_rows")
        self("out", t, f"out_rows {dims}" if rows is not None else f"... {dims}", (io,))


def _io(name: str, t: torch.Tensor) -> torch.dtype:
    if t.dtype not in _FLOATS:
        raise ValueError(f"{name}: wanted {' or '.join(map(str, _FLOATS))}, got {t.dtype}")
    return t.dtype


def _tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, o: Any) -> Check:
    c, io = Check("q", q), _io("q", q)
    c.sequences(q, 3, o)
    c("q", q, "... H K", (io,))
    c("k", k, "... H K", (io,))
    c("v", v, "... HV V", (io,))
    c.attention(gate, beta, io, o)
    c.rows(o)
    return c


def prefill(q: Any, k: Any, v: Any, gate: Any, beta: Any, out: Any, state: Any, plan: str, **o: Any) -> None:
    o.update(read_words(plan))
    c = _tokens(q, k, v, gate, beta, o)
    c.out(out, o, "HV V", q.dtype)
    c.state("state", state, "slots" if o.get("slots") is not None else "N")
    c.state("final_state", o.get("final_state"), "N")
    c("checkpoint_offsets", o.get("checkpoint_offsets"), "N Ck", _INDEX)
    c("checkpoint_slots", o.get("checkpoint_slots"), "N Ck", _INDEX)
    c("checkpoint_states", o.get("checkpoint_states"), "N Ck HV V K", _FLOATS)


def decode(q: Any, k: Any, v: Any, gate: Any, beta: Any, out: Any, state: Any, plan: str, **o: Any) -> None:
    o.update(read_words(plan))
    c = _tokens(q, k, v, gate, beta, o)
    c.out(out, o, "HV V", q.dtype)
    c.state("state", state, "slots" if o.get("slots") is not None else "N")


def _records(c: Check, o: dict[str, Any], gate: torch.dtype) -> None:
    c("record_u", o.get("record_u"), "rows HV width V", (torch.float32,))
    c("record_count", o.get("record_count"), "rows", (torch.int32,))
    kg = o.get("record_kg")
    if kg is not None:
        c("record_kg", kg, "rows HV width 2K", (gate,))
        c.that(kg.shape[3] == 2 * c.sizes["K"], f"record_kg: wanted size 2K in dimension 3, got {kg.shape[3]}")
    c("record_rows", o.get("record_rows"), "N", _INDEX)


def verify_record(
    q: Any,
    k: Any,
    v: Any,
    gate: Any,
    beta: Any,
    out: Any,
    state: Any,
    record_u: Any,
    record_kg: Any,
    record_count: Any,
    plan: str,
    **o: Any,
) -> None:
    decode(q, k, v, gate, beta, out, state, plan, **o)
    c = Check("q", q, HV=gate.shape[-2], K=gate.shape[-1], V=v.shape[-1], width=int(read_words(plan).get("width", 1)))
    _records(c, {**o, "record_u": record_u, "record_kg": record_kg, "record_count": record_count}, gate.dtype)


def commit(
    state: Any, slots: Any, accepted: Any, record_u: Any, record_kg: Any, record_count: Any, plan: str, **o: Any
) -> None:
    o.update(read_words(plan))
    c = Check("state", state)
    c.state("state", state, "slots")
    c.rows({**o, "slots": slots, "accepted": accepted})
    _records(
        c,
        {**o, "record_u": record_u, "record_kg": record_kg, "record_count": record_count},
        _io("record_kg", record_kg),
    )
    c.elements("A_log", o.get("A_log"), c.sizes["HV"])
    c.elements("dt_bias", o.get("dt_bias"), c.sizes["HV"] * c.sizes["K"])


def _parts(**lists: Any) -> int:
    counts = {name: len(tensors) for name, tensors in lists.items() if tensors is not None}
    first, count = next(iter(counts.items()))
    if count not in (1, 3):
        raise ValueError(f"{first}: wanted one tensor (merged) or three (q, k, v), got {count}")
    for name, n in counts.items():
        if n != count:
            raise ValueError(f"{name}: wanted as many tensors as {first} has ({count}), got {n}")
    return count


def _conv(c: Check, i: int, x: Any, weight: Any, state: Any, layout: str) -> None:
    if layout not in ("SD", "DS"):
        raise ValueError(f"layout: wanted 'SD' or 'DS', got {layout!r}")
    c(f"x[{i}]", x[i], f"... C{i}", (x[0].dtype,))
    c(f"weight[{i}]", weight[i], f"C{i} W" if weight[i].dim() == 2 else f"C{i} 1 W", (torch.float32,))
    if state is not None:
        dims = f"slots L C{i}" if layout == "SD" else f"slots C{i} L"
        c(f"state[{i}]", state[i], dims, (x[0].dtype, torch.float32))


def decode_step(
    x: Any, conv_weight: Any, conv_state: Any, gate: Any, beta: Any, out: Any, state: Any, plan: str, **o: Any
) -> None:
    o.update(read_words(plan))
    c, io = Check("x", x[0]), _io("x", x[0])
    c.sequences(x[0], 2, o)
    for i in range(_parts(x=x, conv_weight=conv_weight, conv_state=conv_state)):
        _conv(c, i, x, conv_weight, conv_state, o.get("layout", "SD"))
    c.attention(gate, beta, io, o)
    c.rows(o)
    c.out(out, o, "HV V", io)
    c.state("state", state, "slots" if o.get("slots") is not None else "N")
    c("z", o.get("z"), "... HV V", (io,))
    c("norm_weight", o.get("norm_weight"), "V", (torch.float32,))
    _records(c, o, gate.dtype)


def conv_prefill(x: Any, weight: Any, state: Any, out: Any, plan: str, **o: Any) -> None:
    o.update(read_words(plan))
    c, io = Check("x", x[0]), _io("x", x[0])
    c.sequences(x[0], 2, o)
    for i in range(_parts(x=x, weight=weight, state=state, out=out, bias=o.get("bias"))):
        _conv(c, i, x, weight, state, o.get("layout", "SD"))
        c.out(out[i], o, f"C{i}", io)
        if o.get("bias") is not None:
            c.elements(f"bias[{i}]", o["bias"][i], c.sizes[f"C{i}"])
    c.rows(o)


def gated_norm(o: Any, z: Any, weight: Any, out: Any, **_: Any) -> None:
    c, io = Check("o", o), _io("o", o)
    c.sequences(o, 3, {})
    for name, t in (("o", o), ("z", z), ("out", out)):
        c(name, t, "... HV V", (io,))
    c("weight", weight, "V", (torch.float32,))


def segment_summary(k: Any, v: Any, gate: Any, beta: Any, plan: str, **o: Any) -> torch.Tensor:
    o.update(read_words(plan))
    c, io = Check("k", k), _io("k", k)
    c.sequences(k, 3, o)
    c("k", k, "... H K", (io,))
    c("v", v, "... HV V", (io,))
    c.attention(gate, beta, io, o)
    n, heads, keys, values = (c.sizes[letter] for letter in ("N", "HV", "K", "V"))
    return k.new_empty([n, heads, values + keys, keys], dtype=torch.float32)


def segment_prepare(q: Any, k: Any, v: Any, gate: Any, beta: Any, plan: str, **o: Any) -> tuple[torch.Tensor, torch.Tensor]:
    summary = segment_summary(k, v, gate, beta, plan, **o)
    c = Check("k", k)
    c.sequences(k, 3, o)
    c("k", k, "... H K")
    c("q", q, "... H K", (k.dtype,))
    # How much is kept is the implementation's business.
    return summary, k.new_empty([torch.library.get_ctx().new_dynamic_size()], dtype=torch.uint8)


def segment_merge(summaries: Any, **o: Any) -> tuple[torch.Tensor, torch.Tensor]:
    c = Check("summaries", summaries)
    c("summaries", summaries, "P HV V+K K", (torch.float32,), dense=3)
    shards, heads, rows, keys = summaries.shape
    c("initial_state", o.get("initial_state"), "HV V K", (torch.float32,))
    c("present", o.get("present"), "P", (torch.bool,))
    return summaries.new_empty([shards, heads, rows - keys, keys]), summaries.new_empty([heads, rows - keys, keys])


def state_gather(pool: Any, indices: Any, has_initial_state: Any, layer: str) -> torch.Tensor:
    c = Check("pool", pool)
    c("pool", pool, "slots HV V K", dense=3)
    c("indices", indices, "n", _INDEX)
    c("has_initial_state", has_initial_state, "n", (torch.bool,))
    return pool.new_empty([indices.shape[0], *pool.shape[1:]])


def state_scatter(pool: Any, indices: Any, packed: Any, layer: str) -> None:
    c = Check("pool", pool)
    c("pool", pool, "slots HV V K", dense=3)
    c("indices", indices, "n", _INDEX)
    c("packed", packed, "n HV V K", (pool.dtype,), dense=3)


def metadata(query_start_loc: Any, **o: Any) -> tuple[torch.Tensor, ...]:
    c = Check("query_start_loc", query_start_loc)
    c("query_start_loc", query_start_loc, "N+1", _INDEX)
    c.sizes["N"] = query_start_loc.shape[0] - 1
    c("computed", o.get("computed"), "N", (torch.int32,))
    for name in ("has_state", "prefilling"):
        c(name, o.get(name), "N", (torch.bool,))
    for name in ("drafts", "accepted"):
        c(name, o.get(name), "N", (torch.int32,))
    if (o.get("computed") is None) == (o.get("has_state") is None):
        raise ValueError("step: wanted computed or has_state, got both or neither")
    rows, tokens, width = o["max_sequences"], o["max_tokens"], o.get("width", 1)
    m = min(rows, tokens)
    chunks = m + (tokens - m) // o.get("chunk", 64)
    slots = rows if o.get("slot_table") is not None else 0
    offset, i32, flag = query_start_loc.dtype, torch.int32, torch.bool
    shapes = (
        ([8], i32), ([rows], i32), ([rows], i32), ([rows], i32),
        ([rows], offset), ([rows], offset), ([rows], offset), ([rows], offset), ([rows], offset), ([rows], offset),
        ([rows + 1], offset), ([rows + 1], offset), ([rows + 1], offset),
        ([tokens], i32), ([min(tokens, rows * width)], i32),
        ([slots], i32), ([slots], i32), ([slots, width], i32),
        ([rows], flag), ([rows], i32), ([rows], flag), ([chunks, 2], offset), ([rows + 1], torch.int64),
    )  # fmt: skip
    return tuple(query_start_loc.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


def metadata_out(query_start_loc: Any, **o: Any) -> None:
    metadata(query_start_loc, **o)


def attention(x: Any, gate: Any, beta: Any, z: Any, core_attn_out: Any, layer: str) -> None:
    c = Check("x", x[0])
    c.sequences(x[0], 2, {})
    _parts(x=x)
    c("gate", gate, "... HV K")
    c("beta", beta, "... HV")
    c("core_attn_out", core_attn_out, "... HV V", (x[0].dtype,))
    c("z", z, "... HV V", (x[0].dtype,))


def _by_name(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Fakes take their arguments by name; tracers give them by position as far as the schema allows."""
    names = [argument.name for argument in getattr(torch.ops.libkda, name).default._schema.arguments]
    return lambda *arguments, **keywords: fake(**dict(zip(names, arguments, strict=False)), **keywords)


def register() -> None:
    """Registers every fake; needs the loaded operators."""
    assert _load.OPERATORS
    fakes = (
        prefill, decode, verify_record, commit, decode_step, conv_prefill, gated_norm, segment_summary, segment_prepare,
        segment_merge, state_gather, state_scatter, metadata, metadata_out, attention,
    )  # fmt: skip
    for name, fake in [("conv_update", conv_prefill), *((f.__name__, f) for f in fakes)]:
        torch.library.register_fake(f"libkda::{name}", _by_name(name, fake))

"""One call of every operator, twice: as torch.ops.libkda takes it and as the C ABI does (through ctypes)."""

import copy
import dataclasses
from typing import Any

import torch

import libkda
import libkda.torch

H, HV, K, V, W, WIDTH = 2, 4, 16, 24, 4, 3
CHANNELS = 2 * H * K + HV * V
OPS = torch.ops.libkda
words = libkda.torch.plan_words


@dataclasses.dataclass
class Case:
    name: str
    op: Any
    args: tuple
    kwargs: dict
    plan: type
    description: dict
    run: dict
    written: list  # tensors that the call changes
    results: list = dataclasses.field(default_factory=list)  # of the C ABI, in the order of the operator's

    def clone(self):
        return copy.deepcopy(dataclasses.replace(self, op=None)), self.op

    def by_operator(self):
        c, op = self.clone()
        returned = op(*c.args, **c.kwargs)
        returned = [] if returned is None else [returned] if isinstance(returned, torch.Tensor) else list(returned)
        return c.written + returned

    def by_abi(self, **changes):
        """Changes go to the description, e.g. backend="reference"."""
        c, _ = self.clone()
        where = next(t for t in c.run.values() if isinstance(t, torch.Tensor)).device
        context = libkda.Context(str(where))
        plan = c.plan(context, **{**c.description, **changes})
        stream = torch.cuda.current_stream(where).cuda_stream if where.type == "cuda" else None
        plan.run(stream=stream, **c.run)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return c.written + c.results


class Inputs:
    def __init__(self, device, dtype=torch.float32, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype

    def normal(self, *shape, dtype=None, scale=1.0):
        values = torch.randn(shape, generator=self.generator) * scale
        return values.to(dtype or self.dtype).to(self.device)

    def integers(self, *values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def empty(self, *shape, dtype=None):
        return torch.full(shape, 7.0, dtype=dtype or self.dtype, device=self.device)

    def tokens(self, count, heads_first=()):
        projection = self.normal(count, CHANNELS + 8)
        q, k, v, _ = projection.split([H * K, H * K, HV * V, 8], dim=-1)
        return {
            "q": q.unflatten(-1, (H, K)),
            "k": k.unflatten(-1, (H, K)),
            "v": v.unflatten(-1, (HV, V)),
            "gate": self.normal(count, HV, K),
            "beta": self.normal(count, HV),
        }

    def parameters(self):
        return {
            "A_log": self.normal(HV, dtype=torch.float32, scale=0.3),
            "dt_bias": self.normal(HV, K, dtype=torch.float32, scale=0.3),
        }

    def pool(self, slots, *shape, dtype=torch.float32):
        """Slots farther apart than their payload, not at the start of the memory."""
        payload = torch.Size(shape).numel()
        memory = self.normal(slots * (payload + 5) + 3, dtype=dtype, scale=0.5)
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return memory.as_strided((slots, *shape), (payload + 5, *strides), 3)


def attention(dtype, max_tokens=64, max_sequences=16, **more):
    return {
        "num_heads": H, "num_value_heads": HV, "key_dim": K, "value_dim": V, "io_dtype": dtype, "gate_dtype": dtype,
        "beta_dtype": dtype, "state_dtype": torch.float32, "gate_family": "softplus", "max_tokens": max_tokens,
        "max_sequences": max_sequences, **more,
    }  # fmt: skip


BOUNDS = {"max_tokens": 64, "max_sequences": 16}
FORM = {"gate_family": "softplus"}


def prefill(device, dtype=torch.float32):
    i = Inputs(device, dtype, 1)
    t, p = i.tokens(40), i.parameters()
    pool, out = i.pool(6, HV, V, K), i.empty(40, HV, V)
    rows = {
        "cu_seqlens": i.integers(0, 7, 7, 40),
        "slots": i.integers(4, 1, 2, dtype=torch.int64),
        "has_initial_state": torch.tensor([True, False, True], device=device),
    }
    return Case(
        "prefill", OPS.prefill, (*t.values(), out, pool, words(**FORM, **BOUNDS)), {**rows, **p}, libkda.PrefillPlan,
        attention(dtype, initial_state="flags"), {**t, **p, **rows, "out": out, "state": pool}, [out, pool],
    )  # fmt: skip


def prefill_packed(device, dtype=torch.float32):
    """Batched, bounded gate, packed states, checkpoints, plain beta."""
    i = Inputs(device, dtype, 2)
    t = {name: x.unflatten(0, (2, 33)) for name, x in i.tokens(66).items()}
    t["beta"] = torch.sigmoid(t["beta"].float())
    first, last = i.normal(2, HV, V, K, dtype=torch.float32), i.empty(2, HV, V, K, dtype=torch.float32)
    out, saved = i.empty(2, 33, HV, V), i.empty(2, 1, HV, V, K, dtype=torch.float32)
    own = {"final_state": last, "checkpoint_offsets": i.integers(16, -1).view(2, 1), "checkpoint_states": saved}
    bounds = {"max_tokens": 128, "max_sequences": 16}
    form = {"gate_family": "bounded", "lower_bound": -5.0}
    return Case(
        "prefill_packed", OPS.prefill,
        (*t.values(), out, first, words(**form, **bounds, beta_is_logits=False, batch_invariant=True)),
        own, libkda.PrefillPlan,
        attention(dtype, **{**bounds, **form}, initial_state="all", beta_form="plain", max_checkpoints=1, flags=1)
        | {"beta_dtype": torch.float32},
        {**t, **own, "out": out, "state": first}, [out, last, saved],
    )  # fmt: skip


def decode(device, dtype=torch.float32):
    i = Inputs(device, dtype, 3)
    t, p = i.tokens(4), i.parameters()
    t = {name: x[:, None] for name, x in t.items()}
    pool, out = i.pool(7, HV, V, K), i.empty(4, 1, HV, V)
    table = i.integers(4, 9, -1, 9, 2, 9, 6, 9).view(4, 2)
    return Case(
        "decode", OPS.decode, (*t.values(), out, pool, words(**FORM, **BOUNDS)), {**p, "slots": table[:, 0]}, libkda.DecodePlan,
        attention(dtype), {**t, **p, "out": out, "state": pool, "slots": table[:, 0]}, [out, pool],
    )  # fmt: skip


def decode_columns(device, dtype=torch.float32):
    i = Inputs(device, dtype, 4)
    t, p = i.tokens(5), i.parameters()
    pool, out = i.pool(9, HV, V, K), i.empty(5, HV, V)
    rows = {
        "begin": i.integers(0, 3, dtype=torch.int64),
        "length": i.integers(3, 2),
        "slots": i.integers(1, 2, 3, 8, 7, 6).view(2, WIDTH),
        "accepted": i.integers(2, 1),
    }
    return Case(
        "decode_columns", OPS.decode, (*t.values(), out, pool, words(**FORM, **BOUNDS, width=WIDTH)), {**rows, **p},
        libkda.DecodePlan, attention(dtype, width=WIDTH), {**t, **p, **rows, "out": out, "state": pool}, [out, pool],
    )  # fmt: skip


def records_of(i, rows=6):
    return {
        "u": i.normal(rows, HV, WIDTH, V, dtype=torch.float32),
        "kg": i.normal(rows, HV, WIDTH, 2 * K),
        "count": torch.full((rows,), 2, dtype=torch.int32, device=i.device),
    }


def verify_record(device, dtype=torch.float32):
    i = Inputs(device, dtype, 5)
    t, p, r = i.tokens(5), i.parameters(), records_of(i)
    pool, out = i.pool(6, HV, V, K), i.empty(5, HV, V)
    rows = {"cu_seqlens": i.integers(0, 2, 5), "slots": i.integers(5, 0), "accepted": i.integers(1, 2)}
    return Case(
        "verify_record", OPS.verify_record,
        (*t.values(), out, pool, *r.values(), words(**FORM, **BOUNDS, width=WIDTH, fold=True)),
        {**rows, **p}, libkda.DecodePlan,
        attention(dtype, width=WIDTH, mode="records", fold=1),
        {**t, **p, **rows, "out": out, "state": pool, "records": r}, [out, pool, *r.values()],
    )  # fmt: skip


def commit(device, dtype=torch.float32):
    i = Inputs(device, dtype, 6)
    p, r = i.parameters(), records_of(i)
    pool, window = i.pool(6, HV, V, K), i.pool(6, W - 1 + WIDTH, CHANNELS, dtype=dtype)
    rows = {"slots": i.integers(3, 1), "accepted": i.integers(2, 1)}
    description = attention(dtype, width=WIDTH, conv_width=W, conv_parts=1, conv_layout="sd", conv_dtype=dtype)
    del description["max_tokens"]
    return Case(
        "commit", OPS.commit, (pool, *rows.values(), *r.values(), words(**FORM, max_sequences=16, conv_width=W)),
        {**p, "conv_state": [window]}, libkda.CommitPlan, description,
        {**p, **rows, "state": pool, "records": r, "conv_state": [window]}, [pool, r["count"], window],
    )  # fmt: skip


def decode_step(device, dtype=torch.float32):
    i = Inputs(device, dtype, 7)
    t, p = i.tokens(5), i.parameters()
    projection = i.normal(5, CHANNELS + 8)
    own = {
        "x": [projection[:, :CHANNELS]],
        "conv_weight": [i.normal(CHANNELS, 1, W, dtype=torch.float32, scale=0.5)],
        "conv_state": [i.pool(9, CHANNELS, W + WIDTH - 2, dtype=dtype)],
    }
    pool, out = i.pool(9, HV, V, K), i.empty(5, HV, V)
    more = {
        "z": i.normal(5, HV, V),
        "norm_weight": i.normal(V, dtype=torch.float32),
        "cu_seqlens": i.integers(0, 3, 5),
        "slots": i.integers(1, 2, 3, 8, 7, 6).view(2, WIDTH),
        "accepted": i.integers(2, 1),
    }
    return Case(
        "decode_step", OPS.decode_step,
        (*own.values(), t["gate"], t["beta"], out, pool, words(**FORM, **BOUNDS, width=WIDTH, layout="DS")),
        {**more, **p}, libkda.DecodeStepPlan,
        attention(dtype, width=WIDTH, conv_width=W, conv_parts=1, conv_layout="ds", conv_dtype=dtype),
        {**own, **more, **p, "gate": t["gate"], "beta": t["beta"], "out": out, "state": pool},
        [out, pool, own["conv_state"][0]],
    )  # fmt: skip


def _conv(device, dtype, seed, name, count, columns, rows, kwargs, description):
    i = Inputs(device, dtype, seed)
    sizes = (H * K, H * K, HV * V)
    x = list(i.normal(count, CHANNELS).split(sizes, dim=-1))
    lists = {
        "x": x,
        "weight": [i.normal(c, W, dtype=torch.float32, scale=0.5) for c in sizes],
        "state": [i.pool(6, columns, c, dtype=dtype) for c in sizes],
        "out": [i.empty(count, c) for c in sizes],
    }
    bias = [i.normal(c, dtype=torch.float32) for c in sizes]
    return Case(
        name, getattr(OPS, name), (*lists.values(), words(**kwargs, **BOUNDS)), {**rows, "bias": bias}, libkda.ConvPlan,
        {"width": W, "parts": 3, "channels": sizes, "io_dtype": dtype, "state_dtype": dtype, "layout": "sd"}
        | {**BOUNDS, **description},
        {**lists, **rows, "bias": bias}, [*lists["out"], *lists["state"]],
    )  # fmt: skip


def conv_prefill(device, dtype=torch.float32):
    i = Inputs(device, dtype)
    rows = {
        "cu_seqlens": i.integers(0, 2, 9),
        "slots": i.integers(5, 3),
        "has_initial_state": torch.tensor([True, False], device=device),
    }
    return _conv(device, dtype, 8, "conv_prefill", 9, W - 1, rows, {}, {"mode": "prefill", "initial_state": "flags"})


def conv_update(device, dtype=torch.float32):
    i = Inputs(device, dtype)
    rows = {"cu_seqlens": i.integers(0, 2, 5), "slots": i.integers(5, 3), "accepted": i.integers(2, 1)}
    description = {"mode": "columns", "verify_width": WIDTH}
    return _conv(device, dtype, 9, "conv_update", 5, W + WIDTH - 2, rows, {"width": WIDTH}, description)


def gated_norm(device, dtype=torch.float32):
    i = Inputs(device, dtype, 10)
    t = {"o": i.normal(9, HV, V), "z": i.normal(9, HV, V), "weight": i.normal(V, dtype=torch.float32)}
    out = i.empty(9, HV, V)
    description = {"num_value_heads": HV, "value_dim": V, "io_dtype": dtype, "eps": 1e-6, "max_tokens": 64}
    return Case(
        "gated_norm", OPS.gated_norm, (*t.values(), out), {"eps": 1e-6, "max_tokens": 64}, libkda.GatedNormPlan,
        description, {**t, "out": out}, [out],
    )  # fmt: skip


def segment_summary(device, dtype=torch.float32):
    i = Inputs(device, dtype, 11)
    t, p = i.tokens(40), i.parameters()
    del t["q"]
    rows = {"cu_seqlens": i.integers(0, 7, 40)}
    result = i.empty(2, HV, V + K, K, dtype=torch.float32)
    return Case(
        "segment_summary", OPS.segment_summary, (*t.values(), words(**FORM, **BOUNDS)), {**rows, **p},
        libkda.SegmentSummaryPlan, attention(dtype), {**t, **p, **rows, "summary": result}, [], [result],
    )  # fmt: skip


def segment_prepare(device, dtype=torch.float32):
    """On the CPU nothing is prepared: the second result is empty."""
    case = segment_summary(device, dtype)
    i = Inputs(device, dtype, 11)
    case.name, case.op = "segment_prepare", OPS.segment_prepare
    case.args = (i.tokens(40)["q"], *case.args)
    case.results.append(torch.empty(0, dtype=torch.uint8, device=device))
    return case


def segment_merge(device, dtype=torch.float32):
    i = Inputs(device, torch.float32, 12)
    summaries, first = i.normal(3, HV, V + K, K, scale=0.2), i.normal(HV, V, K)
    present = torch.tensor([True, False, True], device=device)
    starts, last = i.empty(3, HV, V, K), i.empty(HV, V, K)
    return Case(
        "segment_merge", OPS.segment_merge, (summaries,), {"initial_state": first, "present": present},
        libkda.SegmentMergePlan, {"num_value_heads": HV, "key_dim": K, "value_dim": V, "max_segments": 16},
        {"summaries": summaries, "initial_state": first, "present": present, "start_states": starts, "final_state": last},
        [], [starts, last],
    )  # fmt: skip


def metadata(device, dtype=torch.float32):
    i = Inputs(device)
    step = {
        "computed": i.integers(0, 9, 9, 4),
        "drafts": i.integers(-1, -1, 1, -1),
        "accepted": i.integers(1, 1, 2, 1),
        "slot_table": i.integers(*range(20), dtype=torch.int64).view(4, 5),
    }
    offsets = i.integers(0, 5, 6, 8, 12)
    bounds = {"max_tokens": 70, "max_sequences": 6, "width": 2}
    fake = libkda.torch._fakes.metadata(offsets, **step, **bounds)
    tables = libkda.torch.StepTables(*(torch.empty_like(t) for t in fake))
    return Case(
        "metadata", OPS.metadata, (offsets,), {**step, **bounds, "num_tokens": 12}, libkda.MetadataPlan, bounds,
        {**step, "query_start_loc": offsets, "num_tokens": 12, "tables": tables._asdict()}, [], list(tables),
    )  # fmt: skip


MAKERS = (
    prefill, prefill_packed, decode, decode_columns, verify_record, commit, decode_step, conv_prefill, conv_update,
    gated_norm, segment_summary, segment_prepare, segment_merge, metadata,
)  # fmt: skip

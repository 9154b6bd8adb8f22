#!/usr/bin/env python3
"""libkda beside FLA's and transformers' own implementations, in one process on one GPU.

stock.py [--rounds N] [--only WORDS] [--json FILE]   measures; prints a table
stock.py --compile [--only WORDS]                    compiles FLA's kernels for the cases, in processes side by side

Variants of a case get the same tensors. `FLA` is FLA as installed (its backend libkda switched off, its Triton kernels tuned
by Triton as always), `FLA, libkda` the same call with `import libkda.fla`, `libkda` the operator itself. In each round every
variant is timed eagerly (events around a few calls; a call that the host cannot keep up with shows the host's time) and as a
replay of a CUDA graph, in freshly shuffled order; ratios are taken within rounds. Where state is read, calls go round copies
of the tensors that do not fit the L2 together. Outputs and final states are compared with the recurrence in fp64.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
from triton.runtime.autotuner import Autotuner

TUNING_MS = 5, 25  # warm-up and measuring of a configuration; Triton's 25 and 100 take minutes for all cases
SHARDS = 4


def in_shard(shard):
    """From here on kernels have every SHARDS-th of their configurations, which are compiled and not measured."""

    def compile_only(call, quantiles):
        call()
        return [0.0] * len(quantiles)

    whole = Autotuner.__init__

    def part(self, fn, arg_names, configs, *rest, **keywords):
        whole(self, fn, arg_names, [*configs[shard::SHARDS], *configs[:1]], *rest, **keywords)

    Autotuner.__init__ = part
    Autotuner.do_bench = property(lambda _: compile_only)


def in_short():
    """From here on configurations are measured for TUNING_MS."""
    warmup, rep = TUNING_MS
    Autotuner.do_bench = property(lambda _: functools.partial(triton.testing.do_bench, warmup=warmup, rep=rep))


if "KDA_STOCK_SHARD" in os.environ:
    in_shard(int(os.environ["KDA_STOCK_SHARD"]))
else:
    in_short()
os.environ["FLA_LIBKDA"] = "0"
import fla

import libkda
import libkda.fla
import libkda.torch as kt

DEVICE, DIM = "cuda", 128
L2_BYTES = 320 << 20
_Tensor = torch.Tensor


@dataclass
class Variant:
    """calls: one for each copy of the tensors; each returns what is compared (out, and a final state or None)."""

    calls: list[Callable[[], tuple]]
    through_libkda: bool = False
    graph: bool = True


@dataclass
class Case:
    variants: dict[str, Variant]
    want: Callable[[], tuple]  # fp64
    stock: str = "FLA"
    calls: int = 3  # of a sample
    restore: Callable[[], None] = lambda: None  # states of the first copy as they were
    errors: dict[str, list] = field(default_factory=dict)
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def tokens(batch, length, heads):
    """q, k, v, raw gate and beta logits of bf16, and the gate's parameters."""
    q, k, v, gate = (normal(batch, length, heads, DIM) for _ in range(4))
    parameters = {
        "A_log": torch.log(torch.empty(heads, device=DEVICE).uniform_(1, 16)),
        "dt_bias": normal(heads * DIM, dtype=torch.float32),
    }
    return (q, k, v, gate, normal(batch, length, heads)), parameters


def recurrence(inputs, parameters, bound, state=None):
    """The definition in fp64, token by token: out [B,T,H,V] and final state [B,H,V,K]."""
    q, k, v, gate, beta = (t.double() for t in inputs)
    a, bias = parameters["A_log"].double().exp()[:, None], parameters["dt_bias"].double().view(-1, DIM)
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    raw = gate + bias
    decay = (-a * torch.nn.functional.softplus(raw) if bound is None else bound * torch.sigmoid(a * raw)).exp_()
    beta = beta.sigmoid()[..., None]
    out = torch.empty_like(v)
    s = torch.zeros(*v.shape[:1], v.shape[2], DIM, DIM, dtype=torch.float64, device=DEVICE) if state is None else state.double()
    for t in range(q.shape[1]):
        s = s * decay[:, t, :, None]
        s = s + (beta[:, t] * (v[:, t] - (s @ k[:, t, :, :, None])[..., 0]))[..., None] * k[:, t, :, None]
        out[:, t] = (s @ q[:, t, :, :, None])[..., 0]
    return out * DIM**-0.5, s


def prefill(batch, length, heads, bound=None, packed=False):
    from fla.ops.kda import chunk_kda

    inputs, parameters = tokens(batch, length, heads)
    cu = torch.arange(0, batch * length + 1, length, device=DEVICE) if packed else None
    given = [t.flatten(0, 1)[None] for t in inputs] if packed else inputs
    form = dict(
        output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        safe_gate=bound is not None, lower_bound=bound, state_v_first=True, cu_seqlens=cu, **parameters,
    )  # fmt: skip
    if packed:
        form["cu_seqlens_cpu"] = cu.cpu()
    own = dict(parameters, gate_family="softplus" if bound is None else "bounded")
    if bound is not None:
        own["lower_bound"] = bound
    if packed:
        own["cu_seqlens"] = cu
    rows = [t[0] for t in given] if packed else given

    def typed():
        out, final = chunk_kda(*given, **form)
        return out.view(inputs[2].shape), final

    def operator():
        final = torch.empty(batch, heads, DIM, DIM, device=DEVICE)
        return kt.prefill(*rows, final_state=final, **own).view(inputs[2].shape), final

    return Case(
        {"FLA": Variant([typed]), "FLA, libkda": Variant([typed], True), "libkda": Variant([operator])},
        lambda: recurrence(inputs, parameters, bound),
    )


def decode(rows, heads):
    """One token of each row. As typed FLA returns fresh states; in place, as vLLM calls it, it works on a pool's slots."""
    from fla.ops.kda import fused_recurrent_kda
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    inputs, parameters = tokens(rows, 1, heads)
    first = normal(rows, heads, DIM, DIM, dtype=torch.float32)
    pools = [first.clone() for _ in range(max(2, -(-L2_BYTES // (first.numel() * 4))))]
    packed = [t.flatten(0, 1)[None] for t in inputs]
    slots = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    cu = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32)
    form = dict(
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True, **parameters
    )
    out = torch.empty_like(inputs[2])
    plan = kt.plan_words(gate_family="softplus")

    def typed(pool):
        return fused_recurrent_kda(*inputs, initial_state=pool, output_final_state=True, **form)

    def in_place(pool):
        named = dict(zip(("q", "k", "v", "g", "beta"), packed, strict=True))
        y, _ = fused_recurrent_kda_fwd(
            **named, initial_state=pool, inplace_final_state=True, cu_seqlens=cu, ssm_state_indices=slots, **form
        )
        return y.view(inputs[2].shape), pool

    def operator(pool):
        torch.ops.libkda.decode(
            *inputs, out, pool, plan, slots, None, None, None, parameters["A_log"], parameters["dt_bias"]
        )
        return out, pool

    def on_pools(call):
        return [lambda pool=pool: call(pool) for pool in pools]

    return Case(
        {
            "FLA": Variant(on_pools(typed)),
            "FLA in place": Variant(on_pools(in_place)),
            "FLA, libkda": Variant(on_pools(typed), True),
            "FLA in place, libkda": Variant(on_pools(in_place), True),
            "libkda": Variant(on_pools(operator)),
        },
        lambda: recurrence(inputs, parameters, None, first),
        calls=20,
        restore=lambda: pools[0].copy_(first),
    )


def conv(length, channels, width=4):
    from fla.modules.causal_conv1d import causal_conv1d

    x, weight = normal(1, length, channels), normal(channels, width)

    def want():
        y = torch.nn.functional.conv1d(
            x.double().transpose(1, 2), weight.double()[:, None], padding=width - 1, groups=channels
        )
        return torch.nn.functional.silu(y[..., :length]).transpose(1, 2), None

    def typed():
        return causal_conv1d(x, weight, activation="silu", backend="triton")[0], None

    taps = weight.float()
    return Case(
        {
            "FLA": Variant([typed]),
            "FLA, libkda": Variant([typed], True),
            "libkda": Variant([lambda: (kt.conv_prefill([x], [taps])[0], None)]),
        },
        want,
        calls=10,
    )


def norm(length, heads):
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    x, z, weight = normal(length, heads, DIM), normal(length, heads, DIM), normal(DIM, dtype=torch.float32)

    def want():
        y = x.double()
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * weight.double() * z.double().sigmoid(), None

    def typed():
        return rms_norm_gated(x, z, weight, None, activation="sigmoid", eps=1e-5), None

    return Case(
        {
            "FLA": Variant([typed]),
            "FLA, libkda": Variant([typed], True),
            "libkda": Variant([lambda: (kt.gated_norm(x, z, weight), None)]),
        },
        want,
        calls=10,
    )


def fallback(length, heads):
    """transformers without FLA: its PyTorch function, and what libkda.transformers puts in its place."""
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    import libkda.transformers as plugin

    inputs, parameters = tokens(1, length, heads)
    q, k, v, raw, beta = inputs
    gate = -parameters["A_log"].exp()[:, None] * torch.nn.functional.softplus(raw.float() + parameters["dt_bias"].view(-1, DIM))
    original = modeling.chunk_kimi_delta_attention
    while hasattr(original, "__wrapped__"):
        original = original.__wrapped__
    replaced = plugin._replacement(original, "chunk_kimi_delta_attention")
    # As the model has them: slices of a convolution's result whose channels come first.
    q, k, v = (t.flatten(2).mT.contiguous().mT.unflatten(-1, (heads, DIM)) for t in (q, k, v))

    def call(function):
        sigmoid = beta.sigmoid()
        out, final = function(q, k, v, g=gate, beta=sigmoid, output_final_state=True, use_qk_l2norm_in_kernel=True)
        return out, final.transpose(-1, -2)

    return Case(
        {
            "transformers": Variant([lambda: call(original)], graph=False),
            "transformers, libkda": Variant([lambda: call(replaced)], graph=False),
        },
        lambda: recurrence(inputs, parameters, None),
        stock="transformers",
        calls=1,
    )


CASES: dict[str, Callable[[], Case]] = {
    "decode 32 rows, 32 heads": lambda: decode(32, 32),
    "decode 128 rows, 32 heads": lambda: decode(128, 32),
    "prefill 1x8192, 32 heads, softplus": lambda: prefill(1, 8192, 32),
    "prefill 1x8192, 32 heads, bounded": lambda: prefill(1, 8192, 32, -5.0),
    "prefill 8x1024 packed, 32 heads, softplus": lambda: prefill(8, 1024, 32, packed=True),
    "prefill 8x1024 packed, 32 heads, bounded": lambda: prefill(8, 1024, 32, -5.0, packed=True),
    "prefill 1x8192, 12 heads, softplus": lambda: prefill(1, 8192, 12),
    "prefill 1x8192, 64 heads, softplus": lambda: prefill(1, 8192, 64),
    "conv 1x8192, 12288 channels": lambda: conv(8192, 3 * 32 * DIM),
    "gated norm 8192, 32 heads": lambda: norm(8192, 32),
    "transformers' prefill 1x2048, 32 heads": lambda: fallback(2048, 32),
}


KINDS = ("1x8192, 12 heads", "1x8192, 32 heads", "1x8192, 64 heads", "packed", "conv")  # others are quickly compiled


@contextlib.contextmanager
def backend(on):
    os.environ["FLA_LIBKDA"] = "1" if on else "0"
    yield
    os.environ["FLA_LIBKDA"] = "0"


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def run_once(case):
    """Compiles (and tunes) FLA's kernels."""
    for variant in case.variants.values():
        if not variant.through_libkda:
            variant.calls[0]()
    torch.cuda.synchronize()


def compare(case):
    """Relative L2 of every variant's first call, which also tunes and makes plans."""
    want = case.want()
    for name, variant in case.variants.items():
        with backend(variant.through_libkda):
            libkda.stats(reset=True)
            case.restore()
            got = variant.calls[0]()
            served = any(n.get("served") for n in libkda.stats().values())
        assert served == ("," in name), f"{name}: served by libkda: {served}, {libkda.stats()}"
        case.errors[name] = [None if g is None else error(g, w) for g, w in zip(got, want, strict=True)]
    case.restore()


def graph_of(variant, calls):
    """A graph of that many calls, or why there is none."""
    if not variant.graph:
        return "not asked for"
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                variant.calls[i % len(variant.calls)]()
        graph.replay()
        torch.cuda.synchronize()
        return graph
    except Exception as why:  # whatever a library raises under capture is the answer
        torch.cuda.synchronize()
        return f"{type(why).__name__}: {str(why).splitlines()[0]}"


def timed(run, calls):
    """Milliseconds of one of `calls` calls that run() makes, by events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def measure(case, rounds):
    runs, missing = {}, {}
    for name, variant in case.variants.items():

        def eager(variant=variant):
            for i in range(case.calls):
                variant.calls[i % len(variant.calls)]()

        with backend(variant.through_libkda):
            eager()
            torch.cuda.synchronize()
            graph = graph_of(variant, case.calls)
        runs[name, "eager"] = variant, eager
        if isinstance(graph, str):
            missing[name] = graph
        else:
            runs[name, "graph"] = variant, graph.replay
    order = list(runs)
    for _ in range(rounds):
        random.shuffle(order)
        for name, mode in order:
            variant, run = runs[name, mode]
            with backend(variant.through_libkda):
                case.samples.setdefault(name, {}).setdefault(mode, []).append(timed(run, case.calls))
    return missing


def ratios(case, name, mode):
    """Stock's time over this variant's, round by round: median, 5 % and 95 %."""
    stock, own = (case.samples.get(n, {}).get(mode) for n in (case.stock, name))
    if not stock or not own:
        return None
    values = sorted(s / o for s, o in zip(stock, own, strict=True))
    return [statistics.median(values), values[len(values) // 20], values[-1 - len(values) // 20]]


def report(title, case, missing):
    print(f"\n{title}\n{'':22} {'eager us':>10} {'graph us':>10} {'eager x':>8} {'graph x':>8} {'error out':>10} {'state':>9}")
    for name in case.variants:
        cells = []
        for mode in ("eager", "graph"):
            values = case.samples[name].get(mode)
            cells.append(f"{1e3 * statistics.median(values):10.1f}" if values else f"{'-':>10}")
        for mode in ("eager", "graph"):
            ratio = ratios(case, name, mode)
            cells.append(f"{ratio[0]:8.2f}" if ratio else f"{'-':>8}")
        cells += [f"{'-':>9}" if e is None else f"{e:9.2e}" for e in case.errors[name]]
        print(f"{name:22} {' '.join(cells)}")
    for name, why in missing.items():
        print(f"{name}: no graph, {why}")


def compile_all(names):
    """Fills Triton's cache of compiled kernels: for each of KINDS its cases one after the other, in SHARDS processes."""
    running = []
    for kind in KINDS:
        cases = [n for n in names if kind in n]
        for shard in range(SHARDS if cases else 0):
            environment = {**os.environ, "FLA_CACHE_RESULTS": "0", "KDA_STOCK_SHARD": str(shard)}
            command = [sys.executable, __file__, "--rounds", "0", "--only", ";".join(cases)]
            running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    return max((p.wait() for p in running), default=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", default="", help="cases whose names contain one of these words, separated by ;")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    words = list(filter(None, arguments.only.split(";")))
    names = [n for n in CASES if not words or any(w in n for w in words)]
    if arguments.compile:
        sys.exit(compile_all(names))
    facts = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "fla": fla.__version__, "source_hash": libkda.source_hash(), "tuning_ms": TUNING_MS, "unit": "ms",
        "rounds": arguments.rounds, "cases": {},
    }  # fmt: skip
    failed = []
    for title in names:
        torch.manual_seed(1)
        with torch.inference_mode():
            try:
                case = CASES[title]()
            except ImportError as why:
                print(f"\n{title}: skipped, {why}")
                continue
            if arguments.rounds == 0:
                run_once(case)
                continue
            try:
                compare(case)
                missing = measure(case, arguments.rounds)
            except Exception:
                traceback.print_exc()
                failed.append(title)
                continue
        report(title, case, missing)
        facts["cases"][title] = {
            "errors": case.errors,
            "stock": case.stock,
            "samples": case.samples,
            "no_graph": missing,
            "ratios": {name: {mode: ratios(case, name, mode) for mode in ("eager", "graph")} for name in case.variants},
        }
        del case
        torch.cuda.empty_cache()
        if arguments.json:
            arguments.json.write_text(json.dumps(facts, indent=1))
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()

"""Variants of a call beside one another on one GPU: compared with a definition in fp64, then timed in shuffled rounds.

Variants of a case get the same tensors. In each round every variant is timed eagerly (events around a few calls; a call that
the host cannot keep up with shows the host's time) and as a replay of a CUDA graph, in freshly shuffled order; ratios are
taken within rounds. Where state is read, calls go round copies of the tensors that do not fit the L2 together.

For a script whose stock variants are Triton's: tune() before their import, then main(). `SCRIPT --compile` compiles their
configurations in processes side by side.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner

import libkda

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


def tune():
    """For the kernels of modules that are imported after it."""
    if "KDA_STOCK_SHARD" in os.environ:
        in_shard(int(os.environ["KDA_STOCK_SHARD"]))
    else:
        in_short()


DEVICE, DIM = "cuda", 128
L2_BYTES = 320 << 20
_Tensor = torch.Tensor


@dataclass
class Variant:
    """calls: one for each copy of the tensors; each returns what is compared: out and a final state or None, where what would
    cost time is given as a function, and parts of the last dimension as a list."""

    calls: list[Callable[[], tuple]]
    through_libkda: bool = False
    graph: bool = True
    optional: bool = False  # where its first call fails, the case goes on without it


@dataclass
class Case:
    variants: dict[str, Variant]
    want: Callable[[], tuple]  # fp64
    stock: str = "FLA"
    calls: int = 3  # of a sample
    restore: Callable[[], None] = lambda: None  # states of the first copy as they were
    errors: dict[str, list] = field(default_factory=dict)
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # optional variants that failed, and why


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


@dataclass
class Suite:
    """What a script measures. kinds: words of case titles, for --compile: cases of a kind one after the other, kinds and parts
    of their configurations side by side (cases of no kind are quickly compiled). backend(on): around calls of a variant that
    is, or is not, through_libkda; counted: such variants must show in libkda.stats(). options: of the script's own, which the
    processes of --compile get too."""

    script: str
    cases: dict[str, Callable[[], Case]]
    kinds: Sequence[str]
    facts: Callable[[], dict[str, Any]]
    backend: Callable[[bool], Any] = contextlib.nullcontext
    counted: bool = False
    options: Sequence[str] = ()


def error(got, want):
    got = got() if callable(got) else got
    got = torch.cat(got, -1) if isinstance(got, list) else got
    return float((got.double() - want).norm() / want.norm())


def first_call(case, name):
    """What the variant's first call returns; None of an optional one that fails, which leaves the case."""
    variant = case.variants[name]
    try:
        return variant.calls[0]()
    except Exception as why:
        if not variant.optional:
            raise
        del case.variants[name]
        case.refused[name] = f"{type(why).__name__}: {str(why).splitlines()[0]}"
        return None


def run_once(case):
    """Compiles (and tunes) the stock kernels."""
    for name, variant in list(case.variants.items()):
        if not variant.through_libkda:
            first_call(case, name)
    torch.cuda.synchronize()


def compare(case, suite):
    """Relative L2 of every variant's first call, which also tunes and makes plans."""
    want = case.want()
    for name, variant in list(case.variants.items()):
        with suite.backend(variant.through_libkda):
            libkda.stats(reset=True)
            case.restore()
            got = first_call(case, name)
            served = any(n.get("served") for n in libkda.stats().values())
        if suite.counted and served != variant.through_libkda:
            raise AssertionError(f"{name}: served by libkda: {served}, {libkda.stats()}")
        if got is None:
            continue
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


def measure(case, suite, rounds):
    runs, missing = {}, {}
    for name, variant in case.variants.items():

        def eager(variant=variant):
            for i in range(case.calls):
                variant.calls[i % len(variant.calls)]()

        with suite.backend(variant.through_libkda):
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
            with suite.backend(variant.through_libkda):
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
    print(f"\n{title}\n{'':26} {'eager us':>10} {'graph us':>10} {'eager x':>8} {'graph x':>8} {'error out':>10} {'state':>9}")
    for name in case.variants:
        cells = []
        for mode in ("eager", "graph"):
            values = case.samples[name].get(mode)
            cells.append(f"{1e3 * statistics.median(values):10.1f}" if values else f"{'-':>10}")
        for mode in ("eager", "graph"):
            ratio = ratios(case, name, mode)
            cells.append(f"{ratio[0]:8.2f}" if ratio else f"{'-':>8}")
        cells += [f"{'-':>9}" if e is None else f"{e:9.2e}" for e in case.errors[name]]
        print(f"{name:26} {' '.join(cells)}")
    for name, why in missing.items():
        print(f"{name}: no graph, {why}")
    for name, why in case.refused.items():
        print(f"{name}: failed, {why}")


def compile_all(suite, names):
    """Fills Triton's cache of compiled kernels: for each kind its cases one after the other, in SHARDS processes."""
    running = []
    for kind in suite.kinds:
        cases = [n for n in names if kind in n]
        for shard in range(SHARDS if cases else 0):
            environment = {**os.environ, "FLA_CACHE_RESULTS": "0", "KDA_STOCK_SHARD": str(shard)}
            command = [sys.executable, suite.script, *suite.options, "--rounds", "0", "--only", ";".join(cases)]
            running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    return max((p.wait() for p in running), default=0)


def parser(description):
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=21)
    p.add_argument("--only", default="", help="cases whose names contain one of these words, separated by ;")
    p.add_argument("--json", type=pathlib.Path)
    p.add_argument("--compile", action="store_true")
    return p


def run(suite, arguments):
    words = list(filter(None, arguments.only.split(";")))
    names = [n for n in suite.cases if not words or any(w in n for w in words)]
    if arguments.compile:
        sys.exit(compile_all(suite, names))
    facts = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, **suite.facts(),
        "source_hash": libkda.source_hash(), "tuning_ms": TUNING_MS, "unit": "ms", "rounds": arguments.rounds, "cases": {},
    }  # fmt: skip
    failed = []
    for title in names:
        torch.manual_seed(1)
        with torch.inference_mode():
            try:
                case = suite.cases[title]()
            except ImportError as why:
                print(f"\n{title}: skipped, {why}")
                continue
            if arguments.rounds == 0:
                run_once(case)
                continue
            try:
                compare(case, suite)
                missing = measure(case, suite, arguments.rounds)
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
            "refused": case.refused,
            "ratios": {name: {mode: ratios(case, name, mode) for mode in ("eager", "graph")} for name in case.variants},
        }
        del case
        torch.cuda.empty_cache()
        if arguments.json:
            arguments.json.write_text(json.dumps(facts, indent=1))
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")

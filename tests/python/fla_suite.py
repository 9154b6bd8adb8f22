#!/usr/bin/env python3
"""FLA's own tests of KDA, run where FLA keeps them, with libkda's backend pinned (spec XT-3).

fla_suite.py FLA/tests/ops/test_kda.py [--suite-json FILE] [pytest's options, -k and -n among them]

FLA's tests ask for gradients, which libkda leaves to FLA. Here chunk_kda and fused_recurrent_kda answer with libkda's outputs
and final states, which FLA's assertions judge; their gradients are zeros and FLA's assertions on gradients (names that begin
with d) are passed over. Said at the end for each test: whether libkda served it, what FLA served and why, or that neither was
called.
"""

import functools
import json
import os
import pathlib
import sys

import one_configuration

PINNED = {"FLA_LIBKDA": "1", "FLA_FLASH_KDA": "0", "FLA_TILELANG": "0", "FLA_GLUON": "0"}
HERE = str(pathlib.Path(__file__).resolve().parent)
results = {}  # test: outcome, counts and the assertions' figures
figures = []  # of the running test: name, relative error, allowed


def pytest_addoption(parser):
    one_configuration.install()  # for what libkda declines; the earliest hook, in each of xdist's processes
    parser.addoption("--suite-json", help="results of every test go there")


def inference(function):
    """The function without a graph for gradients; what is differentiated through it gets zeros."""
    import torch

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx, names, *values):
            ctx.values = values
            return function(**dict(zip(names, values, strict=True)))

        @staticmethod
        def backward(ctx, *_):
            wanted = [isinstance(v, torch.Tensor) and v.requires_grad for v in ctx.values]
            return None, *(torch.zeros_like(v) if w else None for v, w in zip(ctx.values, wanted, strict=True))

    @functools.wraps(function)
    def call(*args, **keywords):
        keywords = dict(zip(("q", "k", "v", "g", "beta"), args, strict=False)) | keywords
        if not torch.is_grad_enabled():
            return function(**keywords)
        call.used = True
        return Call.apply(tuple(keywords), *keywords.values())

    call.used = False
    return call


def judged(assert_close, calls):
    """FLA's assertion, noted; gradients of calls that libkda answered are passed over."""
    from fla.utils.testing import get_err_ratio

    @functools.wraps(assert_close)
    def check(prefix, ref, tri, ratio, *rest, **keywords):
        if prefix.startswith("d") and any(c.used for c in calls):
            return
        figures.append((prefix, float(get_err_ratio(ref, tri)), ratio))
        assert_close(prefix, ref, tri, ratio, *rest, **keywords)

    return check


def pytest_collection_modifyitems(items):
    import torch

    import libkda.fla

    assert libkda.fla.REGISTERED
    for module in {item.module for item in items}:
        if not torch.cuda.is_available():
            module.device = "cpu"
        calls = []
        for name in ("chunk_kda", "fused_recurrent_kda"):
            if hasattr(module, name):
                calls.append(inference(getattr(module, name)))
                setattr(module, name, calls[-1])
        module.kda_calls, module.assert_close = calls, judged(module.assert_close, calls)


def pytest_runtest_call(item):
    import libkda

    figures.clear()
    libkda.stats(reset=True)
    for call in item.module.kda_calls:
        call.used = False


def pytest_runtest_makereport(item, call):
    if call.when == "call":
        import libkda

        item.user_properties.append(("libkda", {"stats": libkda.stats(), "errors": list(figures)}))


def pytest_runtest_logreport(report):
    properties = dict(report.user_properties)
    if report.when == "call" or report.outcome != "passed":
        reason = str(report.longrepr[2]) if report.outcome == "skipped" and isinstance(report.longrepr, tuple) else ""
        results[report.nodeid] = {"outcome": report.outcome, "reason": reason, **properties.get("libkda", {})}


def by_whom(result):
    """libkda, FLA (with reasons) or nobody."""
    stats = result.get("stats", {})
    reasons = [f"{name.removeprefix('fla.')}: {why}" for name, n in stats.items() for why in n if why.startswith("declined")]
    if reasons:
        return "FLA, " + "; ".join(sorted(reasons))
    return "libkda" if any(n.get("served") for n in stats.values()) else "nobody"


def pytest_terminal_summary(terminalreporter, config):
    if not results:
        return
    counts = {}
    for name, result in sorted(results.items()):
        result["served_by"] = by_whom(result) if result["outcome"] != "skipped" else result["reason"]
        key = result["outcome"], result["served_by"]
        counts[key] = counts.get(key, 0) + 1
        if result["outcome"] == "failed":
            terminalreporter.write_line(f"FAILED {name}: {result['served_by']}, {result.get('errors')}")
    terminalreporter.section("served by")
    for (outcome, whom), n in sorted(counts.items()):
        terminalreporter.write_line(f"{n:4} {outcome:8} {whom}")
    if config.getoption("--suite-json"):
        pathlib.Path(config.getoption("--suite-json")).write_text(json.dumps(results, indent=1))


def main():
    if len(sys.argv) < 2 or not pathlib.Path(sys.argv[1]).is_file():
        sys.exit(__doc__)
    import pytest
    import torch

    os.environ.update(PINNED, PYTHONPATH=os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")])))
    suite = pathlib.Path(sys.argv[1]).resolve()
    # FLA's project file would put FLA's sources in front of the installed package.
    options = ["-c", os.devnull, f"--rootdir={suite.parents[1]}", "--import-mode=importlib", "-p", "no:cacheprovider", "-q"]
    if not torch.cuda.is_available():
        options.append("--noconftest")  # which waits for a device; it also fills what torch.empty gives with NaN
    return pytest.main([*options, "-W", "ignore", "-p", "fla_suite", str(suite), *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())

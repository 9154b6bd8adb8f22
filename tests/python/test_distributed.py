"""libkda.distributed on gloo: what several ranks make equals what one makes, and one rank's failure ends all."""

import json
import multiprocessing
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)
import distributed_ranks
from distributed_ranks import batch, layer

import libkda
import libkda.distributed as kd


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(name, ranks, argument) -> results by rank; None of a rank that was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["libkda.distributed"])  # torch is imported once

    def run(name, ranks, argument=None, gone=()):
        folder = tmp_path_factory.mktemp(name)
        arguments = [(name, r, ranks, str(folder), argument) for r in range(ranks)]
        processes = [context.Process(target=distributed_ranks.main, args=a, daemon=True) for a in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join(distributed_ranks.TIMEOUT)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert [code == 0 for code in codes] == [r not in gone for r in range(ranks)], codes
        return [None if r in gone else torch.load(folder / f"{r}.pt", weights_only=False) for r in range(ranks)]

    return run


def error(x, reference):
    if not reference.any():
        return float(x.abs().max())
    return float((x.float() - reference.float()).norm() / reference.float().norm())


CASES = {
    2: [
        {"lengths": [70, 3, 130], "rows": [100, 103]},
        {"lengths": [70, 3, 130], "rows": [100, 103], "replicate": False},
        {"lengths": [300], "rows": [0, 300]},
        {"lengths": [300], "rows": [299, 1], "segments": 3},
        {"lengths": [260, 0, 200, 0], "rows": [250, 210], "segments": 2, "slots": [8, 2, 5, 0]},
        {"lengths": [1], "rows": [1, 0]},
        {"lengths": [1, 9], "rows": [5, 5]},
        {"lengths": [1, 9, 40], "rows": [30, 20], "bias": True},
        {"lengths": [50, 60], "rows": [40, 70], "slots": [-1, 3]},
        {"lengths": [50, 60, 20], "rows": [80, 50], "slots": [3, 40, 7]},
        {"lengths": [], "rows": [0, 0]},
        {"lengths": [0, 0], "rows": [0, 0]},
        {"lengths": [90, 41], "rows": [71, 60], "pool": torch.bfloat16},
        {"lengths": [90, 41], "rows": [71, 60], "dtype": torch.bfloat16},
    ],
    4: [
        {"lengths": [70, 3, 130], "rows": [64, 64, 64, 11]},
        {"lengths": [6], "rows": [2, 2, 1, 1]},
        {"lengths": [6], "rows": [2, 0, 3, 1]},
        {"lengths": [3], "rows": [1, 1, 0, 1]},  # a prompt shorter than the ranks
        {"lengths": [2, 1, 4], "rows": [0, 5, 0, 2], "replicate": False},
        {"lengths": [500, 40], "rows": [130, 200, 10, 200], "segments": 2},
        {"lengths": [257], "rows": [64, 65, 127, 1], "segments": 2, "flags": [False]},
    ],
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_S09_shards_equal_the_whole(run, ranks):
    results = run("context_parallel", ranks, CASES[ranks])
    for number, case in enumerate(CASES[ranks]):
        dtype, lengths = case.get("dtype", torch.float32), case["lengths"]
        x, states, slots, flags = batch(case, dtype)
        before = states.state.clone(), states.conv.clone()
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        want = layer(dtype=dtype, bias=case.get("bias", False)).prefill(x, states, cu, slots, flags) if x.shape[0] else x
        if not x.shape[0]:  # of prompts without tokens: zero where they start
            states.state[slots[~flags].long()] = 0
            states.conv[slots[~flags].long()] = 0
        mine = [r[number] for r in results]
        out = torch.cat([m[0] for m in mine])
        limit = 1e-5 if dtype == torch.float32 else 1e-2
        stored = 1e-5 if case.get("pool", torch.float32) == torch.float32 and dtype == torch.float32 else 1e-2
        where = f"{ranks} ranks, {case}"
        if x.shape[0]:
            assert out.shape == want.shape and error(out, want) <= limit, where
            assert torch.equal((out == 0).all(dim=1), (want == 0).all(dim=1)), where
        shards = kd.Shards(lengths, case["rows"])
        for rank, (_, state, conv) in enumerate(mine):
            everything = case.get("replicate", True)
            live = [n for n, s in enumerate(slots.tolist()) if 0 <= s < len(state)]
            kept = [n for n in live if everything or shards.owner(n) == rank]
            others = [s for s in range(len(state)) if s not in [int(slots[n]) for n in kept]]
            assert torch.equal(state[others], before[0][others]), where
            assert torch.equal(conv[others], before[1][others]), where
            for n in kept:
                slot = int(slots[n])
                assert error(state[slot], states.state[slot]) <= stored, (where, n, rank)
                # Raw rows are copied; their projection's bits depend on how many rows PyTorch multiplies at once.
                assert error(conv[slot], states.conv[slot]) <= limit, (where, n, rank)
            if everything:
                assert torch.equal(state, mine[0][1]) and torch.equal(conv, mine[0][2]), where


@pytest.mark.parametrize("ranks", [2, 4])
def test_F64_shards_shorter_than_the_history(run, ranks):
    cases = {4: [([6], [2, 2, 1, 1]), ([6], [2, 2, 0, 2])], 2: [([1, 9], [5, 5]), ([6], [1, 5])]}[ranks]
    results = run("ledger", ranks, cases)
    for i, (lengths, _) in enumerate(cases):
        for state, window in (r[i] for r in results):
            assert torch.equal(state, results[0][i][0]) and torch.equal(window, results[0][i][1])
            for n, length in enumerate(lengths):
                want = torch.zeros(16)
                want[:length] = 0.5
                want[-1] = 2
                assert torch.allclose(state[n, 0, 0], want, atol=2e-5)
                last = [float(max(0, length - 2 + j)) for j in range(3)]
                assert window[n, :, 0].tolist() == last
            assert state[-1, 0, 0, -1] == 2 and not window[-1].any()


@pytest.mark.parametrize("ranks", [2, 3])
def test_L06_uneven_shares_of_heads_sum_to_the_layer(run, ranks):
    results = run("tensor_parallel", ranks)
    x, *_ = batch({"lengths": [20]})
    whole = layer()
    states, slot = whole.new_state(3), torch.tensor([1], dtype=torch.int32)
    first = whole.prefill(x[:19], states, torch.tensor([0, 19], dtype=torch.int32), slot)
    last = whole.decode(x[19:], states, slot)
    for got in results:
        assert error(got[0], first) <= 1e-5 and error(got[1], last) <= 1e-5
        assert torch.equal(got[0], results[0][0]) and torch.equal(got[1], results[0][1])
    assert [kd.share_heads(96, 5, r) for r in range(5)] == [(0, 20), (20, 19), (39, 19), (58, 19), (77, 19)]


@pytest.mark.parametrize("where", ["layer", "between"])
def test_an_exception_on_one_rank_ends_the_others_by_name(run, where):
    results = run("exception", 3, where)
    assert results[1].startswith("own: ")
    cause = "no such token" if where == "between" else "mat1 and mat2|size|shape"
    for r in (0, 2):
        assert results[r].startswith("rank 1 failed: ") and (cause in results[r] or where == "layer"), results[r]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_ends_the_others(run, ranks):
    results = run("killed", ranks, gone=(1,))
    for r in range(ranks):
        assert r == 1 or results[r].startswith("rank 1 does not answer"), results[r]


def test_a_silent_rank_is_waited_for_no_longer_than_the_timeout(run):
    results = run("silent", 2, 1.0)
    assert results[0].startswith("rank 1 does not answer: no answer within 1 s"), results[0]


ROOT = pathlib.Path(__file__).resolve().parents[2]


def _program(*command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_script_for_several_gpus_runs_on_gloo(tmp_path):
    record = tmp_path / "record.json"
    small = ["--tokens", "256", "--heads", "2", "--dim", "32", "--width", "tiny", "--layer-tokens", "64", "--rounds", "2"]
    said = _program(ROOT / "bench/distributed.py", "--ranks", 2, "--device", "cpu", "--json", record, *small)
    assert "failure rank 0 raised" in said and "exit codes [0, -9]: ok" in said
    rows = json.loads(record.read_text())["rows"]
    assert {r["check"] for r in rows} == {"context", "speed", "tensor"} and all(r["ok"] for r in rows)
    assert all(len(r["samples"]["one"]) == 2 for r in rows if r["check"] == "speed")


def test_the_example_runs_under_torchrun():
    example = ROOT / "bindings/torch/examples/long_prompt.py"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    assert "relative difference" in _program(*launch, example, "--tokens", 130, "--decode", 2, "--verify")


def test_shards_are_checked():
    assert kd.Shards.even([100, 60], 3).rows == (64, 64, 32)
    assert kd.Shards.even([5], 3).rows == (5, 0, 0) and kd.Shards.even([], 2).rows == (0, 0)
    with pytest.raises(libkda.InvalidArgument, match="add up to 10 tokens"):
        kd.Shards([4, 6], [5, 4])
    with pytest.raises(libkda.InvalidArgument, match=">= 0"):
        kd.Shards([4], [5, -1])
    with pytest.raises(libkda.InvalidArgument, match="ranks"):
        kd.Layout(kd.Shards([4], [4]), 1, "cpu")

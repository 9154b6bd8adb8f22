"""What only a device shows: captured graphs, streams, other devices, no hidden work. Run with --device cuda."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
import cases
import libkda.torch as kt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", cases.MAKERS, ids=lambda m: m.__name__)
def test_captured_calls_equal_eager_ones(cuda, make, dtype):
    case = make(cuda, dtype)
    want = case.by_operator()  # also makes the plan
    c, op = case.clone()
    before = [t.clone() for t in c.written]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = op(*c.args, **c.kwargs)
    returned = [] if returned is None else [returned] if isinstance(returned, torch.Tensor) else list(returned)
    for _ in range(3):
        for t, b in zip(c.written, before, strict=True):
            t.copy_(b)
        graph.replay()
        torch.cuda.synchronize()
        for got, wanted in zip(c.written + returned, want, strict=True):
            assert torch.equal(got, wanted)


def test_F52_replay_follows_the_device(cuda):
    """Slots, accepted counts and offsets changed on the stream right before a replay are the ones that it takes."""
    i = cases.Inputs(cuda)
    t, p = i.tokens(8), i.parameters()
    pool = i.pool(9, cases.HV, cases.V, cases.K)
    cu, slots, accepted = i.integers(0, 4, 8), i.integers(3, 5), i.integers(1, 1)
    out = torch.zeros_like(t["v"])
    form = {"gate_family": "softplus", **p, "final_only": True, "width": 4}

    def call():
        kt.decode(*t.values(), pool, out=out, cu_seqlens=cu, slots=slots, accepted=accepted, **form)

    saved = pool.clone()
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for bounds, rows in (([0, 1, 5], [7, 2]), ([0, 4, 8], [8, 0]), ([0, 0, 3], [1, 6])):
        cu.copy_(i.integers(*bounds)), slots.copy_(i.integers(*rows))
        pool.copy_(saved), out.zero_()
        graph.replay()
        got = out.clone(), pool.clone()
        pool.copy_(saved), out.zero_()
        call()
        assert torch.equal(got[0], out) and torch.equal(got[1], pool)


def test_F27_two_streams(cuda):
    case = cases.prefill(cuda)
    want = case.by_operator()
    streams = [torch.cuda.Stream(cuda), torch.cuda.Stream(cuda)]
    copies = [case.clone() for _ in range(40)]
    torch.cuda.synchronize()
    for i, (c, op) in enumerate(copies):
        with torch.cuda.stream(streams[i % 2]):
            op(*c.args, **c.kwargs)
    torch.cuda.synchronize()
    for c, _ in copies:
        assert all(torch.equal(got, w) for got, w in zip(c.written, want, strict=True))


def test_work_is_ordered_by_the_current_stream(cuda):
    """The operator comes after what the current stream still has to do, and nothing waits for it."""
    c, op = cases.gated_norm(cuda).clone()
    o, z, weight, out = c.args
    op(o, z, weight, out)
    want = torch.empty_like(out)
    op(o * 2, z, weight, want)
    torch.cuda.synchronize()
    side = torch.cuda.Stream(cuda)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        o.mul_(2)
        op(o, z, weight, out)
        assert not side.query(), "the call must not wait"
    side.synchronize()
    assert torch.equal(out, want)


def test_loading_makes_no_cuda_context(cuda):
    import subprocess
    import sys

    code = "import libkda, libkda.torch, torch; print(torch.cuda.is_initialized())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "False"


def test_F30_a_call_moves_nothing_to_the_host(cuda):
    from torch.profiler import ProfilerActivity, profile

    c, op = cases.decode(cuda, torch.bfloat16).clone()
    op(*c.args, **c.kwargs)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            op(*c.args, **c.kwargs)
        torch.cuda.synchronize()
    names = [e.key for e in seen.key_averages()]
    assert not [n for n in names if "Memcpy" in n or "cudaMalloc" in n or "StreamSynchronize" in n], names


def test_tensors_of_two_devices_are_refused(cuda):
    c, op = cases.gated_norm(cuda).clone()
    o, z, weight, out = c.args
    with pytest.raises(ValueError, match="weight: wanted .*cuda.*got .*cpu"):
        op(o, z, weight.cpu(), out)


@pytest.mark.parametrize("family", ["bounded", "softplus"])
def test_S09_a_prefill_goes_on_from_kept_stages(cuda, family):
    """Maps by the staged form, and outputs from the same stages: bits of the operators that share nothing."""
    heads, dim, rows = 12, 128, [700, 0, 333]
    i = cases.Inputs(cuda, torch.bfloat16)
    q, k, v, gate = (i.normal(sum(rows), heads, dim) for _ in range(4))
    tokens = (q, k, v, gate - 4, i.normal(sum(rows), heads))
    form = {"gate_family": family, "A_log": i.normal(heads, dtype=torch.float32, scale=0.3)}
    if family == "bounded":
        form["lower_bound"] = -5.0
    cu, first = i.integers(0, 700, 700, 1033), i.normal(3, heads, dim, dim, dtype=torch.float32)
    summary, stages = kt.segment_prepare(*tokens, cu_seqlens=cu, **form)
    assert stages.numel() >= 1033 * heads * 1000
    assert torch.equal(summary, kt.segment_summary(*tokens[1:], cu_seqlens=cu, **form))
    states = [first.clone(), first.clone()]
    got = kt.prefill(*tokens, cu_seqlens=cu, state=states[0], stages=stages, **form)
    want = kt.prefill(*tokens, cu_seqlens=cu, state=states[1], batch_invariant=True, **form)
    assert torch.equal(got, want) and torch.equal(*states)
    with pytest.raises(ValueError, match="stages: wanted"):
        kt.prefill(*tokens, cu_seqlens=cu, state=states[0], stages=stages[:-8].clone(), **form)

"""Every operator against the C ABI called through ctypes, bit for bit, and against the fp64 oracle (spec N-9)."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
import cases
import libkda.torch as kt

DTYPES = [torch.float32, torch.bfloat16]
# Relative L2 against the oracle: fp32 paths; bf16: the rounding of the output and tensor cores (spec N-9).
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2.0e-3}
EXACT = ("metadata",)


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", cases.MAKERS, ids=lambda m: m.__name__)
def test_operator_is_the_c_abi(device, make, dtype):
    case = make(device, dtype)
    got, want = case.by_operator(), case.by_abi()
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        assert torch.equal(g, w), (case.name, (g != w).nonzero()[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [m for m in cases.MAKERS if m.__name__ not in EXACT], ids=lambda m: m.__name__)
def test_operator_is_near_the_oracle(device, make, dtype):
    if device != "cpu":
        got, case = make(device, dtype).by_operator(), make("cpu", dtype)
    else:
        case = make(device, dtype)
        got = case.by_operator()
    # The oracle carries fp64 from end to end, so batch invariance over cuts is not its promise.
    want = case.by_abi(backend="reference", **({"flags": 0} if "flags" in case.description else {}))
    for g, w in zip(got, want, strict=True):
        if w.is_floating_point():
            # Windows are copies of inputs; everything else has been computed.
            assert error(g.cpu(), w) <= LIMITS[w.dtype], case.name
        else:
            assert torch.equal(g.cpu(), w)


@pytest.mark.parametrize("make", cases.MAKERS, ids=lambda m: m.__name__)
def test_inputs_are_left_alone_and_calls_repeat(device, make):
    case = make(device)
    written = {t.untyped_storage().data_ptr() for t in case.written}
    c, op = case.clone()
    inputs = [t for t in [*c.args, *c.kwargs.values()] if isinstance(t, torch.Tensor)]
    kept = [t.clone() for t in inputs]
    originals = [t for t in [*case.args, *case.kwargs.values()] if isinstance(t, torch.Tensor)]
    op(*c.args, **c.kwargs)
    for t, before, original in zip(inputs, kept, originals, strict=True):
        if original.untyped_storage().data_ptr() not in written:
            assert torch.equal(t, before)
    first, second = case.by_operator(), case.by_operator()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_F35_pool_gaps_stay(device):
    """Gaps between slots and the memory in front of the pool keep their bits ."""
    case = cases.decode(device)
    c, op = case.clone()
    pool = c.args[6]
    memory = pool.as_strided((pool.untyped_storage().nbytes() // 4,), (1,), 0)
    before = memory.clone()
    address = pool.data_ptr()
    op(*c.args, **c.kwargs)
    assert pool.data_ptr() == address
    untouched = torch.ones_like(memory, dtype=torch.bool)
    for slot in (4, 2, 6):
        start = 3 + slot * pool.stride(0)
        untouched[start : start + pool[0].numel()] = False
    assert torch.equal(memory[untouched], before[untouched])
    assert not torch.equal(memory, before)


def test_F27_two_threads_agree_with_one(device):
    """Calls from two host threads, each with its own tensors."""
    import concurrent.futures

    case = cases.prefill(device)
    want = case.by_operator()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for got in threads.map(lambda _: case.by_operator(), range(16)):
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("make", cases.MAKERS, ids=lambda m: m.__name__)
def test_measured_and_lent_scratch(device, make):
    """What measure says is enough, to the byte, and gives the same bits; a call that is only measured writes nothing."""
    case = make(device)
    want = case.by_operator()
    c, op = case.clone()
    tensors = [t for t in [*c.args, *c.kwargs.values()] if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in tensors]
    with kt.measure() as need:
        op(*c.args, **c.kwargs)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    memory = torch.full((need.bytes + 512,), 255, dtype=torch.uint8, device=device)
    begin = -memory.data_ptr() % 256
    with kt.scratch(memory[begin : begin + need.bytes]):
        got = case.by_operator()
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert (memory[:begin] == 255).all() and (memory[begin + need.bytes :] == 255).all()
    if need.bytes:
        assert not (memory == 255).all()
        with (
            kt.scratch(memory[begin : begin + need.bytes - 1]),
            pytest.raises(RuntimeError, match=f"wanted {need.bytes} bytes"),
        ):
            op(*c.args, **c.kwargs)
        assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    with pytest.raises(ValueError, match="uint8"), kt.scratch(torch.zeros(4)):
        pass

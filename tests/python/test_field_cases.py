"""Cases that went wrong for others, through the PyTorch operators (docs/spec/field-cases.md)."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
import cases
import libkda.torch as kt

FORM = {"gate_family": "softplus"}


def test_F20_more_rows_than_offsets(device):
    i = cases.Inputs(device)
    t, p = i.tokens(96), i.parameters()
    short = {name: x[:70].clone() for name, x in t.items()}
    for x in t.values():
        x[70:] = float("nan")
    want = kt.prefill(*short.values(), cu_seqlens=i.integers(0, 70), **p, **FORM)
    mine = torch.full((96, cases.HV, cases.V), 7.0, device=device)
    kt.prefill(*t.values(), out=mine, cu_seqlens=i.integers(0, 70), **p, **FORM)
    fresh = kt.prefill(*t.values(), cu_seqlens=i.integers(0, 70), **p, **FORM)
    assert torch.equal(mine[:70], want) and torch.equal(fresh[:70], want)
    assert (mine[70:] == 7).all() and not fresh[70:].any()
    beyond = kt.prefill(*short.values(), cu_seqlens=i.integers(0, 97), **p, **FORM)
    assert torch.equal(beyond, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_F33_slices_of_a_projection(device, dtype):
    heads, keys = 12, 128
    i = cases.Inputs(device, dtype)
    beta = i.normal(33, 40)[:, 3:15]
    gate = i.normal(33, heads * keys + 64)[:, : heads * keys].unflatten(-1, (heads, keys))
    q, k, v = (i.normal(33, heads, keys) for _ in range(3))
    A_log = i.normal(heads, dtype=torch.float32)
    sliced = kt.prefill(q, k, v, gate, beta, cu_seqlens=i.integers(0, 33), A_log=A_log, **FORM)
    dense = kt.prefill(q, k, v, gate.contiguous(), beta.contiguous(), cu_seqlens=i.integers(0, 33), A_log=A_log, **FORM)
    assert torch.equal(sliced, dense)


@pytest.mark.parametrize("tokens", [1, 33, 700])
def test_F34_one_buffer(device, tokens):
    heads, keys = 4, 128
    i = cases.Inputs(device)
    buffer = i.normal(tokens + 1, 3 * heads * keys)[1:]
    q, k, v = (t.unflatten(-1, (heads, keys)) for t in buffer.chunk(3, dim=-1))
    gate, beta, A_log = i.normal(tokens, heads, keys), i.normal(tokens, heads), i.normal(heads)
    rows = {"cu_seqlens": i.integers(0, tokens), "A_log": A_log, **FORM}
    assert torch.equal(
        kt.prefill(q, k, v, gate, beta, **rows),
        kt.prefill(q.contiguous(), k.contiguous(), v.contiguous(), gate, beta, **rows),
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_F37_index_is_a_table_column(device, dtype):
    i = cases.Inputs(device)
    table = i.integers(4, 2, 7, dtype=dtype)[:, None].repeat(1, 9)
    table[:, 1:] = 9999
    t, p = {name: x[:, None] for name, x in i.tokens(3).items()}, i.parameters()
    results = []
    for slots in (table[:, 0], table[:, :1], table[:, 0].contiguous()):
        pool = cases.Inputs(device, seed=5).pool(9, cases.HV, cases.V, cases.K)
        out = kt.decode(*t.values(), pool, slots=slots, **p, **FORM)
        results.append((out, pool))
    for out, pool in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(pool, results[0][1])


def test_F38_types_of_this_call(device):
    """Alternating types in one process: each call is right for its own; an earlier output keeps its bits."""
    makers = [cases.prefill, cases.decode, cases.conv_update]
    wanted = {(m, d): m(device, d).by_abi() for m in makers for d in (torch.float32, torch.bfloat16, torch.float16)}
    kept = []
    for (make, dtype), want in [*wanted.items(), *reversed(wanted.items())]:
        got = make(device, dtype).by_operator()
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        kept.append((got, [g.clone() for g in got]))
    assert all(torch.equal(g, c) for got, copies in kept for g, c in zip(got, copies, strict=True))


def test_F39_bias_shapes(device):
    i = cases.Inputs(device)
    t, p = i.tokens(20), i.parameters()
    rows = {"cu_seqlens": i.integers(0, 20), **FORM}
    want = kt.prefill(*t.values(), **p, **rows)
    flat = {"A_log": p["A_log"].view(1, 1, -1, 1), "dt_bias": p["dt_bias"].flatten()}
    assert torch.equal(kt.prefill(*t.values(), **flat, **rows), want)


def test_F41_nothing_is_kept_by_address(device):
    i = cases.Inputs(device)
    t, p = i.tokens(70), i.parameters()
    cu = i.integers(0, 65, 70)

    def solo(*bounds):
        pieces = [{n: x[a:b] for n, x in t.items()} for a, b in zip(bounds, bounds[1:], strict=False)]
        return torch.cat(
            [kt.prefill(*x.values(), cu_seqlens=i.integers(0, len(x["q"])), batch_invariant=True, **p, **FORM) for x in pieces]
        )

    for bounds in ((0, 65, 70), (0, 5, 70), (0, 64, 70)):
        cu.copy_(i.integers(*bounds))
        got = kt.prefill(*t.values(), cu_seqlens=cu, batch_invariant=True, **p, **FORM)
        assert torch.equal(got, solo(*bounds))
        chunks = kt.metadata(cu, computed=i.integers(0, 0), num_tokens=70, max_tokens=70, max_sequences=2).chunk_indices
        wanted = {
            (0, 65, 70): [[0, 0], [0, 1], [1, 0]],
            (0, 5, 70): [[0, 0], [1, 0], [1, 1]],
            (0, 64, 70): [[0, 0], [1, 0], [-1, -1]],
        }
        assert chunks.tolist() == wanted[bounds]


@pytest.mark.parametrize("bad", [-1, 5, -(2**31), 2**31])
def test_F42_slots_outside_the_pool(device, bad):
    i = cases.Inputs(device)
    t, p = i.tokens(2), i.parameters()
    pool = i.pool(5, cases.HV, cases.V, cases.K)
    before = pool.clone()
    slots = i.integers(bad, 3, dtype=torch.int64)
    for call in (
        lambda: kt.decode(*(x[:, None] for x in t.values()), pool, slots=slots, **p, **FORM)[:, 0],
        lambda: kt.prefill(*t.values(), state=pool, slots=slots, cu_seqlens=i.integers(0, 1, 2), **p, **FORM),
    ):
        out = call()
        assert not out[0].any() and out[1].any()
        changed = (pool != before).flatten(1).any(dim=1).tolist()
        assert changed == [False, False, False, True, False]


def test_a_view_that_cannot_be_read_is_refused(device):
    """A last dimension that is not dense is refused by name, not copied."""
    i = cases.Inputs(device)
    t = i.tokens(8)
    t["q"] = t["q"].transpose(-1, -2).contiguous().transpose(-1, -2)
    with pytest.raises((ValueError, RuntimeError), match="(q: |layout: )wanted"):
        kt.prefill(*t.values(), cu_seqlens=i.integers(0, 8), **i.parameters(), **FORM)

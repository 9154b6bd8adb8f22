"""Layer contexts: state copies by name (spec Q-5), the opaque mixer of a layer on mixed steps."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
import cases
import libkda
import libkda.torch as kt

LAYER = "model.layers.0.attn"


def published(device, pool, **options):
    copies = libkda.CopySet(libkda.Context(device), [LAYER], binding_version=f"torch {torch.__version__}")
    copies.prepare({LAYER: pool}, 16, **options)
    copies.seal()
    assert copies.ready == 0
    copies.publish()
    assert copies.ready == 1 and copies.state == "published"
    return copies


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gather_and_scatter_are_the_plain_copies(device, dtype, index_dtype):
    i = cases.Inputs(device, dtype)
    pool = i.pool(6, 2, 8, 16, dtype=dtype)
    indices = torch.tensor([[4, 9], [-1, 9], [0, 9], [6, 9]], device=device, dtype=index_dtype)[:, 0]
    flags = torch.tensor([True, True, False, True], device=device)
    with kt.serving(published(device, pool)):
        packed = kt.state_gather(pool, indices, None, LAYER)
        flagged = torch.ops.libkda.state_gather(pool, indices, flags, LAYER)
        address, before = pool.data_ptr(), pool.clone()
        kt.state_scatter(pool, indices, packed * 2, LAYER)
    assert torch.equal(packed[0], before[4]) and torch.equal(packed[2], before[0])
    assert not packed[1].any() and not packed[3].any() and not flagged[2].any()
    assert torch.equal(flagged[0], packed[0])
    expected = before.clone()
    expected[4], expected[0] = before[4] * 2, before[0] * 2
    assert torch.equal(pool, expected) and pool.data_ptr() == address


def test_Q07_T18_copies_trace(device):
    """opcheck, and a compiled step with any number of rows, int32 and int64."""
    i = cases.Inputs(device)
    pool = i.normal(6, 2, 8, 16)  # dense: opcheck's clones are
    indices = i.integers(4, 1)
    packed = i.normal(2, 2, 8, 16)
    with kt.serving(published(device, pool)):
        torch.library.opcheck(torch.ops.libkda.state_gather.default, (pool, indices, None, LAYER))
        torch.library.opcheck(torch.ops.libkda.state_scatter.default, (pool, indices, packed, LAYER))

        def step(pool, indices):
            states = kt.state_gather(pool, indices, None, LAYER)
            kt.state_scatter(pool, indices, states + 1, LAYER)

        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
        address = pool.data_ptr()
        for values in ([4, 1], [0, 2, 5], [3, 1, 2, 4, 5]):
            for dtype in (torch.int32, torch.int64):
                before = pool.clone()
                compiled(pool, i.integers(*values, dtype=dtype))
                before[values] += 1
                assert torch.equal(pool, before) and pool.data_ptr() == address


def test_Q05_resolution(device):
    i = cases.Inputs(device)
    pool, indices = i.pool(6, 2, 8, 16), i.integers(4)
    copies = published(device, pool)
    with kt.serving(copies):
        with pytest.raises(libkda.NotFound, match="layers.9"):
            kt.state_gather(pool, indices, None, "model.layers.9.attn")
        with kt.serving(), pytest.raises(libkda.PreconditionFailed, match="wanted|not published|publish"):
            kt.state_gather(pool, indices, None, LAYER)
        kt.state_gather(pool, indices, None, LAYER)
    with pytest.raises(libkda.PreconditionFailed, match="wanted|not published|publish"):
        kt.state_gather(pool, indices, None, LAYER)
    copies.reset()
    with kt.serving(copies), pytest.raises(libkda.PreconditionFailed, match="wanted|not published|publish"):
        kt.state_gather(pool, indices, None, LAYER)


class Layer:
    """A layer with pools, and its input stream for one request."""

    def __init__(self, device, parts, width, tokens):
        i = cases.Inputs(device, seed=parts)
        sizes = (cases.CHANNELS,) if parts == 1 else (cases.H * cases.K, cases.H * cases.K, cases.HV * cases.V)
        self.mixer = kt.Mixer(
            conv_weight=[i.normal(c, cases.W, scale=0.5) for c in sizes],
            conv_state=[i.pool(10, cases.W + width - 2, c) for c in sizes],
            state=i.pool(10, cases.HV, cases.V, cases.K),
            form={"gate_family": "softplus", **i.parameters()},
            norm_weight=i.normal(cases.V),
            plan={"batch_invariant": True, "null_slot": 0},
        )
        self.x = list(i.normal(tokens, cases.CHANNELS).split(sizes, dim=-1))
        self.gate, self.beta = i.normal(tokens, cases.HV, cases.K), i.normal(tokens, cases.HV)
        self.z = i.normal(tokens, cases.HV, cases.V)
        self.device = device

    def step(self, rows, tables, width):
        """Runs token rows `rows` of the stream as one step; returns their outputs. Rows of no group are 7."""
        out = torch.full((len(rows), cases.HV, cases.V), 7.0, device=self.device)
        arguments = ([t[rows] for t in self.x], self.gate[rows], self.beta[rows], self.z[rows], out, LAYER)
        with kt.serving(layers={LAYER: self.mixer}, step=kt.Step.from_tables(tables, width=width)):
            torch.ops.libkda.attention(*arguments)
        return out


def tables(device, lengths, computed, slots, width=1, drafts=None, accepted=None):
    i = cases.Inputs(device)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    optional = {name: None if v is None else i.integers(*v) for name, v in (("drafts", drafts), ("accepted", accepted))}
    return kt.metadata(
        offsets, computed=i.integers(*computed), slot_table=torch.tensor(slots, device=device), num_tokens=sum(lengths),
        max_tokens=96, max_sequences=4, width=width, null_slot=0, **optional,
    )  # fmt: skip


def near(got, want):
    """Decode rounds elsewhere than chunked prefill does."""
    return float((got - want).norm() / want.norm()) <= 1e-5


@pytest.mark.parametrize("parts", [1, 3])
def test_chunked_mixed_steps_equal_one_prefill(device, parts):
    """Prefill, then a step with a decode row of one request and a prefill row of another, then decodes."""
    layer = Layer(device, parts, 1, 70)
    whole = layer.step(range(70), tables(device, [70], [0], [[3]]), 1)
    other = Layer(device, parts, 1, 70)
    first = other.step(range(64), tables(device, [64], [0], [[5]]), 1)
    # Row 64 of request one beside the first five tokens of a second request.
    mixed = other.step([64, 0, 1, 2, 3, 4], tables(device, [1, 5], [64, 0], [[5], [2]]), 1)
    rest = [other.step([t], tables(device, [1], [t], [[5]]), 1) for t in range(65, 70)]
    assert torch.equal(first, whole[:64]) and torch.equal(mixed[1:], whole[:5])
    assert near(torch.cat([mixed[:1], *rest]), whole[64:])


def test_rows_of_no_group_are_left_alone(device):
    layer = Layer(device, 1, 1, 8)
    t = tables(device, [3], [0], [[3]])
    assert (layer.step(range(8), t, 1)[3:] == 7).all()


def test_verify_with_rollback_equals_plain_decode(device):
    plain, drafts = Layer(device, 1, 3, 40), Layer(device, 1, 3, 40)
    for layer in (plain, drafts):
        layer.step(range(30), tables(device, [30], [0], [[7]]), 1)
    whole = torch.cat([plain.step([t], tables(device, [1], [t], [[7]]), 1) for t in range(30, 35)])
    slots = [[7, 8, 9]]
    # Two drafts, of which the second is wrong (token 5 in place of 32): two tokens are accepted.
    verify = drafts.step([30, 31, 5], tables(device, [3], [30], slots, 3, [2], [1]), 3)
    assert torch.equal(verify[:2], whole[:2])
    after = drafts.step([32, 33, 34], tables(device, [3], [32], slots, 3, [2], [2]), 3)
    assert torch.equal(after, whole[2:])


def test_attention_traces(device):
    layer = Layer(device, 1, 1, 8)
    want = layer.step(range(8), tables(device, [8], [0], [[3]]), 1)
    t = tables(device, [8], [0], [[3]])
    out = torch.zeros_like(want)
    arguments = ([layer.x[0]], layer.gate, layer.beta, layer.z, out, LAYER)
    with kt.serving(layers={LAYER: layer.mixer}, step=kt.Step.from_tables(t)):
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(torch.ops.libkda.attention.default, arguments, test_utils=checks)
        torch._dynamo.reset()
        torch.compile(kt.attention, fullgraph=True, backend="aot_eager")(*arguments)
        assert torch.equal(out, want)
        with pytest.raises(KeyError, match="layer: wanted one of model.layers.0.attn, got 'x'"):
            kt.attention(*arguments[:-1], "x")

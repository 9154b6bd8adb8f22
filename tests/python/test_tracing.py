"""Schemas, fakes and compilers (spec Q-2 to Q-4, Q-7; F40)."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
import cases
import libkda.torch as kt


@pytest.mark.parametrize("make", cases.MAKERS, ids=lambda m: m.__name__)
def test_T18_opcheck(device, make):
    case = make(device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(case.op.default, case.args, case.kwargs, test_utils=checks)


@pytest.mark.parametrize("make", cases.MAKERS, ids=lambda m: m.__name__)
def test_Q06_Q07_T18_fullgraph_compile_is_eager(device, make):
    """The compiled call gives the same bits in the same memory: mutated tensors are not copied (Q-7)."""
    case = make(device)
    want = case.by_operator()
    c, op = case.clone()
    addresses = [t.data_ptr() for t in c.written]
    torch._dynamo.reset()
    compiled = torch.compile(lambda args, kwargs: op(*args, **kwargs), fullgraph=True, backend="aot_eager")
    returned = compiled(c.args, c.kwargs)
    returned = [] if returned is None else [returned] if isinstance(returned, torch.Tensor) else list(returned)
    assert [t.data_ptr() for t in c.written] == addresses
    for got, wanted in zip(c.written + returned, want, strict=True):
        assert torch.equal(got, wanted)


def test_Q04_compile_with_dynamic_sizes(device):
    """One graph serves every number of tokens and sequences; its results are those of the eager calls."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def model(x, weight, window, gate, beta, A_log, pool, cu, slots):
        (y,) = kt.conv_prefill([x], [weight], [window], cu_seqlens=cu, slots=slots)
        q, k, v = y.split([cases.H * cases.K, cases.H * cases.K, cases.HV * cases.V], dim=-1)
        q, k = q.unflatten(-1, (-1, cases.K)), k.unflatten(-1, (-1, cases.K))
        o = kt.prefill(
            q, k, v.unflatten(-1, (-1, cases.V)), gate, beta, state=pool, cu_seqlens=cu, slots=slots,
            gate_family="softplus", A_log=A_log,
        )  # fmt: skip
        return o * 2

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for tokens, sequences in ((9, 6), (17, 3), (64, 5), (33, 4)):
        i = cases.Inputs(device, seed=tokens)
        bounds = torch.linspace(0, tokens, sequences + 1, device=device).to(torch.int32)
        arguments = (
            i.normal(tokens, cases.CHANNELS), i.normal(cases.CHANNELS, cases.W), i.pool(8, cases.W - 1, cases.CHANNELS),
            i.normal(tokens, cases.HV, cases.K), i.normal(tokens, cases.HV), i.parameters()["A_log"],
            i.pool(8, cases.HV, cases.V, cases.K), bounds, torch.arange(sequences, device=device),
        )  # fmt: skip
        other = [a.clone() if a.storage_offset() == 0 else a.clone().as_strided(a.shape, a.clone().stride()) for a in arguments]
        want, got = model(*other), compiled(*arguments)
        assert torch.equal(got, want)
        assert torch.equal(arguments[6], other[6]) and torch.equal(arguments[2], other[2])
    assert len(graphs) == 1


FLAGS = [dict(), dict(out=True), dict(final=True), dict(checkpoint=True), dict(out=True, final=True, checkpoint=True)]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "+".join(f) or "plain")
def test_Q03_F40_results_do_not_depend_on_flags(device, flags):
    case = cases.prefill_packed(device)
    q, k, v, gate, beta, out, state, _ = case.args
    options = {"gate_family": "bounded", "lower_bound": -5.0, "beta_is_logits": False}
    if "final" in flags:
        options["final_state"] = case.kwargs["final_state"]
    if "checkpoint" in flags:
        options.update((name, value) for name, value in case.kwargs.items() if name.startswith("checkpoint"))
    call = lambda: kt.prefill(q, k, v, gate, beta, state=state.clone(), out=out if "out" in flags else None, **options)  # noqa: E731
    torch._dynamo.reset()
    eager, compiled = call(), torch.compile(call, fullgraph=True, backend="aot_eager")()
    assert isinstance(eager, torch.Tensor) and torch.equal(eager, compiled)
    assert eager.dtype == compiled.dtype == q.dtype and eager.shape == v.shape


SCHEMAS = {
    "state_gather": "(Tensor pool, Tensor indices, Tensor? has_initial_state, str layer) -> Tensor",
    "state_scatter": "(Tensor(a!) pool, Tensor indices, Tensor packed, str layer) -> ()",
    "attention": "(Tensor[] x, Tensor gate, Tensor beta, Tensor? z, Tensor(a!) core_attn_out, str layer) -> ()",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_Q01_schemas(name):
    assert str(getattr(torch.ops.libkda, name).default._schema) == f"libkda::{name}{SCHEMAS[name]}"


MUTATED = {
    "prefill": {"out", "state", "final_state", "checkpoint_states"},
    "decode": {"out", "state"},
    "verify_record": {"out", "state", "record_u", "record_kg", "record_count"},
    "commit": {"state", "record_count", "conv_state"},
    "decode_step": {"out", "state", "conv_state", "record_u", "record_kg", "record_count"},
    "conv_prefill": {"out", "state"},
    "conv_update": {"out", "state"},
    "gated_norm": {"out"},
    "segment_summary": set(),
    "segment_merge": set(),
    "metadata": set(),
}


@pytest.mark.parametrize("name", MUTATED)
def test_Q02_exactly_these_arguments_are_mutated(name):
    schema = getattr(torch.ops.libkda, name).default._schema
    assert {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write} == MUTATED[name]

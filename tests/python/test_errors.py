"""What wrong calls raise: the argument, what was wanted, what came; the same from the real kernel and from the fake one."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
from torch._subclasses.fake_tensor import FakeTensorMode

import cases
import libkda
import libkda.torch as kt
from libkda.torch._options import WORDS


def changed(case, argument, change):
    """The case's call with one argument, or one word of its plan, replaced."""
    c, op = case.clone()
    if argument in WORDS:
        at = next(i for i, a in enumerate(c.args) if isinstance(a, str))
        value = change(None)
        kept = [w for w in c.args[at].split() if not w.startswith(argument + "=")]
        return op, [*c.args[:at], " ".join([*kept, f"{argument}={value}"]), *c.args[at + 1 :]], dict(c.kwargs), c
    names = [a.name for a in op.default._schema.arguments]
    args, kwargs = list(c.args), dict(c.kwargs)
    at = names.index(argument)
    if at < len(args):
        args[at] = change(args[at])
    else:
        kwargs[argument] = change(kwargs.get(argument))
    return op, args, kwargs, c


WRONG = {
    "rank": (cases.prefill, "gate", lambda t: t[0], "gate"),
    "tokens": (cases.prefill, "k", lambda t: t[:-1], "k"),
    "dtype": (cases.prefill, "v", lambda t: t.double(), "v"),
    "bias of H values (F39)": (cases.prefill, "dt_bias", lambda t: t[:, 0].contiguous(), "dt_bias"),
    "inner stride (F35)": (
        cases.prefill,
        "state",
        lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
        "state",
    ),
    "offsets and ranges": (cases.prefill, "begin", lambda t: torch.zeros(3, dtype=torch.int32), "sequences"),
    "flags": (cases.prefill, "has_initial_state", lambda t: t.int(), "has_initial_state"),
    "float slots": (cases.decode, "slots", lambda t: t.float(), "slots"),
    "accepted dtype": (cases.decode_columns, "accepted", lambda t: t.long(), "accepted"),
    "count dtype": (cases.verify_record, "record_count", lambda t: t.long(), "record"),
    "two parts": (cases.conv_prefill, "x", lambda ts: ts[:2], "x"),
    "family": (cases.decode, "gate_family", lambda _: "exponential", "gate_family"),
    "window layout": (cases.decode_step, "layout", lambda _: "NHWC", "layout"),
    "norm weight": (cases.gated_norm, "weight", lambda t: t[:-1], "weight"),
    "summaries": (cases.segment_merge, "summaries", lambda t: t[0], "summaries"),
    "computed and has_state": (cases.metadata, "computed", lambda _: None, "step"),
}


@pytest.mark.parametrize("what", WRONG)
def test_Q04_wrong_calls_name_the_argument(device, what):
    make, argument, change, named = WRONG[what]
    if device != "cpu" and argument in ("begin",):
        pytest.skip("the tensor of this case is made on the CPU")
    op, args, kwargs, case = changed(make(device), argument, change)
    before = [t.clone() for t in case.written]
    with pytest.raises(ValueError, match=rf"^{named}.*wanted .*got "):
        op(*args, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(case.written, before, strict=True)), "nothing is written"
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        with pytest.raises((ValueError, torch._dynamo.exc.TorchRuntimeError), match="wanted .*got "):
            op(*fake[0], **fake[1])


def test_F62_gate_family_must_fit(device):
    make = cases.prefill_packed(device)
    for bound in (0.0, float("nan"), 1.0):
        op, args, kwargs, _ = changed(make, "lower_bound", lambda _, b=bound: b)
        with pytest.raises(ValueError, match="lower_bound"):
            op(*args, **kwargs)
    op, args, kwargs, _ = changed(make, "gate_family", lambda _: "softplus")
    with pytest.raises(ValueError, match="lower_bound: wanted none"):
        op(*args, **kwargs)


def test_a_named_backend_that_cannot_serve_says_every_reason(device):
    op, args, kwargs, _ = changed(cases.prefill(device), "backend", lambda _: "fused")
    with pytest.raises(RuntimeError, match=r"UNSUPPORTED.*fused(.|\n)*wanted"):
        op(*args, **kwargs)
    op, args, kwargs, _ = changed(cases.prefill(device), "backend", lambda _: "fastest")
    with pytest.raises(ValueError, match="fastest"):
        op(*args, **kwargs)


def test_F56_widths(device):
    for width in (1, 9, 16):
        op, args, kwargs, _ = changed(cases.decode_columns(device), "width", lambda _, w=width: w)
        kwargs["slots"] = torch.arange(2 * width, device=device).view(2, width) % 9
        kwargs["length"] = torch.minimum(kwargs["length"], torch.tensor(width, device=device, dtype=torch.int32))
        op(*args, **kwargs)
    for width in (0, 17):
        op, args, kwargs, _ = changed(cases.decode_columns(device), "width", lambda _, w=width: w)
        with pytest.raises(ValueError, match=f"width: wanted 1 to 16, got {width}"):
            op(*args, **kwargs)


def test_F06_checked_mode_reports_values(device):
    if device != "cpu":
        pytest.skip("checked mode reads values on the host")
    op, args, kwargs, _ = changed(cases.prefill(device), "slots", lambda t: torch.tensor([4, 99, 2]))
    op(*args, **kwargs)
    with pytest.raises(ValueError, match="slots.*99"):
        op(*args[:-1], args[-1] + " checked=1", **kwargs)


def test_G05_types_of_errors(device):
    q, k, v, gate, beta, *_ = cases.prefill(device).args
    plain = {
        "cu_seqlens": torch.tensor([0, 40], device=device),
        "gate_family": "bounded",
        "lower_bound": -5.0,
        "backend": "fused",
    }
    with pytest.raises(libkda.Unsupported, match="fused(.|\n)*wanted") as caught:
        kt.prefill(q, k, v, gate, beta, **plain)
    assert isinstance(caught.value, RuntimeError)
    offsets, step = torch.tensor([0, 1], device=device), torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(KeyError, match="LIBKDA_CPU.*NOWHERE"):
        kt.metadata(offsets, computed=step, num_tokens=1, max_tokens=1, max_sequences=1, backend="NOWHERE")
    assert issubclass(libkda.InvalidArgument, ValueError) and issubclass(libkda.OutOfMemory, MemoryError)
    assert all(issubclass(kind, RuntimeError) for kind in libkda._errors.BY_STATUS.values())


def test_words_of_a_plan(device):
    for word in ("norm_eps=1e-6", "tempo=3", "fresh", "fresh=yes", "max_tokens=many", "layout=SD"):
        op, args, kwargs, case = changed(cases.prefill(device), "backend", lambda _: "auto")
        with pytest.raises(ValueError, match=f"{word.split('=')[0]}"):
            op(*args[:-1], f"{args[-1]} {word}", **kwargs)
    with pytest.raises(ValueError, match="gate_family: wanted .* got none"):
        op(*args[:-1], "", **kwargs)
    assert kt.plan_words(gate_family="plain", width=1, fresh=True, null_slot=0) == "gate_family=plain fresh=1 null_slot=0"


def test_aliased_output_is_refused(device):
    case = cases.gated_norm(device)
    o, z, weight, _ = case.args
    with pytest.raises(ValueError, match="out"):
        kt.gated_norm(o, z, weight, out=z)


def test_absent_context_is_said(device):
    pool = torch.zeros(3, 1, 2, 2, device=device)
    with pytest.raises(libkda.PreconditionFailed, match="'layer.3'.*serving"):
        kt.state_gather(pool, torch.tensor([0], device=device), None, "layer.3")
    with pytest.raises(RuntimeError, match="FAILED_PRECONDITION: .*'layer.3'"):
        torch.ops.libkda.state_gather(pool, torch.tensor([0], device=device), None, "layer.3")
    with pytest.raises(libkda.PreconditionFailed, match="'layer.3'.*serving"):
        kt.attention([pool[:, 0, 0]], pool[:, 0], pool[:, 0, 0], None, pool[:, 0], "layer.3")


def test_S09_stages_want_queries_and_alignment(device):
    """On the CPU nothing is kept, but what is given is checked there too."""
    case = cases.segment_summary(device)
    plan = libkda.SegmentSummaryPlan(libkda.Context(device), **case.description)
    memory = torch.empty(4096 + 256, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 256
    q = cases.Inputs(device, seed=11).tokens(40)["q"]
    with pytest.raises(libkda.InvalidArgument, match="q: wanted the queries"):
        plan.run(**case.run, stages=memory[start : start + 4096])
    with pytest.raises(libkda.InvalidArgument, match="stages: wanted memory aligned"):
        plan.run(**case.run, q=q, stages=memory[start + 16 : start + 4096])
    with pytest.raises(libkda.InvalidArgument, match="stages"):
        plan.run(**case.run, q=q, stages=memory.view(torch.int32)[:64])

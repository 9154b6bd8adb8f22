"""SGLang's KDA kernel dispatcher on libkda (spec XS-10 to XS-12): the real dispatcher and plug-in hooks, on the CPU."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
pytest.importorskip("sglang", reason="sglang is not installed")
pytest.importorskip("sglang.srt.layers.attention.linear.kda_backend", reason="sglang's dispatcher cannot be imported")
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.linear.kda_backend import KDAKernelDispatcher
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
from sglang.srt.plugins.hook_registry import HookRegistry

import libkda
import libkda.sglang

pytestmark = pytest.mark.filterwarnings("ignore")
H, HV, K, V = 2, 4, 16, 24
BOUND = -5.0


@pytest.fixture(autouse=True, scope="module")
def registered():
    libkda.sglang.register()
    libkda.sglang.register()
    HookRegistry.apply_hooks()


@pytest.fixture(autouse=True)
def fresh_counts():
    libkda.stats(reset=True)


def dispatcher(decode="libkda", prefill="libkda", verify="libkda"):
    return KDAKernelDispatcher(*(LinearAttnKernelBackend(name) for name in (decode, prefill, verify)))


def served(phase):
    return libkda.stats().get(f"sglang.{phase}", {}).get("served", 0)


class Tokens:
    """Rows after the convolution: q, k, v merged, raw gate and beta; a pool whose slot 0 is live."""

    def __init__(self, count, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.qkv = torch.randn(count, 2 * H * K + HV * V, generator=g)
        self.a, self.b = torch.randn(count, HV, K, generator=g), torch.randn(count, HV, generator=g)
        g = torch.Generator().manual_seed(99)
        self.A_log, self.dt_bias = torch.rand(1, 1, HV, 1, generator=g), torch.randn(HV * K, generator=g) * 0.3

    def split(self, rows=slice(None)):
        q, k, v = self.qkv[rows].split([H * K, H * K, HV * V], dim=-1)
        return q.unflatten(-1, (H, K))[None], k.unflatten(-1, (H, K))[None], v.unflatten(-1, (HV, V))[None]

    def form(self, bound):
        return dict(A_log=self.A_log, dt_bias=self.dt_bias, lower_bound=bound)

    def reference(self, rows, state, bound):
        """Outputs and the state after each token, float64."""
        q, k, v = (t[0].double() for t in self.split(rows))
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, k = (t.repeat_interleave(HV // H, 1) for t in (q, k))
        speed, raw = self.A_log.double().view(-1, 1).exp(), self.a[rows].double() + self.dt_bias.double().view(HV, K)
        gate = -speed * torch.nn.functional.softplus(raw) if bound is None else bound * torch.sigmoid(speed * raw)
        outs, states, state = [], [], state.double()
        for t in range(q.shape[0]):
            state = state * gate[t].exp()[:, None, :]
            u = self.b[rows][t].double().sigmoid()[:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state = state + u[:, :, None] * k[t][:, None, :]
            outs.append(torch.einsum("hvk,hk->hv", state, q[t]) * K**-0.5)
            states.append(state)
        return torch.stack(outs), states


def pool(slots=6):
    return torch.randn(slots, HV, V, K, generator=torch.Generator().manual_seed(5))


def near(got, want):
    return float((got.double() - want).norm() / want.norm()) <= 1e-5


def test_the_dispatcher_holds_libkdas_kernel_for_the_phases_that_name_it():
    d = dispatcher()
    assert {type(k).__name__ for k in (d.decode_kernel, d.extend_kernel, d.verify_kernel)} == {"LibKDAKernel"}
    assert d.supports_packed_decode and d.supports_packed_decode_safe_gate
    assert d.verify_backend.is_custom() and d.prefill_backend.is_custom()
    stock = dispatcher("triton", "triton", "triton")
    assert {type(k) for k in (stock.decode_kernel, stock.extend_kernel, stock.verify_kernel)} == {TritonKDAKernel}
    mixed = dispatcher("triton", "libkda", "triton")
    assert type(mixed.decode_kernel) is TritonKDAKernel and type(mixed.extend_kernel).__name__ == "LibKDAKernel"
    assert choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES.count("libkda") == 1


@pytest.mark.parametrize("bound", [None, BOUND])
def test_extend_in_place_then_packed_decode(bound):
    d, t, states = dispatcher(), Tokens(75), pool()
    before = states.clone()
    cu, slots = torch.tensor([0, 70, 73], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    q, k, v = t.split(slice(0, 73))
    out = d.extend(
        q, k, v, t.a[None, :73], t.b[None, :73], ssm_states=states, cache_indices=slots, query_start_loc=cu, beta_is_raw=True,
        extend_prefix_lens=torch.tensor([0, 5]), **t.form(bound),
    )  # fmt: skip
    assert isinstance(out, torch.Tensor) and out.shape == (1, 73, HV, V)
    first, after_first = t.reference(slice(0, 70), torch.zeros(HV, V, K), bound)
    second, after_second = t.reference(slice(70, 73), before[4], bound)
    assert near(out[0], torch.cat([first, second]))
    assert near(states[0], after_first[-1]) and near(states[4], after_second[-1])
    rest = d.packed_decode(
        t.qkv[73:], t.a[73:], t.b[73:, None], scale=K**-0.5, ssm_states=states, cache_indices=torch.tensor([0, -1]),
        num_v_heads=HV, head_v_dim=V, **t.form(bound),
    )  # fmt: skip
    want, after = t.reference(slice(73, 74), after_first[-1], bound)
    assert rest.shape == (1, 2, HV, V) and near(rest[0, :1], want) and not rest[0, 1].any()
    assert near(states[0], after[-1]) and torch.equal(states[[1, 2, 3, 5]], before[[1, 2, 3, 5]])
    assert (served("extend"), served("decode")) == (1, 1)


def test_plain_decode():
    d, t, states = dispatcher(), Tokens(2), pool()
    before = states.clone()
    q, k, v = t.split()
    out = d.decode(
        q, k, v, t.a[None], t.b[None], ssm_states=states, cache_indices=torch.tensor([3, 1]), query_start_loc=torch.arange(3),
        **t.form(None),
    )  # fmt: skip
    for row, slot in enumerate((3, 1)):
        want, after = t.reference(slice(row, row + 1), before[slot], None)
        assert near(out[0, row], want[0]) and near(states[slot], after[-1])
    assert served("decode") == 1


def test_tracked_states_are_snapshots_before_a_chunk():
    d, t, states = dispatcher(), Tokens(140), pool()
    before = states.clone()
    track = torch.full((3, HV, V, K), 7.0)
    cu = torch.tensor([0, 135, 139, 140], dtype=torch.int32)
    q, k, v = t.split()
    out, h = d.extend(
        q, k, v, t.a[None], t.b[None], ssm_states=states, cache_indices=torch.tensor([1, 2, 3]), query_start_loc=cu,
        beta_is_raw=True, extend_prefix_lens=torch.tensor([0, 64, 1]), return_intermediate_states=True, track_state=track,
        track_chunk_idx=torch.tensor([2, 0, -1], dtype=torch.int32), track_ssm_h_src=torch.tensor([2]), **t.form(BOUND),
    )  # fmt: skip
    want, after = t.reference(slice(0, 135), torch.zeros(HV, V, K), BOUND)
    assert h is None and near(out[0, :135], want)
    assert near(track[0], after[127]) and torch.equal(track[1], before[2])


def test_verify_leaves_the_pool_and_writes_the_steps():
    d, t, states = dispatcher(), Tokens(7), pool()
    before = states.clone()
    buffer = torch.full((5, 4, HV, V, K), 7.0)
    cu, rows = torch.tensor([0, 4, 7, 7], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)
    q, k, v = t.split()
    arguments = dict(
        q=q, k=k, v=v, a=t.a[None], b=t.b[None], ssm_states=states, cache_indices=torch.tensor([0, 5, -1], dtype=torch.int32),
        query_start_loc=cu, intermediate_states_buffer=buffer, intermediate_state_indices=rows, cache_steps=4,
    )  # fmt: skip
    out = d.target_verify(**arguments, retrieve_parent_token=None, **t.form(BOUND))
    assert torch.equal(states, before)
    for piece, slot, row in ((slice(0, 4), 0, 2), (slice(4, 7), 5, 0)):
        want, after = t.reference(piece, before[slot], BOUND)
        assert near(out[0, piece], want)
        assert all(near(buffer[row, step], state) for step, state in enumerate(after))
    assert (buffer[1] == 7).all() and (buffer[3:] == 7).all() and (buffer[0, 3] == 7).all()
    assert served("target_verify") == 1


def test_what_libkda_does_not_serve_is_tritons(monkeypatch):
    d, t, states = dispatcher(), Tokens(4), pool()
    calls = []
    for name in ("extend", "target_verify", "packed_decode"):
        monkeypatch.setattr(TritonKDAKernel, name, lambda self, *a, _name=name, **k: calls.append(_name))
    q, k, v = t.split()
    cu, slots = torch.tensor([0, 4]), torch.tensor([1])
    common = dict(ssm_states=states, cache_indices=slots, query_start_loc=cu, **t.form(None))
    d.extend(q, k, v, t.a[None], t.b[None], beta_is_raw=True, is_spec_decode=True, **common)
    verify = dict(
        intermediate_states_buffer=torch.zeros(2, 4, HV, V, K), intermediate_state_indices=torch.tensor([0]), cache_steps=4
    )
    d.target_verify(q=q, k=k, v=v, a=t.a[None], b=t.b[None], retrieve_parent_token=torch.zeros(1, 4), **verify, **common)
    d.packed_decode(
        t.qkv, t.a, t.b, scale=1.0, ssm_states=states, cache_indices=torch.arange(4), num_v_heads=HV, head_v_dim=V,
        replayssm_d=torch.zeros(1), **t.form(None),
    )  # fmt: skip
    assert calls == ["extend", "target_verify", "packed_decode"]
    reasons = {phase: list(counts) for phase, counts in libkda.stats().items()}
    assert reasons == {
        "sglang.decode": ["declined: ReplaySSM"],
        "sglang.extend": ["declined: an extend that must be rolled back"],
        "sglang.target_verify": ["declined: a tree"],
    }


def test_an_unknown_name_is_still_sglangs_error(monkeypatch):
    monkeypatch.setattr(libkda.sglang, "_ours", lambda: False)  # the server's configuration names somebody else's backend
    with pytest.raises((ValueError, NotImplementedError)):
        dispatcher("theirs", "triton", "triton")


def test_the_guard(monkeypatch):
    from libkda import _guard

    monkeypatch.setattr(libkda.sglang, "_registered", False)
    monkeypatch.setattr(_guard, "version_of", lambda _: (0, 6, 0))
    libkda.sglang.register()
    assert not libkda.sglang._registered
    monkeypatch.setenv("LIBKDA_STRICT", "1")
    with pytest.raises(RuntimeError, match="sglang 0.6.0"):
        libkda.sglang.register()


def test_sglang_finds_the_entry_point_and_its_allow_list_excludes_it(monkeypatch):
    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins_by_group

    assert load_plugins_by_group(GENERAL_PLUGINS_GROUP)["libkda"][0] is libkda.sglang.register
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    assert "libkda" not in load_plugins_by_group(GENERAL_PLUGINS_GROUP)

"""FLA's functions and its KimiDeltaAttention layer on libkda, against FLA's own PyTorch references (spec XF-10 to XF-12)."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
pytest.importorskip("triton", reason="FLA needs triton")
pytest.importorskip("fla.ops.kda", reason="fla-core is not installed")
import libkda
import libkda.fla

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_counts():
    libkda.stats(reset=True)


def served(function):
    return libkda.stats().get(f"fla.{function}", {}).get("served", 0)


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def inputs(device, dtype, tokens=70, batch=2, heads=2, value_heads=4, keys=16, values=24):
    g = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=g).to(dtype).to(device)

    q, k, v = normal(batch, tokens, heads, keys), normal(batch, tokens, heads, keys), normal(batch, tokens, value_heads, values)
    raw, beta = normal(batch, tokens, value_heads, keys), normal(batch, tokens, value_heads)
    A_log, dt_bias = normal(value_heads).float() * 0.3, normal(value_heads * keys).float() * 0.3
    state = normal(batch, value_heads, keys, values).float()
    return q, k, v, raw, beta, A_log, dt_bias, state


def reference(q, k, v, g, beta, state, scale=None):
    """FLA's token loop on normalised q and k, one group of heads repeated."""
    from fla.ops.kda.naive import naive_recurrent_kda

    repeat = v.shape[2] // q.shape[2]
    q, k = (torch.nn.functional.normalize(t.float(), dim=-1, eps=1e-6).repeat_interleave(repeat, 2) for t in (q, k))
    return naive_recurrent_kda(q, k, v.float(), g, beta, scale=scale, initial_state=state, output_final_state=True)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
@torch.no_grad()
def test_I04_operators_equal_the_naive_loop(device, name, bound):
    from fla.ops import kda
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate

    q, k, v, raw, beta, A_log, dt_bias, state = inputs(device, torch.float32)
    gate = naive_kda_gate(raw, A_log, dt_bias) if bound is None else naive_kda_lowerbound_gate(raw, A_log, dt_bias, bound)
    want, want_state = reference(q, k, v, gate, beta.sigmoid(), state)
    function = getattr(kda, name)
    raw_form = dict(use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, lower_bound=bound)
    plain = dict(use_qk_l2norm_in_kernel=True, output_final_state=True)
    for got in (
        function(q, k, v, raw, beta, initial_state=state, **plain, **raw_form),
        function(q, k, v, gate, beta.sigmoid(), initial_state=state, **plain),
    ):
        assert got[1].shape == state.shape and got[1].dtype == torch.float32
        assert error(got[0], want) <= 1e-5 and error(got[1], want_state) <= 1e-5
    turned = state.transpose(-1, -2).contiguous()
    first = function(q, k, v, raw, beta, initial_state=turned, state_v_first=True, **plain, **raw_form)
    assert error(first[1].transpose(-1, -2), want_state) <= 1e-5
    assert served("chunk_kda" if name == "chunk_kda" else "fused_recurrent_kda_fwd") == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_XF05_states_in_place(device, dtype):
    """As vLLM calls the kernel: a token of each row, a strided pool's slots; and packed states of longer rows without slots."""
    from fla.ops.kda import fused_recurrent_kda
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    q, k, v, raw, beta, A_log, dt_bias, state = inputs(device, dtype, tokens=1, batch=5)
    first = state.transpose(-1, -2).to(dtype).contiguous()
    form = dict(
        A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True,
        state_v_first=True,
    )  # fmt: skip
    want, last = fused_recurrent_kda(q, k, v, raw, beta, initial_state=first.float(), output_final_state=True, **form)
    memory = torch.full((8, *first.shape[1:-1], 2 * first.shape[-2] * first.shape[-1]), 7.0, dtype=dtype, device=device)
    pool = memory.view(8, -1)[:, : first[0].numel()].view(8, *first.shape[1:])
    slots = torch.tensor([6, 0, 3, 1, 7], dtype=torch.int32, device=device)
    pool[slots.long()] = first
    packed = dict(zip(("q", "k", "v", "g", "beta"), (t.flatten(0, 1)[None] for t in (q, k, v, raw, beta)), strict=True))
    cu = torch.arange(6, dtype=torch.int32, device=device)
    libkda.stats(reset=True)
    out, final = fused_recurrent_kda_fwd(
        **packed, initial_state=pool, inplace_final_state=True, ssm_state_indices=slots, cu_seqlens=cu, **form
    )
    assert served("fused_recurrent_kda_fwd") == 1 and final.data_ptr() == pool.data_ptr()
    assert torch.equal(out[0], want[:, 0]) and torch.equal(pool[slots.long()], last.to(dtype))
    assert (pool[[2, 4, 5]] == 7).all() and (memory.view(8, -1)[:, first[0].numel() :] == 7).all()

    q, k, v, raw, beta, *_ = inputs(device, dtype, tokens=9, batch=5)
    want, last = fused_recurrent_kda(q, k, v, raw, beta, initial_state=first.float(), output_final_state=True, **form)
    tokens = dict(zip(("q", "k", "v", "g", "beta"), (q, k, v, raw, beta), strict=True))
    out, final = fused_recurrent_kda_fwd(**tokens, initial_state=first, inplace_final_state=True, **form)
    assert final is first and torch.equal(out, want) and torch.equal(first, last.to(dtype))
    backend = libkda.fla.LibKDABackend()
    for changes, reason in (
        ({"state_v_first": False}, "a K-first state updated in place"),
        ({"ssm_state_indices": slots}, "slots with several tokens of a sequence"),
        ({"ssm_state_indices": slots[:, None]}, "slots that are not [N]"),
        ({"initial_state": first[:3]}, "a wrong number of initial states"),
        ({"inplace_final_state": False, "ssm_state_indices": slots}, "slots of a state that is not updated in place"),
        ({"num_accepted_tokens": slots}, "accepted counts"),
    ):
        asked = {**tokens, "initial_state": first, "inplace_final_state": True, **form, **changes}
        assert backend.verify("fused_recurrent_kda_fwd", **asked) == (False, reason)


@torch.no_grad()
def test_offsets_and_empty_sequences(device):
    from fla.ops.kda import chunk_kda

    q, k, v, raw, beta, A_log, dt_bias, _ = inputs(device, torch.float32, tokens=40, batch=1)
    states = torch.randn(3, 4, 16, 24, device=device)
    cu = torch.tensor([0, 7, 7, 40], device=device)
    form = dict(use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, output_final_state=True)
    out, final = chunk_kda(q, k, v, raw, beta, initial_state=states, cu_seqlens=cu, **form)
    assert torch.equal(final[1], states[1])
    for n, (a, b) in ((0, (0, 7)), (2, (7, 40))):
        cut = [t[:, a:b] for t in (q, k, v, raw, beta)]
        alone, last = chunk_kda(*cut, initial_state=states[n : n + 1], **form)
        assert error(out[:, a:b], alone) <= 1e-6 and error(final[n], last[0]) <= 1e-6


def test_declined_calls_stay_with_fla(device):
    q, k, v, raw, beta, A_log, dt_bias, state = inputs(device, torch.float32)
    backend = libkda.fla.LibKDABackend()
    cases = {
        "gradients": ((q.clone().requires_grad_(), k, v, raw, beta), {}),
        "intermediate states": ((q, k, v, raw, beta), {"return_intermediate_states": True}),
        "context parallelism": ((q, k, v, raw, beta), {"cp_context": object()}),
        "chunk_size": ((q, k, v, raw, beta), {"chunk_size": 48}),
        "a wrong number of initial states": ((q, k, v, raw, beta), {"initial_state": state[:1]}),
        "lower_bound -7": ((q, k, v, raw, beta), {"use_gate_in_kernel": True, "lower_bound": -7}),
        "neg_eigval without sigmoid": ((q, k, v, raw, beta), {"allow_neg_eigval": True}),
        "keywords tempo": ((q, k, v, raw, beta), {"tempo": 3}),
    }
    for reason, (args, keywords) in cases.items():
        assert backend.verify("chunk_kda", *args, **keywords) == (False, reason)
    counted = libkda.stats()["fla.chunk_kda"]
    assert {f"declined: {reason}" for reason in cases} == set(counted)


@torch.no_grad()
def test_whole_layer_prefill_then_steps(device):
    """FLA's layer, 66 tokens and four cached steps, equals itself in one shot and over FLA's PyTorch references."""
    layers = pytest.importorskip("fla.layers.kda", reason="flash-linear-attention is not installed")
    from fla.models.utils import Cache

    torch.manual_seed(0)
    layer = layers.KimiDeltaAttention(hidden_size=64, head_dim=16, num_heads=4, layer_idx=0).to(device).eval()
    x = torch.randn(2, 70, 64, device=device)
    whole, _, _ = layer(x)
    cache = Cache()
    parts = [layer(x[:, :66], past_key_values=cache, use_cache=True)[0]]
    parts += [layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0] for t in range(66, 70)]
    assert error(torch.cat(parts, 1), whole) <= 1e-5
    assert error(by_hand(layer, x), whole) <= 1e-5
    assert all(served(f) for f in ("chunk_kda", "fused_recurrent_kda_fwd", "causal_conv1d_fwd", "causal_conv1d_update"))
    assert served("layer_norm_gated_fwd")


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
@torch.no_grad()
def test_XT03_whole_layer_against_flas_own_kernels(cuda, monkeypatch, dtype, limit):
    """Prefill and cached steps. FLA's kernels multiply float32 in TF32: what they are off themselves comes on top there."""
    layers = pytest.importorskip("fla.layers.kda", reason="flash-linear-attention is not installed")
    from fla.models.utils import Cache

    torch.manual_seed(0)
    layer = layers.KimiDeltaAttention(hidden_size=256, head_dim=64, num_heads=4, layer_idx=0).to(cuda, dtype).eval()
    x = torch.randn(2, 200, 256, device=cuda).to(dtype)

    def run():
        cache = Cache()
        parts = [layer(x[:, :196], past_key_values=cache, use_cache=True)[0]]
        parts += [layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0] for t in range(196, 200)]
        return torch.cat(parts, 1)

    got = run()
    assert all(served(f) for f in ("chunk_kda", "fused_recurrent_kda_fwd", "causal_conv1d_fwd", "layer_norm_gated_fwd"))
    monkeypatch.setenv("FLA_LIBKDA", "0")
    libkda.stats(reset=True)
    stock = run()
    assert not any(served(f) for f in ("chunk_kda", "fused_recurrent_kda_fwd", "causal_conv1d_fwd", "layer_norm_gated_fwd"))
    want = by_hand(layer.double(), x.double())
    far = {"libkda": error(got, want), "FLA": error(stock, want), "apart": error(got, stock)}
    print(f"layer {dtype}: {far}")
    assert far["apart"] <= limit + (far["FLA"] if dtype == torch.float32 else 0), far
    assert far["libkda"] <= (limit if dtype == torch.float32 else max(limit, 1.25 * far["FLA"])), far


def by_hand(layer, x):
    """The layer's definition in PyTorch and FLA's naive loop."""
    from fla.ops.kda.gate import naive_kda_gate

    def conv(module, t):
        y = torch.nn.functional.conv1d(
            t.transpose(1, 2), module.weight, padding=module.weight.shape[-1] - 1, groups=t.shape[-1]
        )
        return torch.nn.functional.silu(y[..., : t.shape[1]]).transpose(1, 2).unflatten(-1, (layer.num_heads, -1))

    q, k, v = (conv(c, p(x)) for c, p in zip(
        (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d), (layer.q_proj, layer.k_proj, layer.v_proj), strict=True,
    ))  # fmt: skip
    g = naive_kda_gate(layer.f_proj(x).unflatten(-1, (layer.num_heads, -1)), layer.A_log, layer.dt_bias)
    o, _ = reference(q, k, v, g, layer.b_proj(x).sigmoid(), None)
    z = layer.g_proj(x).unflatten(-1, (layer.num_heads, -1))
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight * z.sigmoid()
    return layer.o_proj(o.flatten(2))


@torch.no_grad()
def test_I03_conv_caches_are_flas(device):
    """The cache holds the last W inputs; update moves it in place; both continue what a longer prefill would."""
    from fla.modules.causal_conv1d.ops import causal_conv1d_fwd, causal_conv1d_update

    x, weight = torch.randn(2, 9, 12, device=device), torch.randn(12, 4, device=device)
    whole, _ = causal_conv1d_fwd(x, weight, None, None, activation="silu")
    y, cache = causal_conv1d_fwd(x[:, :3], weight, None, None, output_final_state=True, activation="silu")
    assert torch.equal(cache, torch.nn.functional.pad(x[:, :3].transpose(1, 2), (1, 0)))
    more, cache = causal_conv1d_fwd(
        x[:, 3:5], weight, None, None, initial_state=cache, output_final_state=True, activation="silu"
    )
    assert torch.equal(cache, x[:, 1:5].transpose(1, 2))
    address, rest = cache.data_ptr(), []
    for t in range(5, 9):
        step, cache = causal_conv1d_update(x[:, t : t + 1], cache, None, weight, None, "silu")
        rest.append(step)
        assert torch.equal(cache, x[:, t - 3 : t + 1].transpose(1, 2)) and cache.data_ptr() == address
    assert torch.equal(torch.cat([y, more, *rest], 1), whole)


def run(code, **environment):
    """Standard output and error of a fresh Python, in which libkda.fla is imported as `f`."""
    code = "import logging; logging.basicConfig(level='INFO'); import libkda._guard as guard\n" + code
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_switches_and_guard(monkeypatch):
    backend = libkda.fla.LibKDABackend()
    assert libkda.fla.REGISTERED and backend.is_enabled()
    monkeypatch.setenv("FLA_LIBKDA", "0")
    assert not backend.is_enabled()
    said = run("import libkda.fla as f; print(f.REGISTERED, f.register())")
    assert said.stdout.split() == ["True", "True"] and "libkda.fla: fla 0.6.0, hooked chunk_kda" in said.stderr
    said = run("import libkda.fla as f; print(f.REGISTERED)", FLA_DISABLE_BACKEND_DISPATCH="1")
    assert said.stdout.strip() == "False" and "nothing was hooked" in said.stderr
    said = run(
        "guard.version_of = lambda _: (0, 5, 1); import libkda.fla as f; import os; print(f.REGISTERED)\n"
        "os.environ['LIBKDA_STRICT'] = '1'; f.register()"
    )
    assert said.stdout.strip() == "False" and "nothing was hooked: fla 0.5.1" in said.stderr
    assert "RuntimeError: libkda.fla: nothing was hooked" in said.stderr

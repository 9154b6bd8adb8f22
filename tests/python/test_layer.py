"""KDALayer: from hidden states to hidden states, against the whole-layer vectors that other projects' code made."""

import dataclasses
import json
import pathlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
files = pytest.importorskip("safetensors.torch")
import safetensors

import libkda
import libkda.torch as kt

VECTORS = pathlib.Path(__file__).resolve().parents[1] / "data" / "vectors"
FILES = ("layer_kimi_linear", "layer_k3", "layer_glm5_next")


def error(x, reference):
    return float((x.double() - reference.double()).norm() / reference.double().norm())


class File:
    def __init__(self, name):
        self.path = VECTORS / f"{name}.safetensors"
        with safetensors.safe_open(self.path, "pt") as f:
            meta = f.metadata()
        self.prefill, self.decode = int(meta["prefill"]), int(meta["decode"])
        self.bound = None if meta["lower_bound"] == "none" else float(meta["lower_bound"])
        self.prefix = meta["weight_prefix"]
        self.tensors = files.load_file(self.path)

    def layer(self, device, dtype, **share):
        return kt.KDALayer.from_checkpoint(self.path, lower_bound=self.bound, dtype=dtype, device=device, **share)


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def serve(layer, states, x, prefill, slot=2, cut=64):
    """A prompt in two pieces (the first one cut long), then a token a step."""
    device = x.device
    out = [layer.prefill(x[:cut], states, ints(device, 0, cut), ints(device, slot))] if 0 < cut < prefill else []
    first = cut if out else 0
    flags = torch.tensor([bool(out)], device=device)
    out.append(layer.prefill(x[first:prefill], states, ints(device, 0, prefill - first), ints(device, slot), flags))
    out += [layer.decode(x[t : t + 1], states, ints(device, slot)) for t in range(prefill, x.shape[0])]
    return torch.cat(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FILES)
def test_L07_vectors_of_other_implementations(device, name, dtype):
    f = File(name)
    layer = f.layer(device, dtype)
    states = layer.new_state(4)
    out = serve(layer, states, f.tensors["hidden_states"].to(device, dtype), f.prefill).cpu()
    expected, exact = f.tensors["expected.out"], dtype == torch.float32
    cost = error(f.tensors["bf16_run.out"], expected)
    assert error(out, expected) <= (1e-5 if exact else 1.25 * cost)
    assert error(states.state[2].cpu(), f.tensors["expected.final_state"]) <= (1e-5 if exact else 1e-2)
    window = f.tensors["expected.conv_state_final"].T
    assert error(states.conv[2].cpu(), window) <= (1e-5 if exact else 1e-2)
    assert not states.state[[0, 1, 3]].any()


def test_L07_fp16(device):
    f = File("layer_kimi_linear")
    layer = f.layer(device, torch.float16)
    out = serve(layer, layer.new_state(4), f.tensors["hidden_states"].to(device, torch.float16), f.prefill)
    assert error(out.cpu(), f.tensors["expected.out"]) <= 1.25 * error(f.tensors["bf16_run.out"], f.tensors["expected.out"])


@pytest.mark.parametrize("name", FILES)
def test_L01_state_dicts_under_the_checkpoints_names(device, name):
    f = File(name)
    weights = {n.removeprefix(f.prefix): t for n, t in f.tensors.items() if n.startswith(f.prefix)}
    want = f.layer(device, torch.float32)
    module = torch.nn.ModuleDict({"mixer": kt.KDALayer(want.whole, dtype=torch.float32, device=device)})
    module.load_state_dict({f"mixer.{n}": t for n, t in weights.items()})
    own = kt.KDALayer(want.whole, dtype=torch.float32, device=device)
    own.load_state_dict(want.state_dict())
    for name, tensor in want.state_dict().items():
        assert torch.equal(module["mixer"].state_dict()[name], tensor) and torch.equal(own.state_dict()[name], tensor)
    with pytest.raises(libkda.InvalidArgument, match="k_proj.weight"):
        module.load_state_dict({f"mixer.{n}": t for n, t in weights.items() if n != "k_proj.weight"})
    with pytest.raises(libkda.InvalidArgument, match="A_log.*wanted"):
        own.load_parameters({**weights, "A_log": weights["A_log"].flatten()[:1]})


def test_L10_fused_projections(device):
    f = File("layer_kimi_linear")
    want = f.layer(device, torch.float32)
    w = {n.removeprefix(f.prefix): t for n, t in f.tensors.items() if n.startswith(f.prefix)}
    order = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
    fused = {
        "in_proj_qkvbfg_a.weight": torch.cat([w.pop(f"{n}.weight") for n in order]),
        "fused_fg_b_proj.weight": torch.cat([w.pop(f"{n}.weight") for n in ("f_b_proj", "g_b_proj")]),
        "conv1d.weight": torch.cat([w.pop(f"{n}_conv1d.weight").flatten(1)[:, None] for n in "qkv"]),
    }
    got = kt.KDALayer(want.whole, dtype=torch.float32, device=device)
    got.load_parameters({**w, **fused})
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor)


@pytest.mark.parametrize("shares", [[(0, 1), (1, 1)], [(0, 2), (2, 0)]], ids=str)
def test_L06_shares_sum_to_the_whole(device, shares):
    f = File("layer_k3")
    x = f.tensors["hidden_states"].to(device, torch.float32)
    total = torch.zeros_like(x)
    for heads in shares:
        layer = f.layer(device, torch.float32, heads=heads)
        total += serve(layer, layer.new_state(4), x, f.prefill)
    assert error(total.cpu(), f.tensors["expected.out"]) <= 1e-5
    even = f.layer(device, torch.float32, ranks=2, rank=1)
    assert even.heads == (1, 1)
    with pytest.raises(libkda.InvalidArgument, match="divides"):
        f.layer(device, torch.float32, ranks=3, rank=0)
    with pytest.raises(libkda.InvalidArgument, match="heads"):
        f.layer(device, torch.float32, heads=(1, 2))


def test_verify_with_rollback_and_a_mixed_step(device):
    f = File("layer_glm5_next")
    layer = f.layer(device, torch.float32)
    x = f.tensors["hidden_states"].to(device, torch.float32)
    want = f.tensors["expected.out"]
    states, n = layer.new_state(8, drafts=2), f.prefill
    layer.prefill(x[:n], states, ints(device, 0, n), ints(device, 3))
    slots, cu = ints(device, 3, 4, 5).view(1, 3), ints(device, 0, 3)
    wrong = torch.cat([x[n : n + 2], x[:1]])  # the second draft is rejected
    first = layer.verify(wrong, states, cu, slots)
    # The next verify window beside the prompt of another request.
    rows = torch.cat([x[:n], x[n + 2 : n + 5]])
    step = kt.Step(
        prefill=kt.Group(ints(device, 0), ints(device, n), ints(device, 6), torch.zeros(1, dtype=torch.bool, device=device)),
        spec=kt.Group(ints(device, n), ints(device, 3), slots, accepted=ints(device, 2)),
        width=3,
    )
    both = layer(rows, states, step)
    assert error(torch.cat([first[:2], both[n:]]).cpu(), want[n : n + 5]) <= 1e-5
    assert error(both[:n].cpu(), want[:n]) <= 1e-5


BIASED = libkda.LayerSpec(48, 2, 16, 24, 16, num_value_heads=4, output_gate_rank=8, conv_bias=True)


def biased(device, dtype):
    """A layer whose convolution and output gate have biases, of weights that the io dtype holds; and its tensors."""
    s, g = BIASED, torch.Generator().manual_seed(7)
    rows = {"q": s.num_heads * s.key_dim, "k": s.num_heads * s.key_dim, "v": s.num_value_heads * s.value_dim}
    sizes = {f"{n}_proj.weight": (size, s.hidden) for n, size in rows.items()}
    sizes |= {f"{n}_conv1d.weight": (size, 1, s.conv_width) for n, size in rows.items()}
    sizes |= {f"{n}_conv1d.bias": (size,) for n, size in rows.items()}
    sizes |= {
        "b_proj.weight": (s.num_value_heads, s.hidden), "f_proj.0.weight": (s.gate_rank, s.hidden),
        "f_proj.1.weight": (s.num_value_heads * s.key_dim, s.gate_rank), "g_proj.0.weight": (s.output_gate_rank, s.hidden),
        "g_proj.1.weight": (rows["v"], s.output_gate_rank), "g_proj.1.bias": (rows["v"],),
        "o_proj.weight": (s.hidden, rows["v"]), "o_norm.weight": (s.value_dim,), "A_log": (s.num_value_heads,),
        "dt_bias": (s.num_value_heads * s.key_dim,),
    }  # fmt: skip
    tensors = {}
    for name, size in sizes.items():
        scale = size[-1] ** -0.5 if "proj" in name and len(size) == 2 else 0.5
        tensors[name] = (torch.randn(size, generator=g) * scale).bfloat16().float()
    layer = kt.KDALayer(s, dtype=dtype, device=device)
    layer.load_parameters({n: t.to(dtype) if "proj" in n else t for n, t in tensors.items()})
    x = torch.randn(90, s.hidden, generator=g).bfloat16()
    return layer, tensors, x.to(device, dtype)


def definition(s, tensors, x):
    """Spec L-7 in fp64, a token at a time: output [T,D], state [HV,V,K] and window [W-1,channels] of a softplus layer whose
    convolution has a bias."""
    w, x = {n: t.double() for n, t in tensors.items()}, x.double().cpu()
    linear, ratio = torch.nn.functional.linear, s.num_value_heads // s.num_heads
    raw = torch.cat([linear(x, w[f"{n}_proj.weight"]) for n in "qkv"], dim=1)
    taps = torch.cat([w[f"{n}_conv1d.weight"].flatten(1) for n in "qkv"])
    bias = torch.cat([w[f"{n}_conv1d.bias"] for n in "qkv"])
    padded = torch.cat([raw.new_zeros(s.conv_width - 1, raw.shape[1]), raw])
    mixed = torch.nn.functional.silu(sum(padded[i : i + x.shape[0]] * taps[:, i] for i in range(s.conv_width)) + bias)
    keys = s.num_heads * s.key_dim
    q, k, v = mixed.tensor_split([keys, 2 * keys], dim=1)
    q, k, v = (t.unflatten(1, (-1, size)) for t, size in ((q, s.key_dim), (k, s.key_dim), (v, s.value_dim)))
    q, k = ((t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(ratio, dim=1) for t in (q, k))
    gate = linear(linear(x, w["f_proj.0.weight"]), w["f_proj.1.weight"]) + w["dt_bias"]
    decay = (-w["A_log"].exp()[:, None] * torch.nn.functional.softplus(gate.unflatten(1, (s.num_value_heads, -1)))).exp()
    beta = linear(x, w["b_proj.weight"]).sigmoid()
    z = (linear(linear(x, w["g_proj.0.weight"]), w["g_proj.1.weight"]) + w["g_proj.1.bias"]).unflatten(1, v.shape[1:])
    state, out = x.new_zeros(s.num_value_heads, s.value_dim, s.key_dim), torch.empty_like(v)
    for t in range(x.shape[0]):
        state = state * decay[t, :, None]
        state = state + (beta[t, :, None] * (v[t] - (state @ k[t, :, :, None])[..., 0]))[..., None] * k[t, :, None]
        out[t] = (state @ q[t, :, :, None])[..., 0] * s.key_dim**-0.5
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + s.norm_eps) * w["o_norm.weight"] * z.sigmoid()
    return linear(out.flatten(1), w["o_proj.weight"]), state, padded[-(s.conv_width - 1) :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_L11_a_bias_of_the_short_convolution(device, dtype):
    layer, tensors, x = biased(device, dtype)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    want, state, window = definition(BIASED, tensors, x)
    states = layer.new_state(4)
    assert error(serve(layer, states, x, 80).cpu(), want) <= limit
    assert error(states.state[2].cpu(), state) <= limit and error(states.conv[2].cpu(), window) <= limit
    assert not states.state[[0, 1, 3]].any() and not states.conv[[0, 1, 3]].any()
    # A verify window whose second draft is rejected, then the next one beside another request's prompt and decode step.
    states = layer.new_state(8, drafts=2)
    layer.prefill(x[:80], states, ints(device, 0, 80), ints(device, 3))
    layer.prefill(x[:40], states, ints(device, 0, 40), ints(device, 7))
    slots = ints(device, 3, 4, 5).view(1, 3)
    first = layer.verify(torch.cat([x[80:82], x[:1]]), states, ints(device, 0, 3), slots)
    step = kt.Step(
        prefill=kt.Group(ints(device, 0), ints(device, 30), ints(device, 6), torch.zeros(1, dtype=torch.bool, device=device)),
        decode=kt.Group(ints(device, 30), ints(device, 1), ints(device, 7)),
        spec=kt.Group(ints(device, 31), ints(device, 3), slots, accepted=ints(device, 2)),
        width=3,
    )
    mixed = layer(torch.cat([x[:30], x[40:41], x[82:85]]), states, step)
    assert error(first[:2].cpu(), want[80:82]) <= limit
    assert error(mixed.cpu(), torch.cat([want[:30], want[40:41], want[82:85]])) <= limit
    # Without the bias it is another layer, and one's tensors are not the other's.
    with pytest.raises(libkda.InvalidArgument, match="conv1d.bias"):
        layer.load_parameters({n: t for n, t in tensors.items() if "conv1d.bias" not in n})
    with pytest.raises(libkda.InvalidArgument, match="conv1d.bias"):
        kt.KDALayer(dataclasses.replace(BIASED, conv_bias=False), dtype=dtype).load_parameters(tensors)


def test_L11_a_biased_layers_files_own_names_and_shares(device, tmp_path):
    layer, tensors, x = biased(device, torch.float32)
    want = serve(layer, layer.new_state(4), x, 80)
    packed = {n: t for n, t in tensors.items() if "conv1d.bias" not in n}
    packed["conv1d.bias"] = torch.cat([tensors[f"{n}_conv1d.bias"] for n in "qkv"])
    files.save_file({f"model.layers.0.attn.{n}": t for n, t in packed.items()}, tmp_path / "model.safetensors")
    config = {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "expand_v": 1.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    total = torch.zeros_like(want)
    for heads in ((0, 1), (1, 1)):
        share = kt.KDALayer.from_checkpoint(tmp_path, dtype=torch.float32, device=device, heads=heads)
        total += serve(share, share.new_state(4), x, 80)
    assert error(total, want) <= 1e-5
    own = kt.KDALayer(BIASED, dtype=torch.float32, device=device)
    own.load_state_dict(layer.state_dict())
    for name, tensor in layer.state_dict().items():
        assert torch.equal(own.state_dict()[name], tensor)
    assert layer.conv_bias.shape == (layer.channels,)


def test_L12_a_dry_run_writes_zeros_and_touches_no_pool(device):
    layer = kt.KDALayer(libkda.LayerSpec.of_model("tiny"), device=device)
    states = layer.new_state(2)
    states.state.fill_(1)
    out = layer(torch.ones(3, 256, dtype=torch.bfloat16, device=device), states)
    assert not out.any() and (states.state == 1).all() and not states.conv.any()


def test_specs():
    assert libkda.LayerSpec.of_model("kimi-k3").share(8, 1).num_heads == 12
    with pytest.raises(libkda.NotFound, match="kimi-linear"):
        libkda.LayerSpec.of_model("kimi")
    with pytest.raises(libkda.InvalidArgument, match="lower_bound"):
        libkda.LayerSpec(48, 2, 32, 32, 16, output_gate_rank=16, gate_family="bounded")

"""KDALayer: from hidden states to hidden states, against the whole-layer vectors that other projects' code made."""

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

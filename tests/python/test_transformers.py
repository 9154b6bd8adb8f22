"""A tiny random Kimi-Linear of transformers on libkda, with FLA and without it, against its PyTorch functions (XH-8, XH-10)."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
pytest.importorskip("transformers", reason="transformers is not installed")
kimi = pytest.importorskip("transformers.models.kimi_linear", reason="this transformers has no Kimi-Linear")
import libkda

HERE = os.path.dirname(os.path.abspath(__file__))
MODEL = """
import os
import one_configuration
one_configuration.install()
import torch
import transformers
from transformers.models.kimi_linear import modeling_kimi_linear as modeling

device, dim = os.environ["KDA_TEST_DEVICE"], int(os.environ.get("KDA_TEST_DIM", 16))

def tiny():
    torch.manual_seed(0)
    config = transformers.KimiLinearConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=32, qk_rope_head_dim=16, v_head_dim=16,
        qk_nope_head_dim=16, num_experts_per_tok=2, num_local_experts=4, linear_head_dim=dim, linear_num_heads=4,
        layer_types=["linear_attention", "linear_attention", "full_attention"], mlp_layer_types=["dense"] * 3,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    return transformers.KimiLinearForCausalLM(config).eval().to(device)

tokens = (torch.arange(3, 3 + 70).remainder(61) + 3).remainder(64)[None].to(device)

@torch.no_grad()
def run(model):
    generated = model.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None)
    return model(tokens).logits, generated

model = tiny()
"""
REFERENCE = """
import libkda.transformers
kept = {name: getattr(modeling, name) for name in libkda.transformers.FUNCTIONS}

def in_pytorch(call, *arguments):
    for name, function in kept.items():
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        setattr(modeling, name, function)
    result = call(*arguments)
    for name, function in kept.items():
        setattr(modeling, name, function)
    return result
"""
COMPARE = REFERENCE + """
want, expected = in_pytorch(run, model)
replaced = libkda.transformers.enable()
assert replaced == libkda.transformers.enable()
got, again = run(model)
error = float((got - want).norm() / want.norm())
assert error <= 1e-5, error
assert torch.equal(again, expected)
print("replaced", len(replaced), libkda.stats())
libkda.transformers.disable()
assert all(getattr(modeling, name) is kept[name] for name in kept)
"""
FLAS_KERNELS = REFERENCE + """
limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
for dtype in limit:
    model = tiny().to(dtype)

    @torch.no_grad()
    def whole(stock):
        os.environ["FLA_LIBKDA"] = "0" if stock else "1"
        made = model.generate(
            tokens, max_new_tokens=24, do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True
        )
        return model(tokens).logits.double(), torch.stack(made.logits)[:, 0].double(), made.sequences[0, tokens.shape[1] :]

    def apart(a, b):
        return float((a - b).norm() / b.norm())

    reference, (stock, stock_steps, stock_tokens) = in_pytorch(whole, False)[0], whole(True)
    libkda.transformers.enable()
    libkda.stats(reset=True)
    got, steps, made = whole(False)
    counted = libkda.stats()
    assert counted["fla.chunk_kda"]["served"] and counted["fla.fused_recurrent_kda_fwd"]["served"], counted
    far = {"libkda": apart(got, reference), "FLA": apart(stock, reference), "apart": apart(got, stock)}
    print(dtype, far, "equal tokens:", int((made == stock_tokens).sum()), "of", len(made))
    assert far["apart"] <= limit[dtype] + (far["FLA"] if dtype == torch.float32 else 0), far
    assert far["libkda"] <= (limit[dtype] if dtype == torch.float32 else max(limit[dtype], 1.25 * far["FLA"])), far
    for t in range(len(made)):
        first, second = stock_steps[t].topk(2).values
        if first - second < 4 * (steps[t] - stock_steps[t]).abs().max():
            break
        assert made[t] == stock_tokens[t], t
print("served", counted)
"""


@pytest.fixture(autouse=True)
def on_the_device(device, monkeypatch):
    monkeypatch.setenv("KDA_TEST_DEVICE", device)


def fresh(code, **environment):
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
    return said.stdout


def test_functions_are_replaced_where_fla_is_missing():
    said = fresh("import sys; sys.modules['fla'] = None\n" + MODEL + COMPARE)
    assert "replaced " in said and "transformers.chunk_kimi_delta_attention" in said
    assert "transformers.recurrent_kimi_delta_attention" in said and "declined" not in said


def test_through_fla():
    pytest.importorskip("triton", reason="FLA needs triton")
    pytest.importorskip("fla.ops.kda", reason="fla-core is not installed")
    said = fresh(MODEL + COMPARE)
    assert "replaced 0" in said and "fla.chunk_kda" in said and "fla.fused_recurrent_kda_fwd" in said


def test_XT03_against_flas_own_kernels(cuda):
    """FLA's kernels multiply float32 in TF32: what they are off PyTorch's functions themselves comes on top there."""
    pytest.importorskip("fla.ops.kda", reason="fla-core is not installed")
    said = fresh(MODEL + FLAS_KERNELS, KDA_TEST_DIM="64")
    print(said)
    assert "served" in said


def test_gradients_go_to_the_original():
    code = "import sys; sys.modules['fla'] = None\n" + MODEL + (
        "import libkda.transformers\nlibkda.transformers.enable()\n"
        "model(torch.arange(3, 13, device=device)[None]).logits.sum().backward()\nprint(libkda.stats())\n"
    )  # fmt: skip
    assert "declined: gradients" in fresh(code)


def test_unknown_version_is_left_alone(monkeypatch):
    import libkda.transformers as plugin

    monkeypatch.setattr(plugin._guard, "version_of", lambda _: (4, 57, 1))
    assert plugin.enable() == [] and not plugin._originals
    monkeypatch.setenv("LIBKDA_STRICT", "1")
    with pytest.raises(RuntimeError, match="libkda.transformers: nothing was hooked: transformers 4.57.1"):
        plugin.enable()
    assert libkda.stats() is not None

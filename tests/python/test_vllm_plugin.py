"""libkda's plug-in in vLLM: how it is registered, switched on and off, asked for by name, and where it leaves layers alone."""

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
if os.environ.get("KDA_VLLM_DEVICE", "cpu") != "cpu":
    pytest.skip("vLLM is on its GPU platform in this process", allow_module_level=True)
pytest.importorskip("vllm", reason="vllm is not installed")
from vllm.model_executor.custom_op import op_registry_oot

import libkda
import libkda.vllm
import vllm_steps
from vllm_steps import CLASSES, NAMES, Layer, Request, declined, engine_config, served

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("vllm_registered")]


# ---- options ----


@pytest.mark.parametrize(
    "key, phase", [("kda_prefill_backend", "prefill"), ("kda_decode_backend", "decode"), ("kda_spec_decode_backend", "spec")]
)
def test_an_explicit_key_of_vllm_leaves_the_phase_to_vllm(kind, key, phase, monkeypatch):
    stock = []
    monkeypatch.setattr(CLASSES[kind], "_forward", lambda self, **k: stock.append(self))
    monkeypatch.setattr(CLASSES[kind], "_forward", lambda self, *a: stock.append(self))
    value = "native" if phase == "spec" else "triton"
    layer = Layer(kind, engine_config(drafts=2, **{key: value}))
    a = Request(1, 40, slots=[1, 2, 3], prompt=30)
    layer.step([(a, 30, 0)])
    layer.step([(a, 3, 0)])
    counts = served(kind)
    assert declined(kind, phase) == [f"declined: {key}={value}"]
    if phase == "decode":  # every decode row of an engine with drafts is speculative
        assert counts["prefill"] == counts["spec"] == 1 and not stock
    else:
        assert len(stock) == 1 and counts[phase] == 0 and counts["spec" if phase == "prefill" else "prefill"] == 1
    offered = layer.spec.num_prefill_checkpoint_blocks, layer.spec.prefill_checkpoint_alignment
    assert offered == (0, None)  # a step of vLLM's Triton prefill would not write what it was handed out


def test_all_phases_off_is_the_stock_layer(kind):
    layer = Layer(kind, engine_config(libkda={"prefill": "off", "decode": "off"}))
    assert layer.layer.libkda is None
    assert layer.layer.get_attn_backend().get_name() == ("KIMI_K3_KDA" if kind == "k3" else "GDN_ATTN")
    assert layer.spec == super(type(layer.layer).__mro__[1], layer.layer).get_kv_cache_spec(layer.config)


def test_options(kind, monkeypatch):
    for wrong in ({"libkda": {"prefil": "auto"}}, {"libkda": {"prefill": "cutedsl"}}, {"libkda": 3}, {"libkda": {"strict": 1}}):
        with pytest.raises(ValueError, match="prefil|cutedsl|wanted"):
            Layer(kind, engine_config(**wrong))
    monkeypatch.setenv("LIBKDA_VLLM", '{"decode": "off", "prefill": "triton"}')
    layer = Layer(kind, engine_config(libkda={"decode": "auto"}))  # triton: another word for portable
    assert layer.layer._off == {} and layer.layer._options.prefill == "portable"
    monkeypatch.setenv("LIBKDA_VLLM", "on")
    with pytest.raises(ValueError, match="LIBKDA_VLLM"):
        Layer(kind, engine_config(), prefix="model.layers.1.attn")


def test_F62_a_named_backend_that_cannot_serve_is_an_error_with_its_conditions(kind):
    with pytest.raises(RuntimeError, match=r"fused[\s\S]*device_type: wanted cuda"):
        Layer(kind, engine_config(libkda={"prefill": "flashkda"}))


def test_layers_that_stay_vllms():
    config = engine_config()
    config.parallel_config.prefill_context_parallel_size = 2
    layer = Layer("glm", config)
    assert layer.layer.libkda is None and declined("glm", "prefill") == ["declined: prefill context parallelism"]
    executor = Layer("k3", engine_config(decode_backend="latency_specialized"))
    assert executor.layer.libkda is None
    with pytest.raises(RuntimeError, match="prefill context parallelism"):
        config.additional_config = {"libkda": {"strict": True}}
        Layer("glm", config, prefix="model.layers.1.attn")


def test_a_layer_that_has_lost_an_attribute_stays_vllms(monkeypatch):
    from libkda.vllm._layers import LibKDAGlm5NextLinearAttention

    needs = (*LibKDAGlm5NextLinearAttention._needs, "kda_new_name")
    monkeypatch.setattr(LibKDAGlm5NextLinearAttention, "_needs", needs)
    layer = Layer("glm", engine_config())
    assert layer.layer.libkda is None and declined("glm", "prefill") == ["declined: vLLM's layer has no kda_new_name"]


def test_kimi_linear_survives_a_key_that_its_parent_asserts_on():
    config = engine_config(kda_prefill_backend="flashkda")
    layer = Layer("kimi_linear", config)
    assert config.additional_config == {"kda_prefill_backend": "flashkda"}
    assert declined("kimi_linear", "prefill") == ["declined: kda_prefill_backend=flashkda"]
    assert "decode" not in layer.layer._off
    with pytest.raises(RuntimeError, match="Triton alone"):
        strict = engine_config(kda_prefill_backend="flashkda", libkda={"strict": True})
        Layer("kimi_linear", strict, prefix="model.layers.1.attn")


def test_metadata_of_another_backend_steps_aside(kind, monkeypatch):
    stock = []
    monkeypatch.setattr(CLASSES[kind], "_forward", lambda self, *a: stock.append(self))
    layer = Layer(kind, engine_config())
    layer.builder = type(layer.builder).__mro__[2](layer.spec, [layer.prefix], layer.config, torch.device("cpu"))
    layer.step([(Request(1, 10, slots=[1]), 10, 0)])
    assert stock == [layer.layer] and declined(kind, "prefill") == ["declined: metadata of another backend"]


# ---- registration ----


def test_register_is_idempotent_and_leaves_others_alone(caplog):
    before = dict(op_registry_oot)
    libkda.vllm.register()
    assert op_registry_oot == before and set(NAMES.values()) <= before.keys()

    class Theirs(CLASSES["glm"]):
        pass

    op_registry_oot.clear()
    op_registry_oot["Glm5NextLinearAttention"] = Theirs
    libkda.vllm.register()
    assert op_registry_oot["Glm5NextLinearAttention"] is Theirs
    assert op_registry_oot["KimiK3DeltaAttention"].__name__ == "LibKDAKimiK3DeltaAttention"


def test_switched_off(monkeypatch):
    op_registry_oot.clear()
    monkeypatch.setenv("LIBKDA_VLLM", "off")
    libkda.vllm.register()
    assert not op_registry_oot


def test_other_platforms_are_left_alone(monkeypatch):
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    op_registry_oot.clear()
    monkeypatch.setattr(vllm.platforms, "_current_platform", UnspecifiedPlatform())
    libkda.vllm.register()
    assert not op_registry_oot


def test_the_guard_trips_on_a_changed_signature_and_on_another_version(monkeypatch):
    from libkda import _guard

    def _forward(self, mixed_qkv, g1, g2, beta, core_attn_out, scale):
        pass

    op_registry_oot.clear()
    monkeypatch.setattr(CLASSES["k3"], "_forward", _forward)
    libkda.vllm.register()
    assert not op_registry_oot
    monkeypatch.setenv("LIBKDA_STRICT", "1")
    with pytest.raises(RuntimeError, match="KimiK3DeltaAttention._forward has the parameters"):
        libkda.vllm.register()
    monkeypatch.undo()
    monkeypatch.setattr(_guard, "version_of", lambda package: (0, 34, 0))
    libkda.vllm.register()
    assert not op_registry_oot


def test_vllm_finds_the_entry_point_and_its_allow_list_excludes_it(monkeypatch):
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    assert load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["libkda"] is libkda.vllm.register
    monkeypatch.setattr(vllm_steps.vllm.envs, "VLLM_PLUGINS", ["another"], raising=False)
    assert "libkda" not in load_plugins_by_group(DEFAULT_PLUGINS_GROUP)


MODEL = """
import sys, tempfile, torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

config = EngineArgs(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_model_len=1024,
                    enable_prefix_caching=False).create_engine_config()
torch.cuda.Stream = torch.cuda.Event = type("Stub", (), {})  # the model makes them whether or not there is a GPU
with set_current_vllm_config(config):
    init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
    initialize_model_parallel(1, 1)
    torch.set_default_dtype(torch.bfloat16)
    model = initialize_model(config)
print("LAYERS", [type(layer.self_attn).__name__ for layer in model.model.layers])
assert not torch.cuda.is_initialized()
"""


def test_a_whole_model_of_vllms_engine_has_libkdas_layers(tmp_path):
    """Nobody calls register here: the engine's arguments load the plug-in by its entry point."""
    (tmp_path / "config.json").write_text(json.dumps(vllm_steps.TINY_MODEL))
    run = subprocess.run([sys.executable, "-c", MODEL, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    layers = next(line for line in run.stdout.splitlines() if line.startswith("LAYERS "))
    assert layers == f"LAYERS {['LibKDAKimiGatedDeltaNetAttention'] * 3 + ['MultiHeadLatentAttention']}"
    assert (run.stdout + run.stderr).count("libkda.vllm: vllm 0.33.0, hooked") == 1


# ---- state copies ----


def test_Q05_vllms_prefill_with_libkdas_copies(kind, monkeypatch):
    from libkda.vllm import _copies

    config = engine_config(libkda={"prefill": "off", "decode": "off", "state_copy": "auto"})
    copied = []

    def stock(self, *_):
        module = __import__(CLASSES[kind].__module__, fromlist=["_"])
        state = self.kv_cache[1]
        indices = torch.tensor([[3, 9], [0, 9], [5, 9]], dtype=torch.int32)[:, 0]
        packed = module.gather_initial_states(state, indices, torch.tensor([True, False, True]))
        assert torch.equal(packed[0], state[3]) and torch.equal(packed[2], state[5]) and not packed[1].any()
        if kind == "glm":
            module.scatter_states(state, packed + 1, torch.tensor([4, 5, 6], dtype=torch.int32))
            assert torch.equal(state[4], state[3] + 1)
            assert callable(module.scatter_states.register_warmup)
        copied.append(True)

    try:
        monkeypatch.setattr(CLASSES[kind], "_forward", stock)
        layer = Layer(kind, config)
        layer.layer.kv_cache[1].normal_()
        layer.builder = type(layer.builder)(layer.spec, [layer.prefix], config, torch.device("cpu"))
        layer.step([(Request(1, 10, slots=[1]), 10, 0)])
        assert copied and libkda.stats()["vllm._gather"]["served"] == 1
    finally:
        _copies.unwrap()

"""Shared set-up. --device cuda runs the operator tests there; --require torch,... turns a missing package from a skip into
a failure (what CI installs must be found)."""

import importlib.util
import os

import one_configuration
import pytest

if os.environ.get("KDA_VLLM_DEVICE", "cpu") == "cpu":
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # before anything has looked for vLLM's platform


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="cpu (default) or cuda")
    parser.addoption("--require", default="", help="packages that must be there, separated by commas")


def pytest_configure(config):
    for package in filter(None, config.getoption("--require").split(",")):
        if importlib.util.find_spec(package) is None:
            raise pytest.UsageError(f"--require: {package} is not installed")
    one_configuration.install()


@pytest.fixture(scope="session")
def device(request):
    name = request.config.getoption("--device")
    if name == "cuda":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return "cuda:0"
    return name


@pytest.fixture
def cuda(device):
    if not device.startswith("cuda"):
        pytest.skip("needs --device cuda")
    return device


# ---- vLLM ----


@pytest.fixture(params=["k3", "kimi_linear", "glm"])
def kind(request):
    """Of vLLM's layer classes (vllm_steps.CLASSES)."""
    return request.param


@pytest.fixture
def vllm_registered(monkeypatch):
    """The plug-in as `libkda.vllm.register()` leaves it, and counters from zero."""
    from vllm.model_executor.custom_op import op_registry_oot

    import libkda.vllm
    import vllm_steps

    for name in vllm_steps.NAMES.values():
        op_registry_oot.pop(name, None)
    monkeypatch.delenv("LIBKDA_VLLM", raising=False)
    libkda.vllm.register()
    libkda.stats(reset=True)
    yield
    for name in vllm_steps.NAMES.values():
        op_registry_oot.pop(name, None)


@pytest.fixture(params=["SD", "DS"])
def layout(request, monkeypatch):
    """vLLM reads the layout of conv pools from the environment, once."""
    from vllm.model_executor.layers.mamba import mamba_utils

    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    mamba_utils.get_conv_state_layout.cache_clear()
    yield request.param
    monkeypatch.undo()
    mamba_utils.get_conv_state_layout.cache_clear()

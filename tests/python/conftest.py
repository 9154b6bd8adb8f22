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

"""vLLM on a GPU with libkda (spec XV-33 as far as one GPU allows): against vLLM's own kernels, in graphs, in a whole engine.

Run alone: KDA_VLLM_DEVICE=cuda pytest test_vllm_cuda.py --device cuda
"""

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
if os.environ.get("KDA_VLLM_DEVICE") != "cuda" or not torch.cuda.is_available():
    pytest.skip("needs a GPU and KDA_VLLM_DEVICE=cuda", allow_module_level=True)
pytest.importorskip("vllm", reason="vllm is not installed")
from vllm.model_executor.custom_op import op_registry_oot
from vllm.v1.worker import workspace

import libkda
import libkda.vllm
import vllm_steps
from vllm_steps import CLASSES, Layer, Request, engine_config, reference

pytestmark = pytest.mark.filterwarnings("ignore")
LIMIT = 1e-2  # libkda's 2e-3 and the 4-6e-3 of published bf16 kernels


@pytest.fixture(autouse=True)
def manager(cuda):
    workspace._manager = workspace.WorkspaceManager(torch.device("cuda"))
    _registry(True)
    libkda.stats(reset=True)
    yield
    workspace._manager = None


def _registry(ours):
    for c in CLASSES.values():
        op_registry_oot.pop(c.__name__, None)
    if ours:
        libkda.vllm.register()


def pair(kind, drafts=0):
    """The same layer on libkda and as vLLM has it."""
    layers = []
    for ours in (True, False):
        _registry(ours)
        layers.append(Layer(kind, engine_config(dtype=torch.bfloat16, drafts=drafts)))
    assert layers[0].layer.libkda is not None and not hasattr(layers[1].layer, "libkda")
    return layers


def near(got, want, limit=LIMIT):
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error <= limit, error


@pytest.mark.parametrize("kind", CLASSES)
def test_each_kind_of_step_is_near_vllms_kernels(kind):
    for drafts in (0, 2):
        ours, stock = pair(kind, drafts)
        outs = []
        for layer in (ours, stock):
            a = Request(1, 400, torch.bfloat16, slots=[1, 2, 3][: 1 + drafts], prompt=200)
            b = Request(2, 400, torch.bfloat16, slots=[4, 5, 6][: 1 + drafts], prompt=300)
            tokens = 1 + drafts
            rows = [layer.step([(a, 200, 0)])[0]]
            rows += layer.step([(a, tokens, 0), (b, 128, 0)])
            rows += layer.step([(a, tokens, drafts), (b, 172, 0)])
            rows += layer.step([(a, tokens, 0), (b, tokens, drafts)])
            outs.append((torch.cat(rows), layer.state(a), layer.state(b)))
        for got, want in zip(*outs, strict=True):
            near(got, want)
    assert not [r for counts in libkda.stats().values() for r in counts if r != "served"]


@pytest.mark.parametrize("kind", CLASSES)
def test_steps_of_the_two_alternate_on_one_cache(kind):
    ours, stock = pair(kind)
    stock.layer.kv_cache = ours.layer.kv_cache
    a = Request(1, 140, torch.bfloat16, slots=[2], prompt=128)
    rows = [ours.step([(a, 64, 0)])[0], stock.step([(a, 64, 0)])[0]]
    for turn in range(12):
        rows.append((ours, stock)[turn % 2].step([(a, 1, 0)])[0])
    near(torch.cat(rows), reference(ours, a, 140)[0])


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kind", CLASSES)
def test_full_graphs_replay_other_steps(kind, drafts):
    def capture(run):
        workspace.current_workspace_manager().lock()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay

    vllm_steps.check_replays(kind, drafts, capture)


def test_register_makes_no_cuda_context():
    code = "import torch, libkda.vllm; libkda.vllm.register(); assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "LIBKDA_STRICT": "1"})


GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
import libkda
model, caching = sys.argv[1], sys.argv[2] == "1"
llm = LLM(model=model, load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, enable_prefix_caching=caching,
          gpu_memory_utilization=0.3, seed=1)
prompts = [{"prompt_token_ids": [(7 * i + j * j) % 500 for j in range(90 + 40 * i)]} for i in range(4)]
sampling = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True, logprobs=2, detokenize=False)
found = []
for request in llm.generate(prompts, sampling) + llm.generate(prompts, sampling):
    tops = [sorted((x.logprob for x in position.values()), reverse=True) for position in request.outputs[0].logprobs]
    found.append([list(request.outputs[0].token_ids), [t[0] - t[1] for t in tops]])
print("TOKENS", json.dumps({"tokens": found, "stats": libkda.stats()}))
"""


@pytest.mark.parametrize("caching", [0, 1])
def test_an_engine_generates_what_stock_vllm_generates(tmp_path, caching):
    """A tiny Kimi-Linear with random weights: 256 greedy tokens, equal up to where two candidates are as good as tied."""
    (tmp_path / "config.json").write_text(json.dumps(vllm_steps.TINY_MODEL))
    results = []
    for switch in ("", "off"):
        environment = {**os.environ, "LIBKDA_VLLM": switch, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        run = subprocess.run(
            [sys.executable, "-c", GENERATE, str(tmp_path), str(caching)], env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr[-4000:]
        results.append(json.loads(next(x for x in run.stdout.splitlines() if x.startswith("TOKENS "))[7:]))
    ours, stock = results
    counts = ours["stats"]["vllm.KimiGatedDeltaNetAttention.prefill"]
    assert counts["served"] > 0 and not stock["stats"]
    for (got, _), (want, gaps) in zip(ours["tokens"], stock["tokens"], strict=True):
        apart = next((i for i, (g, w) in enumerate(zip(got, want, strict=True)) if g != w), None)
        assert apart is None or gaps[apart] < 0.05, (apart, gaps[apart])

"""vLLM's KDA layers without an engine: its real layer classes and metadata builders, steps as its runner has them. On the CPU
platform of vLLM, or with KDA_VLLM_DEVICE=cuda on a GPU.

A Layer is one of vLLM's three classes with random weights and a paged cache; a Request is a stream of random projections. One
step is a list of (request, tokens, rejected ones): the runner's order, offsets, slots and accepted counts are made from it,
vLLM's builder makes the metadata, and the layer's `_forward` gets slices of one wide projection, as `forward` would cut them.
"""

import os
import tempfile
import types

DEVICE = os.environ.get("KDA_VLLM_DEVICE", "cpu")

import torch
import vllm.envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention
from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention
from vllm.v1.attention.backend import CommonAttentionMetadata

import libkda

CLASSES = {"k3": KimiK3DeltaAttention, "kimi_linear": KimiGatedDeltaNetAttention, "glm": Glm5NextLinearAttention}
HEADS, DIM, HIDDEN, WIDTH = (2, 32, 48, 4) if DEVICE == "cpu" else (12, 128, 256, 4)
CHANNELS = HEADS * DIM
NAMES = {kind: c.__name__ for kind, c in CLASSES.items()}
PAD_BYTES = 256  # of a page that nobody uses: views of the pools have a stride of their own


def engine_config(*, dtype=torch.float32, drafts=0, max_tokens=512, max_requests=8, cache_mode="none", **additional):
    config = VllmConfig(additional_config=additional)
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo" if DEVICE == "cpu" else "nccl")
            initialize_model_parallel(1, 1)
    config.model_config = types.SimpleNamespace(dtype=dtype, hf_text_config=None)
    config.scheduler_config.max_num_batched_tokens = max_tokens
    config.scheduler_config.max_num_seqs = max_requests
    config.cache_config.mamba_block_size = 64
    config.cache_config.mamba_cache_mode = cache_mode
    if drafts:
        config.speculative_config = types.SimpleNamespace(
            num_speculative_tokens=drafts, use_eagle_block_drop=lambda: False, parallel_drafting=False
        )
    return config


def model_config(kind):
    common = dict(hidden_size=HIDDEN, hidden_act="silu", rms_norm_eps=1e-5)
    if kind == "glm":
        return types.SimpleNamespace(
            linear_head_dim=DIM, linear_num_heads=HEADS, linear_conv_kernel_dim=WIDTH, linear_lower_bound=-5.0, **common
        )
    linear = dict(head_dim=DIM, num_heads=HEADS, short_conv_kernel_size=WIDTH, kda_layers=[0])
    if kind == "k3":
        linear |= dict(use_full_rank_gate=True, gate_lower_bound=-5.0)
    return types.SimpleNamespace(linear_attn_config=linear, **common)


# config.json of a Kimi-Linear that a test can afford: three KDA layers and one of full attention.
TINY_MODEL = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "head_dim": 96,
    "mla_use_nope": True, "num_experts": None, "first_k_dense_replace": 4, "tie_word_embeddings": False, "dtype": "bfloat16",
    "linear_attn_config": {
        "head_dim": 128, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3], "full_attn_layers": [4],
    },
}  # fmt: skip


class Layer:
    """One of vLLM's layers, its builder and its cache."""

    def __init__(self, kind, config, slots=24, seed=0, prefix="model.layers.0.attn"):
        self.kind, self.config, self.prefix = kind, config, prefix
        with set_current_vllm_config(config):
            torch.set_default_dtype(config.model_config.dtype)
            try:
                with torch.device(DEVICE):
                    self.layer = CLASSES[kind](model_config(kind), config, prefix=prefix)
            finally:
                torch.set_default_dtype(torch.float32)
            self.spec = self.layer.get_kv_cache_spec(config)
            generator = torch.Generator().manual_seed(seed)
            for name, parameter in self.layer.named_parameters():
                value = torch.randn(parameter.shape, generator=generator) * 0.3
                value = value.abs() + 0.1 if "A_log" in name or "o_norm" in name else value
                parameter.data.copy_(value)
            self.drafts = config.num_speculative_tokens if config.speculative_config else 0
            backend = self.layer.get_attn_backend()
            self.builder = backend.get_builder_cls()(self.spec, [prefix], config, torch.device(DEVICE))
        self.starts = torch.zeros(65, dtype=torch.int32, device=DEVICE)  # the runner's offsets stay at their place too
        self.bind(slots)
        self.profile()

    def bind(self, slots):
        page = sum(torch.Size(s).numel() * d.itemsize for s, d in zip(self.spec.shapes, self.spec.dtypes, strict=True))
        generator = torch.Generator().manual_seed(7)
        raw = torch.randint(0, 60, (slots, 1, 1, page + PAD_BYTES), dtype=torch.int8, generator=generator).to(DEVICE)
        self.page = raw  # never cleared: what is not said to be a state is rubbish
        self.layer.bind_kv_cache(raw[..., :page])

    def profile(self, tokens=16):
        """A run without metadata, as vLLM's memory profiling does: must leave the output alone."""
        rows = Request(0, tokens, self.config.model_config.dtype).rows
        out = rows.new_full((1, tokens, HEADS, DIM), 3.0)
        with set_forward_context(None, self.config), torch.inference_mode():
            self.layer._forward(**self.arguments(rows, out))
        assert (out == 3.0).all()

    def arguments(self, rows, out):
        """What the class's forward hands on: views of one wide projection but for the gate."""
        qkv, gate, z, beta, _ = rows.split([3 * CHANNELS, CHANNELS, CHANNELS, HEADS, rows.shape[1] - 5 * CHANNELS - HEADS], 1)
        n = rows.shape[0]
        g1 = gate.reshape(1, n, HEADS, DIM).contiguous()
        if self.kind == "glm":
            return dict(qkv_proj_states=qkv, g1=g1, beta=beta.unsqueeze(0), core_attn_out=out)
        return dict(mixed_qkv=qkv, g1=g1, g2=z.unflatten(1, (HEADS, DIM)), beta=beta.unsqueeze(0), core_attn_out=out)

    def metadata(self, step, pad_requests=0, pad_tokens=0):
        """vLLM's common metadata of a step and the builder's."""
        lengths = [tokens for _, tokens, _ in step] + [0] * pad_requests
        starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        n = len(lengths)
        self.starts[: n + 1] = starts
        table = torch.zeros(n, 1 + self.drafts + 3, dtype=torch.int32)  # a column more than asked: rows are strided
        for row, (request, _, _) in enumerate(step):
            table[row, : 1 + self.drafts] = torch.tensor(request.slots)
        context = torch.tensor([r.computed for r, _, _ in step] + [0] * pad_requests, dtype=torch.int32)
        seq_lens = context + starts.diff()
        common = CommonAttentionMetadata(
            query_start_loc=self.starts[: n + 1], query_start_loc_cpu=starts, seq_lens=seq_lens.to(DEVICE),
            seq_lens_cpu_upper_bound=seq_lens.clone(), num_reqs=n, num_actual_tokens=int(starts[-1]),
            max_query_len=max(lengths), max_seq_len=int(seq_lens.max()),
            block_table_tensor=table.to(DEVICE),
            slot_mapping=torch.zeros(int(starts[-1]) + pad_tokens, dtype=torch.int64, device=DEVICE),
            is_prefilling=torch.tensor([r.computed < r.prompt for r, _, _ in step] + [False] * pad_requests),
        )  # fmt: skip
        extra = {}
        if self.drafts:
            drafted = [-1 if r.computed < r.prompt else tokens - 1 for r, tokens, _ in step] + [-1] * pad_requests
            extra = dict(
                num_accepted_tokens=torch.tensor(
                    [r.accepted for r, _, _ in step] + [1] * pad_requests, dtype=torch.int32, device=DEVICE
                ),
                num_decode_draft_tokens_cpu=torch.tensor(drafted, dtype=torch.int32),
            )
        with set_current_vllm_config(self.config):
            return common, self.builder.build(0, common, **extra)

    def step(self, step, pad_requests=0, pad_tokens=0):
        """Runs [(request, tokens, rejected of them)]; returns each request's output rows and moves the requests on."""
        _, metadata = self.metadata(step, pad_requests, pad_tokens)
        rows = torch.cat([r.rows[r.computed : r.computed + tokens] for r, tokens, _ in step])
        n = rows.shape[0]
        rows = torch.cat([rows, rows.new_full((pad_tokens, rows.shape[1]), float("nan"))])
        out = rows.new_full((1, n + pad_tokens, HEADS, DIM), 5.0)
        with set_forward_context({self.prefix: metadata}, self.config), torch.inference_mode():
            self.layer._forward(**self.arguments(rows, out))
        assert (out[0, n:] == 5.0).all(), "rows that belong to no request are not to be written"
        pieces = out[0, :n].split([tokens for _, tokens, _ in step])
        for request, tokens, rejected in step:
            verified = request.computed >= request.prompt
            request.accepted = tokens - rejected if verified else 1
            request.computed += tokens - rejected  # whose rows come again
        return list(pieces)

    def state(self, request):
        return self.layer.kv_cache[1][request.slots[request.accepted - 1 if self.drafts else 0]]


class Request:
    """A stream of projections and its slots (1 + drafts of them). prompt: tokens that are prefilled."""

    def __init__(self, seed, tokens, dtype=torch.float32, slots=(1,), prompt=None):
        generator = torch.Generator().manual_seed(1000 + seed)
        self.rows = torch.randn(tokens, 5 * CHANNELS + HEADS + 11, generator=generator).to(DEVICE, dtype)
        self.slots, self.prompt = list(slots), tokens if prompt is None else prompt
        self.computed, self.accepted = 0, 1


def check_replays(kind, drafts, capture):
    """One captured step serves others: of other slots and accepted counts, fewer requests and (K3, which promises it) lengths
    from 1 to 1 + drafts. `capture(run)` runs a step and returns what runs it again on whatever the builder's tables hold."""
    config = engine_config(dtype=torch.bfloat16, drafts=drafts)
    graphed, eager = (Layer(kind, config, prefix=f"model.layers.{i}.attn") for i in range(2))
    graphed.builder.use_full_cuda_graph = True
    n, width = 4, 1 + drafts
    one, two = (
        [Request(i, 90, torch.bfloat16, slots=range(1 + i * width, 1 + (i + 1) * width), prompt=40) for i in range(n)]
        for _ in range(2)
    )
    for r, other in zip(one, two, strict=True):
        graphed.step([(r, 40, 0)])
        eager.step([(other, 40, 0)])
    rows = one[0].rows.new_zeros(n * width, one[0].rows.shape[1])
    out = rows.new_zeros(1, n * width, HEADS, DIM)
    arguments = graphed.arguments(rows, out)

    def build(step):
        _, m = graphed.metadata(step, pad_requests=n - len(step))
        m.num_actual_tokens = n * width
        return m

    kept, first = graphed.page.clone(), build([(r, width, 0) for r in one])

    def run():
        with set_forward_context({graphed.prefix: first}, config), torch.inference_mode():
            graphed.layer._forward(**arguments)

    again = capture(run)
    graphed.page.copy_(kept)
    steps = [[width] * 4, [width] * 2, [width] * 3]
    if kind == "k3" and drafts:
        steps += [[1, width, 1, drafts], [width, 1], [1, 1, width]]
    for lengths in steps:
        step = [(r, length, length // 2) for r, length in zip(one, lengths, strict=False)]
        build(step)
        flat = torch.cat([r.rows[r.computed : r.computed + length] for r, length, _ in step])
        rows.zero_()[: flat.shape[0]] = flat
        arguments["g1"].copy_(graphed.arguments(rows, out)["g1"])
        again()
        want = eager.step([(r, length, length // 2) for r, length in zip(two, lengths, strict=False)])
        assert torch.equal(out[0, : flat.shape[0]], torch.cat(want))
        for (r, _, _), other in zip(step, two, strict=False):
            r.computed, r.accepted = other.computed, other.accepted
    assert torch.equal(graphed.page[1:], eager.page[1:])


def batch_invariant(monkeypatch):
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True, raising=False)


def reference(layer, request, tokens):
    """Output [tokens,H,V] and state [H,V,K] of a request alone, token by token in float64, from the definition."""
    part = layer.layer
    rows = request.rows[:tokens].double()
    qkv, raw, z, beta, _ = rows.split([3 * CHANNELS, CHANNELS, CHANNELS, HEADS, rows.shape[1] - 5 * CHANNELS - HEADS], 1)
    convs = [part.q_conv1d, part.k_conv1d, part.v_conv1d] if layer.kind == "glm" else [part.conv1d]
    weight = torch.cat([c.weight.detach().double().reshape(-1, WIDTH) for c in convs])
    padded = torch.cat([qkv.new_zeros(WIDTH - 1, 3 * CHANNELS), qkv])
    x = torch.nn.functional.silu(sum(padded[j : j + tokens] * weight[:, j] for j in range(WIDTH)))
    q, k, v = (t.unflatten(1, (HEADS, DIM)) for t in x.split(CHANNELS, 1))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    speed = part.A_log.detach().double().view(-1, 1).exp()
    biased = raw.unflatten(1, (HEADS, DIM)) + part.dt_bias.detach().double().view(HEADS, DIM)
    if layer.kind == "kimi_linear":
        gate = -speed * torch.nn.functional.softplus(biased)
    else:
        gate = -5.0 * torch.sigmoid(speed * biased)
    state, out = q.new_zeros(HEADS, DIM, DIM), []
    for t in range(tokens):
        state = state * gate[t].exp()[:, None, :]
        u = beta[t].sigmoid()[:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + u[:, :, None] * k[t][:, None, :]
        out.append(torch.einsum("hvk,hk->hv", state, q[t]) * DIM**-0.5)
    o = torch.stack(out)
    if layer.kind != "glm":
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * part.o_norm.weight.detach().double()
        o = o * torch.sigmoid(z.unflatten(1, (HEADS, DIM)))
    return o, state


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def served(kind):
    phases = ("prefill", "decode", "spec")
    return {p: libkda.stats().get(f"vllm.{NAMES[kind]}.{p}", {}).get("served", 0) for p in phases}


def declined(kind, phase):
    return [r for r in libkda.stats().get(f"vllm.{NAMES[kind]}.{phase}", {}) if r != "served"]

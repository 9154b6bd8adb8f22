#!/usr/bin/env python3
"""libkda's operators beside vLLM's own KDA kernels, in one process on one GPU (bench/paired.py says how).

vllm_stock.py [--vllm FOLDER] [--rounds N] [--only WORDS] [--json FILE]   measures; prints a table
vllm_stock.py [--vllm FOLDER] --compile [--only WORDS]                     compiles vLLM's kernels for the cases

Tensors lie as vLLM's layers have them: rows of one projection, a page for each slot with the conv window before the state,
slots anywhere in the pool, slot 0 null. An operator's case times one kernel; a step's case times what the layer's `_forward`
does between its projections, call by call: `vLLM` is its Triton kernels, `vLLM native` what vLLM 0.33 takes by itself on
Hopper where the gate is bounded (its fused decode kernel and FlashKDA, from its wheel), `libkda` the calls of libkda.vllm.
Chunk tables that vLLM makes once in a step are there before the clock starts.

FOLDER: one that holds the package vllm whose kernels are meant; without it the installed vLLM (bench/vllm_kernels.py).
"""

import types
from collections.abc import Callable
from dataclasses import dataclass

import paired
import torch
from paired import DEVICE, DIM, L2_BYTES, Case, Variant, normal, recurrence

paired.tune()
import vllm_kernels

import libkda.torch as kt

WIDTH, EPS, CONV_CHUNK = 4, 1e-5, 8
NULL = 0
ops = torch.ops.libkda
silu = torch.nn.functional.silu
vllm: vllm_kernels.Kernels


@dataclass(frozen=True)
class Model:
    """heads of one rank; projection: columns of its fused projection after q, k, v (the output gate where it is there too)."""

    name: str
    heads: int
    bound: float | None
    z_in_projection: bool

    @property
    def channels(self):
        return 3 * self.heads * DIM

    def words(self, **more):
        family = {"gate_family": "softplus"} if self.bound is None else {"gate_family": "bounded", "lower_bound": self.bound}
        return kt.plan_words(**family, null_slot=NULL, **more)


LINEAR = Model("Kimi-Linear, 32 heads, softplus", 32, None, False)
K3 = Model("Kimi-K3 / 8, 12 heads, bounded", 12, -5.0, True)


class Layer:
    """Parameters, a step's rows and pools of a layer."""

    def __init__(self, model, rows):
        h, c, p = model.heads, model.channels, model.heads * DIM
        self.model, self.rows = model, rows
        extra = (p if model.z_in_projection else 0) + DIM + h
        projected = normal(rows, (c + extra + 15) // 16 * 16)
        self.qkv = projected[:, :c]
        self.z = projected[:, c : c + p] if model.z_in_projection else normal(rows, p)
        self.z = self.z.unflatten(-1, (h, DIM))
        self.beta = projected[:, c + extra - h : c + extra]
        self.gate = normal(rows, h, DIM)
        self.taps = normal(c, WIDTH, dtype=torch.float32) * 0.5
        self.A_log = torch.log(torch.empty(h, device=DEVICE).uniform_(1, 16))
        self.dt_bias = normal(p, dtype=torch.float32)
        self.norm_weight = normal(DIM)
        self.norm_weight_fp32 = self.norm_weight.float()
        self.out = torch.empty(rows, h, DIM, device=DEVICE, dtype=torch.bfloat16)

    def pools(self, slots, drafts=0):
        """Copies of a pool of pages that do not fit the L2 together: conv [slots,L,channels] and state [slots,H,V,K]."""
        h, columns = self.model.heads, WIDTH - 1 + drafts
        window, state = 2 * columns * self.model.channels, 4 * h * DIM * DIM
        page = (window + state + 255) // 256 * 256
        first = torch.empty(slots, page, dtype=torch.uint8, device=DEVICE)
        conv, states = self.views(first, columns)
        conv.copy_(normal(*conv.shape))
        states.copy_(normal(*states.shape, dtype=torch.float32))
        copies = [first.clone() for _ in range(max(2, -(-L2_BYTES // first.numel())))]
        views = [self.views(memory, columns) for memory in copies]
        return self.views(first, columns), views, lambda: copies[0].copy_(first)

    def views(self, memory, columns):
        h, window = self.model.heads, 2 * columns * self.model.channels
        conv = memory[:, :window].view(torch.bfloat16).unflatten(-1, (columns, -1))
        state = memory[:, window : window + 4 * h * DIM * DIM].view(torch.float32).unflatten(-1, (h, DIM, DIM))
        return conv, state

    def parameters(self):
        return {"A_log": self.A_log, "dt_bias": self.dt_bias}

    # -- the definition in fp64 -----------------------------------------------------------------------------------------

    def convolved(self, windows, cu):
        """Of sequences cu[n] .. cu[n+1] behind their windows [n,W-1,C]: rows [T,C], and the last windows."""
        out, last = [], []
        for n, window in enumerate(windows):
            x = torch.cat([window.double(), self.qkv[cu[n] : cu[n + 1]].double()])
            out.append(silu(sum(x[i : len(x) - WIDTH + 1 + i] * self.taps[:, i].double() for i in range(WIDTH))))
            last.append(x[len(x) - WIDTH + 1 :])
        return torch.cat(out), torch.stack(last)

    def attention(self, qkv, first, cu):
        """The recurrence on equal sequences: rows [T,H,V] and last states [n,H,V,K]."""
        n, h = len(cu) - 1, self.model.heads
        rows = [t.unflatten(-1, (h, DIM)) for t in qkv.chunk(3, dim=-1)] + [self.gate, self.beta]
        out, last = recurrence([t.unflatten(0, (n, -1)) for t in rows], self.parameters(), self.model.bound, first)
        return out.flatten(0, 1), last

    def normed(self, x):
        y = x.double()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * self.norm_weight.double()
        return y * self.z.double().sigmoid()

    # -- vLLM's calls ---------------------------------------------------------------------------------------------------

    def heads(self, qkv):
        return [t.unflatten(-1, (self.model.heads, DIM))[None] for t in qkv.chunk(3, dim=-1)]

    def recurrent(self):
        """Keywords of its recurrent kernels."""
        return dict(self.parameters(), raw_g=self.gate[None], raw_beta=self.beta[None], lower_bound=self.model.bound)

    def stock_norm(self, x):
        return vllm.norm.rms_norm_gated(x, self.z, self.norm_weight, None, "sigmoid", eps=EPS)


def shuffled(count):
    """Slots of a pool of count + 1, in no order, without the null slot."""
    return (torch.randperm(count, device=DEVICE) + 1).to(torch.int32)


def on(views, call):
    return [lambda pool=pool: call(*pool) for pool in views]


def window_rows(rows, tokens):
    """Tables of `rows` requests of `tokens` tokens each, all of whose drafts were accepted."""
    cu = torch.arange(0, rows * tokens + 1, tokens, device=DEVICE, dtype=torch.int32)
    slots = shuffled(rows * tokens).view(rows, tokens)
    return cu, slots, torch.full((rows,), tokens, device=DEVICE, dtype=torch.int32)


def recurrent_step(layer, rows, tokens):
    """What decode and verify cases share: tables, and calls of the three kernels by part."""
    m = layer.model
    cu, slots, accepted = window_rows(rows, tokens)
    spec = tokens > 1
    listed = slots if spec else slots[:, 0].contiguous()
    sequences = dict(cu_seqlens=cu, slots=listed)
    if spec:
        sequences["accepted"] = accepted
    words = dict(width=tokens, max_tokens=rows * tokens, max_sequences=rows)

    def stock_conv(conv):
        extra = dict(num_accepted_tokens=accepted, query_start_loc=cu, max_query_len=tokens) if spec else {}
        return vllm.conv.causal_conv1d_update(
            layer.qkv, conv.transpose(-1, -2), layer.taps, None, activation="silu", conv_state_indices=slots[:, 0],
            validate_data=not spec, out=torch.empty_like(layer.qkv), **extra,
        )  # fmt: skip

    def stock_attention(qkv, state, out):
        if not spec:
            return vllm.kda.fused_recurrent_kda_packed_decode(
                mixed_qkv=qkv, initial_state=state, state_indices=listed, **layer.recurrent()
            )[0][0]
        q, k, v = layer.heads(qkv)
        return vllm.kda.fused_recurrent_kda(
            q=q, k=k, v=v, initial_state=state, cu_seqlens=cu, ssm_state_indices=slots, num_accepted_tokens=accepted,
            out=out[None], **layer.recurrent(),
        )[0][0]  # fmt: skip

    return types.SimpleNamespace(
        cu=cu, slots=slots, accepted=accepted, sequences=sequences, stock_conv=stock_conv, stock_attention=stock_attention,
        words=m.words(**words), conv_words=kt.plan_words(null_slot=NULL, **words),
        step_words=m.words(**words, norm_eps=EPS),
    )  # fmt: skip


def conv_update(model, rows, tokens):
    layer = Layer(model, rows * tokens)
    (first, _), views, restore = layer.pools(rows * tokens + 1, tokens - 1)
    s = recurrent_step(layer, rows, tokens)
    at = s.slots[:, 0].long()
    own = torch.empty(layer.qkv.shape, dtype=layer.qkv.dtype, device=DEVICE)

    def operator(conv, _):
        ops.conv_update([layer.qkv], [layer.taps], [conv], [own], s.conv_words, **s.sequences)
        return own, lambda: conv[at, -WIDTH + 1 :]

    def want():
        # After a window all of whose tokens were kept the history is the newest columns.
        return layer.convolved(first[at, -WIDTH + 1 :], s.cu)

    stock = Variant(on(views, lambda conv, _: (s.stock_conv(conv), lambda: conv[at, -WIDTH + 1 :])))
    return Case({"vLLM": stock, "libkda": Variant(on(views, operator))}, want, "vLLM", 20, restore)


def decode(model, rows, tokens):
    layer = Layer(model, rows * tokens)
    (_, first), views, restore = layer.pools(rows * tokens + 1)
    s = recurrent_step(layer, rows, tokens)
    last = s.slots[:, -1].long()  # all accepted: from the last column to the last column
    qkv = silu(layer.qkv).contiguous()
    q, k, v = (t[0] for t in layer.heads(qkv))
    own = torch.empty_like(layer.out)

    def operator(_, state):
        ops.decode(q, k, v, layer.gate, layer.beta, own, state, s.words, **s.sequences, **layer.parameters())
        return own, lambda: state[last]

    stock = Variant(on(views, lambda _, state: (s.stock_attention(qkv, state, layer.out), lambda: state[last])))
    variants = {"vLLM": stock, "libkda": Variant(on(views, operator))}
    return Case(variants, lambda: layer.attention(qkv.double(), first[last], s.cu), "vLLM", 20, restore)


def decode_step(model, rows, tokens):
    layer = Layer(model, rows * tokens)
    (window, first), views, restore = layer.pools(rows * tokens + 1, tokens - 1)
    s = recurrent_step(layer, rows, tokens)
    last, at = s.slots[:, -1].long(), s.slots[:, 0].long()
    core, own = torch.empty_like(layer.out), torch.empty_like(layer.out)

    def stock(conv, state):
        y = s.stock_attention(s.stock_conv(conv), state, core)
        if tokens == 1:
            core.copy_(y)
        return layer.stock_norm(core), lambda: state[last]

    def native(conv, state):
        ops_c = torch.ops._C.fused_kda_decode
        ops_c(
            layer.qkv, taps, None, conv.transpose(-1, -2), layer.gate[None], layer.beta[None], layer.A_log, layer.dt_bias,
            s.sequences["slots"], state, core[None], model.bound, layer.z, layer.norm_weight_fp32, EPS,
        )  # fmt: skip
        return core, lambda: state[last]

    def operator(conv, state):
        ops.decode_step(
            [layer.qkv], [layer.taps], [conv], layer.gate, layer.beta, own, state, s.step_words, z=layer.z,
            norm_weight=layer.norm_weight_fp32, **s.sequences, **layer.parameters(),
        )  # fmt: skip
        return own, lambda: state[last]

    def want():
        y, _ = layer.convolved(window[at, -WIDTH + 1 :], s.cu)
        out, states = layer.attention(y, first[last], s.cu)
        return layer.normed(out), states

    variants = {"vLLM": Variant(on(views, stock)), "libkda": Variant(on(views, operator))}
    if tokens == 1 and model.bound is not None and vllm.native["decode"] == "loaded":
        taps = layer.taps.view(3, -1, WIDTH).transpose(1, 2).contiguous()
        variants["vLLM native"] = Variant(on(views, native), optional=True)
    return Case(variants, want, "vLLM", 20, restore)


def prompt_rows(requests, length):
    """Tables of prompts: fresh where there is one, pieces that continue where there are several."""
    cu = torch.arange(0, requests * length + 1, length, device=DEVICE, dtype=torch.int32)
    slots = shuffled(requests)
    flags = torch.full((requests,), requests > 1, device=DEVICE)
    chunks = torch.arange(requests, device=DEVICE, dtype=torch.int32).repeat_interleave(-(-length // CONV_CHUNK))
    offsets = torch.arange(-(-length // CONV_CHUNK), device=DEVICE, dtype=torch.int32).repeat(requests)
    table = {"tot": len(chunks), "mlist": chunks, "mlist_len": len(chunks), "offsetlist": offsets, "batch_ptr": chunks,
             "token_chunk_offset_ptr": offsets}  # fmt: skip
    metadata = types.SimpleNamespace(nums_dict={CONV_CHUNK: table}, batch_ptr=chunks, token_chunk_offset_ptr=offsets)
    rows = dict(begin=cu[:-1].contiguous(), length=torch.full_like(cu[:-1], length), slots=slots, has_initial_state=flags)
    return cu, slots, flags, metadata, rows


def stock_convs(layer, conv, cu, slots, flags, metadata):
    """A call for each of q, k and v: the kernels after it want them dense."""
    p, states = layer.model.channels // 3, conv.transpose(-1, -2)
    return [
        vllm.conv.causal_conv1d_fn(
            x.transpose(0, 1), taps, None, activation="silu", conv_states=window, has_initial_state=flags,
            cache_indices=slots, query_start_loc=cu, metadata=metadata,
        ).transpose(0, 1)
        for x, taps, window in zip(layer.qkv.split(p, 1), layer.taps.split(p), states.split(p, -2), strict=True)
    ]  # fmt: skip


def conv_prefill(model, requests, length):
    layer = Layer(model, requests * length)
    (first, _), views, restore = layer.pools(requests + 1)
    cu, slots, flags, metadata, rows = prompt_rows(requests, length)
    words = kt.plan_words(null_slot=NULL, max_tokens=layer.rows, max_sequences=requests)
    own, at = torch.empty(layer.qkv.shape, dtype=layer.qkv.dtype, device=DEVICE), slots.long()

    def stock(conv, _):
        return stock_convs(layer, conv, cu, slots, flags, metadata), lambda: conv[at]

    def operator(conv, _):
        ops.conv_prefill([layer.qkv], [layer.taps], [conv], [own], words, **rows)
        return own, lambda: conv[at]

    variants = {"vLLM": Variant(on(views, stock)), "libkda": Variant(on(views, operator))}
    return Case(variants, lambda: layer.convolved(first[at] * flags[:, None, None], cu), "vLLM", 6, restore)


def stock_prefills(layer, cu, slots, flags, keep=False):
    """vLLM's two ways from dense q, k, v to out and the pool. The output of its Triton kernels takes the place of v, which is
    what its layers leave them, unless that is to be kept."""
    m, requests = layer.model, len(slots)
    form = dict(layer.parameters())
    form["g_bias"] = form.pop("dt_bias")

    def triton(qkv, state):
        q, k, v = (t.unflatten(-1, (m.heads, DIM))[None] for t in qkv)
        initial = vllm.gather.gather_initial_states(state, slots, flags)
        out, last = vllm.kda.chunk_kda_with_fused_gate(
            q=q, k=k, v=v, raw_g=layer.gate[None], raw_beta=layer.beta[None], lower_bound=m.bound, initial_state=initial,
            output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu, out=layer.out[None] if keep else None, **form,
        )  # fmt: skip
        state[slots] = last.to(state.dtype)
        return out[0]

    if m.bound is None or vllm.native["flashkda"] != "loaded":
        return triton, None
    size = torch.ops._flashkda_C.get_workspace_size(layer.rows, m.heads, requests)
    workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    last = torch.empty(requests, m.heads, DIM, DIM, device=DEVICE)

    def native(qkv, state):
        q, k, v = (t.unflatten(-1, (m.heads, DIM))[None] for t in qkv)
        initial = vllm.gather.gather_initial_states(state, slots, flags)
        torch.ops._flashkda_C.fwd(
            q, k, v, layer.gate[None], layer.beta[None], DIM**-0.5, layer.out[None], workspace, layer.A_log,
            layer.dt_bias.view(-1, DIM), m.bound, initial, last, cu, None, None,
        )  # fmt: skip
        state[slots] = last.to(state.dtype)
        return layer.out

    return triton, native


def prefill(model, requests, length):
    layer = Layer(model, requests * length)
    (_, first), views, restore = layer.pools(requests + 1)
    cu, slots, flags, _, rows = prompt_rows(requests, length)
    qkv = [t.contiguous() for t in silu(layer.qkv).chunk(3, dim=-1)]
    q, k, v = (t.unflatten(-1, (model.heads, DIM)) for t in qkv)
    words, at = model.words(max_tokens=layer.rows, max_sequences=requests), slots.long()
    own = torch.empty_like(layer.out)

    def operator(_, state):
        ops.prefill(q, k, v, layer.gate, layer.beta, own, state, words, **rows, **layer.parameters())
        return own, lambda: state[at]

    def of(stock, **more):
        return Variant(on(views, lambda _, state: (stock(qkv, state), lambda: state[at])), **more)

    triton, native = stock_prefills(layer, cu, slots, flags, keep=True)
    variants = {"vLLM": of(triton), "libkda": Variant(on(views, operator))}
    if native is not None:
        variants["vLLM native"] = of(native, optional=True)
    initial = first[at] * flags[:, None, None, None]
    return Case(variants, lambda: layer.attention(torch.cat(qkv, 1).double(), initial, cu), "vLLM", 3, restore)


def prefill_step(model, requests, length):
    layer = Layer(model, requests * length)
    (window, first), views, restore = layer.pools(requests + 1)
    cu, slots, flags, metadata, rows = prompt_rows(requests, length)
    bounds, at = dict(max_tokens=layer.rows, max_sequences=requests), slots.long()
    conv_words, words = kt.plan_words(null_slot=NULL, **bounds), model.words(**bounds)
    y = torch.empty(layer.qkv.shape, dtype=layer.qkv.dtype, device=DEVICE)
    raw, own = torch.empty_like(layer.out), torch.empty_like(layer.out)
    q, k, v = (t.unflatten(-1, (model.heads, DIM)) for t in y.chunk(3, dim=-1))

    def of(stock, **more):
        def call(conv, state):
            out = stock(stock_convs(layer, conv, cu, slots, flags, metadata), state)
            if out is not layer.out:  # FlashKDA writes where it belongs
                layer.out.copy_(out)
            return layer.stock_norm(layer.out), lambda: state[at]

        return Variant(on(views, call), **more)

    def operator(conv, state):
        ops.conv_prefill([layer.qkv], [layer.taps], [conv], [y], conv_words, **rows)
        ops.prefill(q, k, v, layer.gate, layer.beta, raw, state, words, **rows, **layer.parameters())
        ops.gated_norm(raw, layer.z, layer.norm_weight_fp32, own, eps=EPS)
        return own, lambda: state[at]

    def want():
        convolved, _ = layer.convolved(window[at] * flags[:, None, None], cu)
        out, states = layer.attention(convolved, first[at] * flags[:, None, None, None], cu)
        return layer.normed(out), states

    triton, native = stock_prefills(layer, cu, slots, flags)
    variants = {"vLLM": of(triton), "libkda": Variant(on(views, operator))}
    if native is not None:
        variants["vLLM native"] = of(native, optional=True)
    return Case(variants, want, "vLLM", 3, restore)


def norm(model, rows):
    layer = Layer(model, rows)
    x = normal(rows, model.heads, DIM)
    inputs, outputs = ([x.clone() for _ in range(-(-L2_BYTES // (2 * x.numel())))] for _ in range(2))

    def operator(of, out):
        ops.gated_norm(of, layer.z, layer.norm_weight_fp32, out, eps=EPS)
        return out, None

    # vLLM's works in place, libkda's layer keeps the two apart.
    stock = Variant([lambda out=out: (layer.stock_norm(out), None) for out in outputs])
    own = Variant([lambda of=of, out=out: operator(of, out) for of, out in zip(inputs, outputs, strict=True)])
    return Case({"vLLM": stock, "libkda": own}, lambda: (layer.normed(x), None), "vLLM", 10, lambda: outputs[0].copy_(x))


def cases():
    found: dict[str, Callable[[], Case]] = {}
    for m in (LINEAR, K3):
        for rows, tokens in ((32, 1), (128, 1), (32, 4)):
            shape = f"{rows} rows" if tokens == 1 else f"{rows} windows of {tokens} tokens"
            for title, make in (("conv update", conv_update), ("decode", decode), ("decode step", decode_step)):
                found[f"{m.name}: {title}, {shape}"] = lambda make=make, m=m, r=rows, t=tokens: make(m, r, t)
        for requests, length in ((1, 8192), (8, 1024)):
            for title, make in (("conv prefill", conv_prefill), ("prefill", prefill), ("prefill step", prefill_step)):
                found[f"{m.name}: {title}, {requests}x{length}"] = lambda make=make, m=m, r=requests, t=length: make(m, r, t)
        found[f"{m.name}: gated norm, 8192 tokens"] = lambda m=m: norm(m, 8192)
    return found


def main():
    global vllm
    parser = paired.parser(__doc__)
    parser.add_argument("--vllm", help="a folder that holds the package vllm; default: the installed one")
    arguments = parser.parse_args()
    vllm = vllm_kernels.load(arguments.vllm)
    kinds = [f"{m.name}: {part}" for m in (LINEAR, K3) for part in ("prefill, 1x8192", "decode step", "conv prefill, 1x8192")]
    options = ["--vllm", arguments.vllm] if arguments.vllm else []

    def facts():
        return {"vllm": vllm.version, "native": vllm.native}

    paired.run(paired.Suite(__file__, cases(), kinds, facts, options=options), arguments)


if __name__ == "__main__":
    main()

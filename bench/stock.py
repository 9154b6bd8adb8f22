#!/usr/bin/env python3
"""libkda beside FLA's and transformers' own implementations, in one process on one GPU (bench/paired.py says how).

stock.py [--rounds N] [--only WORDS] [--json FILE]   measures; prints a table
stock.py --compile [--only WORDS]                    compiles FLA's kernels for the cases, in processes side by side

`FLA` is FLA as installed (its backend libkda switched off, its Triton kernels tuned by Triton as always), `FLA, libkda` the
same call with `import libkda.fla`, `libkda` the operator itself. Outputs and final states are compared with the recurrence in
fp64.
"""

import contextlib
import os
from collections.abc import Callable

import paired
import torch
from paired import DEVICE, DIM, L2_BYTES, Case, Variant, normal, recurrence, tokens

paired.tune()
os.environ["FLA_LIBKDA"] = "0"
import fla

import libkda.fla  # noqa: F401
import libkda.torch as kt


def prefill(batch, length, heads, bound=None, packed=False):
    from fla.ops.kda import chunk_kda

    inputs, parameters = tokens(batch, length, heads)
    cu = torch.arange(0, batch * length + 1, length, device=DEVICE) if packed else None
    given = [t.flatten(0, 1)[None] for t in inputs] if packed else inputs
    form = dict(
        output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        safe_gate=bound is not None, lower_bound=bound, state_v_first=True, cu_seqlens=cu, **parameters,
    )  # fmt: skip
    if packed:
        form["cu_seqlens_cpu"] = cu.cpu()
    own = dict(parameters, gate_family="softplus" if bound is None else "bounded")
    if bound is not None:
        own["lower_bound"] = bound
    if packed:
        own["cu_seqlens"] = cu
    rows = [t[0] for t in given] if packed else given

    def typed():
        out, final = chunk_kda(*given, **form)
        return out.view(inputs[2].shape), final

    def operator():
        final = torch.empty(batch, heads, DIM, DIM, device=DEVICE)
        return kt.prefill(*rows, final_state=final, **own).view(inputs[2].shape), final

    return Case(
        {"FLA": Variant([typed]), "FLA, libkda": Variant([typed], True), "libkda": Variant([operator])},
        lambda: recurrence(inputs, parameters, bound),
    )


def decode(rows, heads):
    """One token of each row. As typed FLA returns fresh states; in place, as vLLM calls it, it works on a pool's slots."""
    from fla.ops.kda import fused_recurrent_kda
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    inputs, parameters = tokens(rows, 1, heads)
    first = normal(rows, heads, DIM, DIM, dtype=torch.float32)
    pools = [first.clone() for _ in range(max(2, -(-L2_BYTES // (first.numel() * 4))))]
    packed = [t.flatten(0, 1)[None] for t in inputs]
    slots = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    cu = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32)
    form = dict(
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True, **parameters
    )
    out = torch.empty_like(inputs[2])
    plan = kt.plan_words(gate_family="softplus")

    def typed(pool):
        return fused_recurrent_kda(*inputs, initial_state=pool, output_final_state=True, **form)

    def in_place(pool):
        named = dict(zip(("q", "k", "v", "g", "beta"), packed, strict=True))
        y, _ = fused_recurrent_kda_fwd(
            **named, initial_state=pool, inplace_final_state=True, cu_seqlens=cu, ssm_state_indices=slots, **form
        )
        return y.view(inputs[2].shape), pool

    def operator(pool):
        torch.ops.libkda.decode(*inputs, out, pool, plan, slots, None, None, None, parameters["A_log"], parameters["dt_bias"])
        return out, pool

    def on_pools(call):
        return [lambda pool=pool: call(pool) for pool in pools]

    return Case(
        {
            "FLA": Variant(on_pools(typed)),
            "FLA in place": Variant(on_pools(in_place)),
            "FLA, libkda": Variant(on_pools(typed), True),
            "FLA in place, libkda": Variant(on_pools(in_place), True),
            "libkda": Variant(on_pools(operator)),
        },
        lambda: recurrence(inputs, parameters, None, first),
        calls=20,
        restore=lambda: pools[0].copy_(first),
    )


def conv(length, channels, width=4):
    from fla.modules.causal_conv1d import causal_conv1d

    x, weight = normal(1, length, channels), normal(channels, width)

    def want():
        y = torch.nn.functional.conv1d(x.double().transpose(1, 2), weight.double()[:, None], padding=width - 1, groups=channels)
        return torch.nn.functional.silu(y[..., :length]).transpose(1, 2), None

    def typed():
        return causal_conv1d(x, weight, activation="silu", backend="triton")[0], None

    taps = weight.float()
    return Case(
        {
            "FLA": Variant([typed]),
            "FLA, libkda": Variant([typed], True),
            "libkda": Variant([lambda: (kt.conv_prefill([x], [taps])[0], None)]),
        },
        want,
        calls=10,
    )


def norm(length, heads):
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    x, z, weight = normal(length, heads, DIM), normal(length, heads, DIM), normal(DIM, dtype=torch.float32)

    def want():
        y = x.double()
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * weight.double() * z.double().sigmoid(), None

    def typed():
        return rms_norm_gated(x, z, weight, None, activation="sigmoid", eps=1e-5), None

    return Case(
        {
            "FLA": Variant([typed]),
            "FLA, libkda": Variant([typed], True),
            "libkda": Variant([lambda: (kt.gated_norm(x, z, weight), None)]),
        },
        want,
        calls=10,
    )


def fallback(length, heads):
    """transformers without FLA: its PyTorch function, and what libkda.transformers puts in its place."""
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    import libkda.transformers as plugin

    inputs, parameters = tokens(1, length, heads)
    q, k, v, raw, beta = inputs
    gate = -parameters["A_log"].exp()[:, None] * torch.nn.functional.softplus(raw.float() + parameters["dt_bias"].view(-1, DIM))
    original = modeling.chunk_kimi_delta_attention
    while hasattr(original, "__wrapped__"):
        original = original.__wrapped__
    replaced = plugin._replacement(original, "chunk_kimi_delta_attention")
    # As the model has them: slices of a convolution's result whose channels come first.
    q, k, v = (t.flatten(2).mT.contiguous().mT.unflatten(-1, (heads, DIM)) for t in (q, k, v))

    def call(function):
        sigmoid = beta.sigmoid()
        out, final = function(q, k, v, g=gate, beta=sigmoid, output_final_state=True, use_qk_l2norm_in_kernel=True)
        return out, final.transpose(-1, -2)

    return Case(
        {
            "transformers": Variant([lambda: call(original)], graph=False),
            "transformers, libkda": Variant([lambda: call(replaced)], True, graph=False),
        },
        lambda: recurrence(inputs, parameters, None),
        stock="transformers",
        calls=1,
    )


CASES: dict[str, Callable[[], Case]] = {
    "decode 32 rows, 32 heads": lambda: decode(32, 32),
    "decode 128 rows, 32 heads": lambda: decode(128, 32),
    "prefill 1x8192, 32 heads, softplus": lambda: prefill(1, 8192, 32),
    "prefill 1x8192, 32 heads, bounded": lambda: prefill(1, 8192, 32, -5.0),
    "prefill 8x1024 packed, 32 heads, softplus": lambda: prefill(8, 1024, 32, packed=True),
    "prefill 8x1024 packed, 32 heads, bounded": lambda: prefill(8, 1024, 32, -5.0, packed=True),
    "prefill 1x8192, 12 heads, softplus": lambda: prefill(1, 8192, 12),
    "prefill 1x8192, 64 heads, softplus": lambda: prefill(1, 8192, 64),
    "conv 1x8192, 12288 channels": lambda: conv(8192, 3 * 32 * DIM),
    "gated norm 8192, 32 heads": lambda: norm(8192, 32),
    "transformers' prefill 1x2048, 32 heads": lambda: fallback(2048, 32),
}


KINDS = ("1x8192, 12 heads", "1x8192, 32 heads", "1x8192, 64 heads", "packed", "conv")  # others are quickly compiled


@contextlib.contextmanager
def backend(on):
    os.environ["FLA_LIBKDA"] = "1" if on else "0"
    yield
    os.environ["FLA_LIBKDA"] = "0"


if __name__ == "__main__":
    paired.run(
        paired.Suite(__file__, CASES, KINDS, lambda: {"fla": fla.__version__}, backend, counted=True),
        paired.parser(__doc__).parse_args(),
    )

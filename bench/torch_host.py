#!/usr/bin/env python3
"""Host time of the PyTorch operators: from the call in Python to its return, with the device's queue never full.

torch_host.py [--device cuda|cpu] [--rounds N] [--json FILE]

Each round calls every variant 100 times in a freshly shuffled order and synchronises before each variant; a round's sample is
the mean of its calls. Reported: median and 5-95 % range of the samples. For scale: `empty` is torch.empty of one element,
`zero_` a launch by PyTorch itself. `..., measured` makes no checks and no launch (`libkda.torch.measure`): what is left is
PyTorch's way to the operator, the reading of the arguments and the plan's look-up. `..., C ABI` is the C function through
ctypes with the arguments made before: checks and launch, and what ctypes costs. `..., lent` takes its scratch from a lent
tensor and not from the allocator.
"""

import argparse
import contextlib
import ctypes
import json
import pathlib
import random
import statistics
import time

import torch

import libkda
import libkda.torch
from libkda import _abi
from libkda._library import check, library
from libkda._structs import fill, route
from libkda.tensors import view

CALLS = 100
HEADS, DIM, WIDTH, ROWS = 12, 128, 4, 32
PLAN = "gate_family=softplus"
LIMITS = {"decode": 12.0, "decode_step": 15.0}  # microseconds, on the device


def variants(device):
    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, device=device).to(dtype)

    ops = torch.ops.libkda
    channels = 3 * HEADS * DIM
    q, k, v, gate = (normal(ROWS, 1, HEADS, DIM) for _ in range(4))
    beta, z, out = normal(ROWS, 1, HEADS), normal(ROWS, 1, HEADS, DIM), normal(ROWS, 1, HEADS, DIM)
    pool, window = normal(64, HEADS, DIM, DIM, dtype=torch.float32), normal(64, WIDTH - 1, channels)
    x, weight = normal(ROWS, 1, channels), normal(channels, WIDTH, dtype=torch.float32)
    slots = torch.arange(ROWS, dtype=torch.int32, device=device)
    A_log, dt_bias = normal(HEADS, dtype=torch.float32), normal(HEADS, DIM, dtype=torch.float32)
    norm_weight = normal(DIM, dtype=torch.float32)
    # As a server calls them: by position, which the argument parser likes best.
    rows = (slots, None, None, None, A_log, dt_bias)
    calls = {
        "decode": lambda: ops.decode(q, k, v, gate, beta, out, pool, PLAN, *rows),
        "decode by keywords": lambda: ops.decode(
            q, k, v, gate, beta, out, pool, PLAN, slots=slots, A_log=A_log, dt_bias=dt_bias
        ),
        "decode_step": lambda: ops.decode_step(
            [x], [weight], [window], gate, beta, out, pool, PLAN, z, norm_weight, None, None, None, None, *rows
        ),
        "gated_norm": lambda: ops.gated_norm(out, z, norm_weight, v),
        "empty": lambda: torch.empty(1, device=device),
        "zero_": lambda: weight.zero_(),
    }
    context = libkda.Context(device)
    form = dict(
        num_heads=HEADS, num_value_heads=HEADS, key_dim=DIM, value_dim=DIM, io_dtype="bf16", gate_dtype="bf16",
        beta_dtype="bf16", state_dtype="fp32", gate_family="softplus", max_tokens=ROWS, max_sequences=ROWS,
    )  # fmt: skip
    rest = dict(gate=gate, beta=beta, out=out, state=pool, slots=slots, A_log=A_log, dt_bias=dt_bias)
    calls["decode, C ABI"] = c_function(libkda.DecodePlan(context, **form), q=q, k=k, v=v, **rest)
    step = libkda.DecodeStepPlan(context, **form, conv_width=WIDTH, conv_parts=1, conv_layout="sd", conv_dtype="bf16")
    step_rest = dict(x=[x], conv_weight=[weight], conv_state=[window], z=z, norm_weight=norm_weight)
    calls["decode_step, C ABI"] = c_function(step, **step_rest, **rest)
    memory = torch.empty(step.workspace_size + 256, dtype=torch.uint8, device=device)

    blocks = {name: (contextlib.nullcontext(), call) for name, call in calls.items()}
    for name in ("decode", "decode_step", "gated_norm"):
        blocks[f"{name}, measured"] = libkda.torch.measure(), calls[name]
    blocks["decode_step, lent"] = libkda.torch.scratch(memory), calls["decode_step"]
    return blocks


def c_function(plan, **tensors):
    """The plan's C function on arguments that are made once."""
    args, keep = fill(plan._args(struct_size=ctypes.sizeof(plan._args)), route(plan._args, tensors))
    workspace = plan.make_workspace()
    grant = _abi.kda_workspace(view(workspace, "workspace").c.data, plan.workspace_size)
    function = getattr(library(), f"kda_{plan.operator}_run")
    stream = torch.cuda.current_stream().cuda_stream if tensors["out"].is_cuda else None
    reference = ctypes.byref(args)

    def call(_keep=(keep, workspace)):
        return check(function(plan.handle, reference, grant, stream))

    return call


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    wait = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    blocks = variants(arguments.device)
    samples = {name: [] for name in blocks}
    for _, call in blocks.values():
        call()
    order, shuffle = list(blocks), random.Random(1).shuffle
    for _ in range(arguments.rounds):
        shuffle(order)
        for name in order:
            block, call = blocks[name]
            wait()
            with block:
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                spent = time.perf_counter() - start
            samples[name].append(spent / CALLS * 1e6)
    for name, values in samples.items():
        values = sorted(values)
        low, high = values[len(values) // 20], values[-1 - len(values) // 20]
        limit = f", wanted <= {LIMITS[name]} us" if arguments.device == "cuda" and name in LIMITS else ""
        print(f"{name:22} {statistics.median(values):6.2f} us ({low:.2f} ... {high:.2f}){limit}")
    if arguments.json:
        facts = {
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "source_hash": libkda.source_hash(),
            "shape": {"heads": HEADS, "dim": DIM, "rows": ROWS, "conv_width": WIDTH},
            "unit": "us",
            "samples": samples,
        }
        arguments.json.write_text(json.dumps(facts, indent=1))


main()

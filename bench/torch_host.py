#!/usr/bin/env python3
"""Host time of the PyTorch operators: from the call in Python to its return, with the device's queue never full.

torch_host.py [--device cuda|cpu] [--rounds N] [--json FILE]

Each round calls every variant 100 times in a freshly shuffled order and synchronises before each variant; a round's sample is
the mean of its calls. Reported: median and 5-95 % range of the samples. `empty` is torch.empty of one element, for scale.
"""

import argparse
import json
import pathlib
import random
import statistics
import time

import torch

import libkda
import libkda.torch

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
    return {
        "decode": lambda: ops.decode(q, k, v, gate, beta, out, pool, PLAN, *rows),
        "decode by keywords": lambda: ops.decode(
            q, k, v, gate, beta, out, pool, PLAN, slots=slots, A_log=A_log, dt_bias=dt_bias
        ),
        "decode_step": lambda: ops.decode_step(
            [x], [weight], [window], gate, beta, out, pool, PLAN, z, norm_weight, None, None, None, None, *rows
        ),
        "gated_norm": lambda: ops.gated_norm(out, z, norm_weight, v),
        "empty": lambda: torch.empty(1, device=device),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    wait = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    calls = variants(arguments.device)
    samples = {name: [] for name in calls}
    for name in calls:
        calls[name]()
    order, shuffle = list(calls), random.Random(1).shuffle
    for _ in range(arguments.rounds):
        shuffle(order)
        for name in order:
            call = calls[name]
            wait()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            samples[name].append((time.perf_counter() - start) / CALLS * 1e6)
    for name, values in samples.items():
        values = sorted(values)
        low, high = values[len(values) // 20], values[-1 - len(values) // 20]
        limit = f", wanted <= {LIMITS[name]} us" if arguments.device == "cuda" and name in LIMITS else ""
        print(f"{name:18} {statistics.median(values):6.2f} us ({low:.2f} ... {high:.2f}){limit}")
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

#!/usr/bin/env python3
"""A long prompt through KDA layers, its tokens over several ranks; then tokens one by one, on every rank alike.

    torchrun --nproc-per-node 2 long_prompt.py --tokens 4096                    # gloo, small seeded layers
    torchrun --nproc-per-node 2 long_prompt.py --device cuda --model kimi-linear --layers 4 --tokens 262144
    torchrun --nproc-per-node 2 long_prompt.py --checkpoint /models/Kimi-Linear-48B-A3B --layers 4

Each layer: x + layer(rms_norm(x)). --verify: rank 0 also runs everything alone, and compares.
"""

import argparse
import os
import time

# NCCL without multicast over NVLink, whatever the machine.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist

import libkda
import libkda.distributed as kd
import libkda.torch as kt


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="tiny", help="kimi-linear, kimi-k3, glm-5.3-flash, tiny: seeded weights")
    parser.add_argument("--checkpoint", help="a folder or a .safetensors file instead")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--verify", action="store_true")
    return parser.parse_args()


def seeded(spec, number, device, dtype):
    layer = kt.KDALayer(spec, dtype=dtype, device=device)
    g = torch.Generator().manual_seed(number)
    for name in ("in_proj", "f_b_proj", "g_b_proj", "o_proj", "conv_weight"):
        weight = getattr(layer, name)
        if weight is not None:
            weight.copy_(torch.randn(weight.shape, generator=g) * weight.shape[1] ** -0.5)
    layer.norm_weight.fill_(1)
    layer.dt_bias.fill_(-4)
    return layer


def norm(x):
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


def main():
    o = parse()
    cuda = o.device == "cuda"
    local = int(os.environ["LOCAL_RANK"])
    device, dtype = (torch.device("cuda", local), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", **({"device_id": device} if cuda else {}))
    cp = kd.ContextParallel()

    if o.checkpoint:
        files = libkda.Checkpoint(o.checkpoint)
        count = min(o.layers, len(files.layers()))
        layers = [kt.KDALayer.from_checkpoint(files, i, dtype=dtype, device=device) for i in range(count)]
    else:
        layers = [seeded(libkda.LayerSpec.of_model(o.model), i, device, dtype) for i in range(o.layers)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(o.tokens + o.decode, layers[0].whole.hidden, generator=generator).to(device, dtype)
    slots = torch.zeros(1, dtype=torch.int32, device=device)

    # The prompt: each rank has its rows of every layer; states end up on all of them.
    shards = kd.Shards.even([o.tokens], cp.peers.ranks)
    layout = cp.layout(shards, device)
    states = [layer.new_state(1) for layer in layers]
    rows = x[shards.slice(cp.rank)]
    begin = time.perf_counter()
    for layer, state in zip(layers, states, strict=True):
        rows = rows + cp.layer(layer, norm(rows), state, layout, slots)
    cp.peers.finish()
    seconds = time.perf_counter() - begin

    def decode(states):
        out = []
        for t in range(o.tokens, o.tokens + o.decode):
            y = x[t : t + 1]
            for layer, state in zip(layers, states, strict=True):
                y = y + layer.decode(norm(y), state, slots)
            out.append(y)
        return torch.cat(out) if out else x[:0]

    last = decode(states)
    if cp.rank == 0:
        print(f"{o.tokens} tokens, {len(layers)} layers, {cp.peers.ranks} ranks: {o.tokens / seconds:,.0f} tokens/s")
    if o.verify and cp.rank == 0:
        alone, y = [layer.new_state(1) for layer in layers], x[: o.tokens]
        cu = torch.tensor([0, o.tokens], dtype=torch.int32, device=device)
        for layer, state in zip(layers, alone, strict=True):
            y = y + layer.prefill(norm(y), state, cu, slots)
        want = decode(alone)
        difference = float((last.double() - want.double()).norm() / want.double().norm())
        print(f"against one rank: relative difference of the decoded rows {difference:.1e}")
        if difference > (2e-2 if cuda else 1e-5):
            raise SystemExit(1)
    dist.barrier()
    dist.destroy_process_group()


main()

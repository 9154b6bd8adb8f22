#!/usr/bin/env python3
"""Several GPUs: context- and tensor-parallel prefill and decode checked and timed against one, and what a lost rank does.

distributed.py --ranks R [--device cuda|cpu] [options]     starts R processes, one a GPU
torchrun --nproc-per-node R bench/distributed.py [options]  the same ranks by torchrun (all checks but `failure`)

Checks (--checks, all by default):
  context  prefill over R ranks equals one rank's fp32 arithmetic within N-9, states bit-equal on all ranks: even, uneven and
           empty shards, a prompt shorter than the ranks
  speed    --tokens over R ranks against one GPU: paired samples in shuffled rounds, the exchange alone, its byte floor
  tensor   a layer of --width whose heads are shared by the ranks, prefill and decode, against one rank
  failure  one rank is killed; the others must raise within the timeout
With --json FILE rank 0 writes a record with every raw sample. Exit code 1 if a check fails.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import time

# Before NCCL is loaded: multicast over NVLink stays off.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

import torch
import torch.distributed as dist

import libkda
import libkda.distributed as kd
import libkda.torch as kt

OUT_LIMIT, STATE_LIMIT = 3.5e-3, 1e-3  # spec N-9: tensor cores, bf16 io, fp32 pool
LAYER_LIMIT = 1e-2  # bf16 partial sums added over ranks against one product
SPEEDUPS = {2: 1.75, 4: 3.2, 8: 5.5}  # wanted at 1 x 262144 with 12 heads
EXCHANGE_SHARE = 0.10  # wanted at 65,536 tokens a rank


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="start this many processes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--checks", default="context,speed,tensor,failure")
    parser.add_argument("--tokens", default="65536,262144", help="of the speed check, and rank * 65536")
    parser.add_argument("--heads", default="12,32")
    parser.add_argument("--dim", type=int, default=128, help="of keys and values")
    parser.add_argument("--width", default="kimi-k3", help="model of the tensor check")
    parser.add_argument("--layer-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until a rank counts as lost")
    parser.add_argument("--segments", type=int, help="local segments instead of the built-in choice")
    parser.add_argument("--json", type=pathlib.Path)
    return parser.parse_args()


# -- processes ------------------------------------------------------------------------------------------------------------


def start(o, checks, expect_lost=()):
    """Runs this program as R ranks; True if every rank that should came back with 0."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    arguments = [a for a in sys.argv[1:] if not a.startswith("--checks=")]
    if "--checks" in arguments:
        at = arguments.index("--checks")
        del arguments[at : at + 2]
    processes = []
    for rank in range(o.ranks):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(o.ranks))
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        command = [sys.executable, __file__, *arguments, "--checks", ",".join(checks)]
        processes.append(subprocess.Popen(command, env=env))
    codes = [p.wait() for p in processes]
    good = [code == 0 for code in codes] == [r not in expect_lost for r in range(o.ranks)]
    print(f"{', '.join(checks)}: exit codes {codes}: {'ok' if good else 'FAILED'}", flush=True)
    return good


class Bench:
    def __init__(self, o):
        self.o = o
        self.local = int(os.environ.get("LOCAL_RANK", "0"))
        self.is_cuda = o.device == "cuda"
        self.device = torch.device(f"cuda:{self.local}" if self.is_cuda else "cpu")
        if self.is_cuda:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
        options = {"device_id": self.device} if self.is_cuda else {}
        dist.init_process_group("nccl" if self.is_cuda else "gloo", **options)
        self.cp = kd.ContextParallel(timeout=o.timeout)
        self.rank, self.ranks = self.cp.rank, self.cp.peers.ranks
        self.record = {"rows": [], "failures": []}

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def row(self, kind, good, **values):
        if self.rank != 0:
            return
        text = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items() if k != "samples")
        self.say(f"{'ok  ' if good else 'FAIL'} {kind} {text}")
        self.record["rows"].append({"check": kind, "ok": bool(good), **values})
        if not good:
            self.record["failures"].append(f"{kind} {text}")

    def wait(self):
        if self.is_cuda:
            torch.cuda.synchronize()

    def most(self, value):
        """The largest over ranks."""
        t = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return float(t)

    def time(self, call, alone=False):
        """Seconds of one call, from a common start to the slowest rank's end; alone: rank 0 runs it, the others wait."""
        dist.barrier()
        self.wait()
        begin = time.perf_counter()
        if self.rank == 0 or not alone:
            call()
        self.wait()
        return self.most(time.perf_counter() - begin if self.rank == 0 or not alone else 0.0)

    def same_on_all(self, tensor):
        """Whether all ranks hold the same bits."""
        bits = tensor.contiguous().view(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16).long()
        sums = torch.stack([bits.sum(), (bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum()])
        every = [torch.empty_like(sums) for _ in range(self.ranks)]
        dist.all_gather(every, sums)
        return all(torch.equal(e, every[0]) for e in every)


@dataclasses.dataclass
class Problem:
    """Slow gates (a decay of about 1 % a token), so that a state lives from one rank to the next."""

    lengths: list
    heads: int
    dim: int
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self):
        g = torch.Generator(device=self.device).manual_seed(1)
        t, h, d = sum(self.lengths), self.heads, self.dim

        def normal(*shape, dtype=None):
            return torch.randn(shape, generator=g, device=self.device, dtype=dtype or self.dtype)

        self.tokens = [normal(t, h, d) for _ in range(3)] + [normal(t, h, d) - 6, normal(t, h)]
        self.state = normal(len(self.lengths), h, d, d, dtype=torch.float32) * 0.1
        self.slots = torch.arange(len(self.lengths), dtype=torch.int32, device=self.device)
        self.flags = torch.ones(len(self.lengths), dtype=torch.bool, device=self.device)
        self.form = {"gate_family": "bounded", "lower_bound": -5.0}
        self.cu = torch.tensor([0, *self.lengths], device=self.device).cumsum(0).int()

    def one(self, state, **options):
        """The whole on one rank."""
        return kt.prefill(*self.tokens, cu_seqlens=self.cu, state=state, slots=self.slots, **self.form, **options)

    def exact(self):
        """Output and last states by fp32 arithmetic from the same inputs."""
        state = self.state.clone()
        tokens = [t.float() for t in self.tokens]
        out = kt.prefill(
            *tokens, cu_seqlens=self.cu, state=state, slots=self.slots, backend="portable", batch_invariant=True, **self.form
        )
        return out, state

    def mine(self, shards, rank):
        return [t[shards.slice(rank)] for t in self.tokens]


def error(x, reference):
    return float((x.double() - reference.double()).norm() / reference.double().norm()) if reference.numel() else 0.0


# -- checks ---------------------------------------------------------------------------------------------------------------


def uneven(total, ranks):
    """Shards whose sizes are nothing in particular, one of them empty."""
    random.seed(3)
    cuts = sorted([0, total, *(random.randint(0, total) for _ in range(ranks - 1))])
    rows = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
    return rows if ranks < 3 else [rows[0] + rows[1], 0, *rows[2:]]


def check_context(b):
    dtype = torch.bfloat16 if b.is_cuda else torch.float32
    limits = (OUT_LIMIT, STATE_LIMIT) if b.is_cuda else (1e-5, 1e-5)
    longest = max(map(int, b.o.tokens.split(",")))
    sizes = sorted({min(longest, 65536), longest})
    for heads in map(int, b.o.heads.split(",")):
        batches = [[n] for n in sizes] + [[max(1, b.ranks - 1)], [sizes[0] // 3, 5, 0, sizes[0] // 2]]
        for lengths in batches:
            p = Problem(lengths, heads, b.o.dim, b.device, dtype)
            want_out, want_state = p.exact()
            total = sum(lengths)
            shapes = {"even": kd.Shards.even(lengths, b.ranks).rows, "uneven": uneven(total, b.ranks)}
            shapes["last rank alone"] = [0] * (b.ranks - 1) + [total]
            for name, rows in shapes.items():
                shards = kd.Shards(lengths, rows)
                layout = b.cp.layout(shards, b.device, segments=b.o.segments)
                state = p.state.clone()
                out = b.cp.prefill(
                    *p.mine(shards, b.rank), state=state, layout=layout, slots=p.slots, has_initial_state=p.flags, **p.form
                )
                b.cp.peers.finish()
                out_error = b.most(error(out, want_out[shards.slice(b.rank)]))
                state_error, same = b.most(error(state, want_state)), b.same_on_all(state)
                good = out_error <= limits[0] and state_error <= limits[1] and same
                b.row(
                    "context", good, heads=heads, lengths=str(lengths), shards=name, out=out_error, state=state_error, same=same
                )
            del p, want_out, want_state


def check_speed(b):
    dtype = torch.bfloat16 if b.is_cuda else torch.float32
    for heads in map(int, b.o.heads.split(",")):
        for tokens in sorted({*map(int, b.o.tokens.split(",")), *([65536 * b.ranks] if b.is_cuda else [])}):
            p = Problem([tokens], heads, b.o.dim, b.device, dtype)
            shards = kd.Shards.even([tokens], b.ranks)
            layout = b.cp.layout(shards, b.device, segments=b.o.segments)
            mine, state = p.mine(shards, b.rank), p.state.clone()
            payload = torch.zeros(2 * b.o.dim, heads, b.o.dim, device=b.device)

            def parallel(mine=mine, state=state, layout=layout, p=p):
                b.cp.prefill(*mine, state=state, layout=layout, slots=p.slots, has_initial_state=p.flags, **p.form)

            calls = {
                "one": (lambda p=p, state=state: p.one(state), True),
                "ranks": (parallel, False),
                "exchange": (lambda payload=payload: b.cp.peers.gather(payload).wait(), False),
            }
            for call, alone in calls.values():
                for _ in range(2):
                    b.time(call, alone)
            samples, order = {name: [] for name in calls}, list(calls)
            for number in range(b.o.rounds):
                random.Random(number).shuffle(order)
                for name in order:
                    samples[name].append(b.time(*calls[name]))
            b.cp.peers.finish()
            middle = {name: statistics.median(s) for name, s in samples.items()}
            speedup, share = middle["one"] / middle["ranks"], middle["exchange"] / middle["ranks"]
            received = (b.ranks - 1) * payload.numel() * 4
            wanted = SPEEDUPS.get(b.ranks, 0) if b.is_cuda and (tokens, heads) == (262144, 12) else 0
            most = EXCHANGE_SHARE if b.is_cuda and tokens == 65536 * b.ranks else 1e9
            b.row(
                "speed", speedup >= wanted and share <= most, heads=heads, tokens=tokens, speedup=speedup, wanted=wanted,
                exchange_share=share, exchange_bytes=received, exchange_gb_s=received / middle["exchange"] / 1e9,
                floor_us=received / link_rate(b) * 1e6, **{f"{n}_us": m * 1e6 for n, m in middle.items()}, samples=samples,
            )  # fmt: skip
            del p


_rate = []


def link_rate(b):
    """Bytes a second that a rank receives from its neighbour in a large copy."""
    if not _rate:
        block = torch.empty((1 << 28) if b.is_cuda else (1 << 22), dtype=torch.uint8, device=b.device)

        def copy():
            peer_out, peer_in = (b.rank + 1) % b.ranks, (b.rank - 1) % b.ranks
            other = torch.empty_like(block)
            moves = [dist.P2POp(dist.isend, block, peer_out), dist.P2POp(dist.irecv, other, peer_in)]
            for work in dist.batch_isend_irecv(moves):
                work.wait()

        _rate.append(block.numel() / min(b.time(copy) for _ in range(6)) if b.ranks > 1 else 1e30)
    return _rate[0]


def random_layer(spec, heads, device, dtype):
    """The same weights whatever the share: made head by head by seed."""
    layer = kt.KDALayer(spec, heads=heads, dtype=dtype, device=device)

    def fill(name, rows, columns, scale):
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(sum(map(ord, name)))).mul_(scale)

    s, hv = spec, spec.num_value_heads
    scale = s.hidden**-0.5
    tensors = {f"{n}_proj.weight": fill(n, s.num_heads * s.key_dim, s.hidden, scale) for n in "qk"}
    tensors["v_proj.weight"] = fill("v", hv * s.value_dim, s.hidden, scale)
    for n in "qkv":
        tensors[f"{n}_conv1d.weight"] = fill(n + "c", tensors[f"{n}_proj.weight"].shape[0], s.conv_width, 0.5)
    tensors["b_proj.weight"] = fill("b", hv, s.hidden, scale)
    tensors["f_a_proj.weight"] = fill("fa", s.gate_rank, s.hidden, scale)
    tensors["f_b_proj.weight"] = fill("fb", hv * s.key_dim, s.gate_rank, s.gate_rank**-0.5)
    if s.output_gate == "full_rank":
        tensors["g_proj.weight"] = fill("g", hv * s.value_dim, s.hidden, scale)
    else:
        tensors["g_a_proj.weight"] = fill("ga", s.output_gate_rank, s.hidden, scale)
        tensors["g_b_proj.weight"] = fill("gb", hv * s.value_dim, s.output_gate_rank, s.output_gate_rank**-0.5)
    tensors["o_proj.weight"] = fill("o", s.hidden, hv * s.value_dim, (hv * s.value_dim) ** -0.5)
    tensors |= {"o_norm.weight": torch.ones(s.value_dim), "A_log": torch.zeros(hv)}
    tensors["dt_bias"] = torch.full((hv * s.key_dim,), -4.0)
    layer.load_parameters(tensors)
    return layer


def check_tensor(b):
    dtype = torch.bfloat16 if b.is_cuda else torch.float32
    tp = kd.TensorParallel(peers=b.cp.peers)
    spec = libkda.LayerSpec.of_model(b.o.width)
    share = random_layer(spec, tp.heads(spec.num_heads), b.device, dtype)
    whole = random_layer(spec, None, b.device, dtype) if b.rank == 0 else None
    rows, batch = b.o.layer_tokens, min(64, b.o.layer_tokens)
    x = torch.randn(rows, spec.hidden, generator=torch.Generator().manual_seed(2)).to(b.device, dtype)
    cu, slot = torch.tensor([0, rows], dtype=torch.int32, device=b.device), torch.zeros(1, dtype=torch.int32, device=b.device)
    slots = torch.arange(batch, dtype=torch.int32, device=b.device)
    states = {"share": share.new_state(batch), "whole": whole.new_state(batch) if whole is not None else None}
    calls = {
        "prefill": (
            lambda: tp.add(share.prefill(x, states["share"], cu, slot)),
            lambda: whole.prefill(x, states["whole"], cu, slot),
        ),
        "decode": (
            lambda: tp.add(share.decode(x[:batch], states["share"], slots)),
            lambda: whole.decode(x[:batch], states["whole"], slots),
        ),
    }
    for name, (parallel, one) in calls.items():
        got, want = parallel(), one() if b.rank == 0 else None
        b.cp.peers.finish()
        same = b.same_on_all(got)
        limit = LAYER_LIMIT if b.is_cuda else 1e-5
        difference = b.most(error(got, want) if b.rank == 0 else 0.0)
        samples, order = {"one": [], "ranks": []}, ["one", "ranks"]
        for number in range(b.o.rounds):
            random.Random(number).shuffle(order)
            for which in order:
                samples[which].append(b.time(one if which == "one" else parallel, which == "one"))
        middle = {n: statistics.median(s) for n, s in samples.items()}
        b.row(
            "tensor", difference <= limit and same, step=name, model=b.o.width, heads=spec.num_heads, difference=difference,
            same=same, speedup=middle["one"] / middle["ranks"], **{f"{n}_us": m * 1e6 for n, m in middle.items()},
            samples=samples,
        )  # fmt: skip


def check_failure(b):
    """Rank 1 kills itself in its third step; the others print what they got, and exit 0 only if it was PeerError in time."""
    p = Problem([64 * b.ranks], 2, 64 if not b.is_cuda else b.o.dim, b.device, torch.bfloat16 if b.is_cuda else torch.float32)
    shards = kd.Shards.even(p.lengths, b.ranks)
    layout, mine = b.cp.layout(shards, b.device), p.mine(shards, b.rank)
    begin = time.monotonic()
    try:
        for step in range(100):
            if b.rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            b.cp.prefill(*mine, state=p.state, layout=layout, slots=p.slots, has_initial_state=p.flags, **p.form)
            b.cp.peers.finish()
    except kd.PeerError as failure:
        took = time.monotonic() - begin
        good = took <= b.o.timeout + 15
        print(f"{'ok  ' if good else 'FAIL'} failure rank {b.rank} raised after {took:.1f} s: {failure}", flush=True)
        os._exit(0 if good else 1)  # a group that lost a rank cannot say goodbye
    print(f"FAIL failure rank {b.rank}: nothing was raised", flush=True)
    os._exit(1)


def main():
    o = parse()
    checks = [c for c in o.checks.split(",") if c]
    known = {"context": check_context, "speed": check_speed, "tensor": check_tensor, "failure": check_failure}
    unknown = [c for c in checks if c not in known]
    if unknown:
        raise SystemExit(f"--checks: wanted {', '.join(known)}, got {', '.join(unknown)}")
    if "RANK" not in os.environ:
        if not o.ranks or o.ranks < 2:
            raise SystemExit("--ranks: wanted 2 or more, or torchrun")
        good = True
        ordinary = [c for c in checks if c != "failure"]
        if ordinary:
            good = start(o, ordinary)
        if "failure" in checks:
            good = start(o, ["failure"], expect_lost=(1,)) and good
        return 0 if good else 1
    b = Bench(o)
    b.say(f"{b.ranks} ranks, {torch.cuda.get_device_name() if b.is_cuda else 'cpu'}, libkda {libkda.source_hash()}")
    for name in checks:
        known[name](b)
    if b.rank == 0 and o.json:
        facts = {
            "device": torch.cuda.get_device_name() if b.is_cuda else "cpu", "ranks": b.ranks, "torch": torch.__version__,
            "source_hash": libkda.source_hash(), "command": " ".join(sys.argv), "unit": "s", **b.record,
        }  # fmt: skip
        o.json.write_text(json.dumps(facts, indent=1))
    failed = b.most(float(len(b.record["failures"])))
    dist.destroy_process_group()
    return 1 if failed else 0


sys.exit(main())

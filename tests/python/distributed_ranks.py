"""What the ranks of test_distributed.py do, in processes of their own."""

import dataclasses
import os
import pathlib
import signal

import torch
import torch.distributed as dist

import libkda
import libkda.distributed as kd
import libkda.torch as kt

SPEC = libkda.LayerSpec(48, 2, 16, 24, 16, num_value_heads=4, output_gate_rank=8)
TIMEOUT = 300.0  # far beyond what any step takes: a test that waits for it has failed
SLOTS = 9


def layer(heads=None, dtype=torch.float32, bias=False):
    """The same weights on every rank. bias: of the short convolution."""
    spec = dataclasses.replace(SPEC, conv_bias=bias)
    g = torch.Generator().manual_seed(5)

    def normal(*shape, scale=1.0):
        return torch.randn(shape, generator=g) * scale

    s, hv = SPEC, SPEC.num_value_heads
    rows = {"q": s.num_heads * s.key_dim, "k": s.num_heads * s.key_dim, "v": hv * s.value_dim}
    tensors = {f"{n}_proj.weight": normal(size, s.hidden, scale=s.hidden**-0.5) for n, size in rows.items()}
    tensors |= {f"{n}_conv1d.weight": normal(size, 1, s.conv_width, scale=0.5) for n, size in rows.items()}
    tensors |= {
        "b_proj.weight": normal(hv, s.hidden, scale=s.hidden**-0.5),
        "f_a_proj.weight": normal(s.gate_rank, s.hidden, scale=s.hidden**-0.5),
        "f_b_proj.weight": normal(hv * s.key_dim, s.gate_rank, scale=0.25),
        "g_a_proj.weight": normal(s.output_gate_rank, s.hidden, scale=s.hidden**-0.5),
        "g_b_proj.weight": normal(hv * s.value_dim, s.output_gate_rank, scale=0.3),
        "o_proj.weight": normal(s.hidden, hv * s.value_dim, scale=0.1),
        "o_norm.weight": 1 + normal(s.value_dim, scale=0.1),
        "A_log": normal(hv, scale=0.5),
        "dt_bias": normal(hv * s.key_dim) - 3,
    }
    if bias:
        tensors |= {f"{n}_conv1d.bias": normal(size, scale=0.5) for n, size in rows.items()}
    mine = kt.KDALayer(spec, heads=heads, dtype=dtype)
    mine.load_parameters(tensors)
    return mine


def batch(case, dtype=torch.float32):
    """Hidden rows, pools, slots and flags of a case."""
    lengths = case["lengths"]
    g = torch.Generator().manual_seed(len(lengths))
    x = torch.randn(sum(lengths), SPEC.hidden, generator=g).to(dtype)
    states = layer(dtype=dtype).new_state(SLOTS, dtype=case.get("pool", torch.float32))
    states.state.copy_(torch.randn(states.state.shape, generator=g))
    states.conv.copy_(torch.randn(states.conv.shape, generator=g))
    n = len(lengths)
    slots = torch.tensor(case.get("slots", list(range(n + 1, 1, -1))[:n]), dtype=torch.int32)
    flags = torch.tensor(case.get("flags", [i % 2 == 0 for i in range(n)]), dtype=torch.bool)
    return x, states, slots, flags


def context_parallel(rank, ranks, cases):
    """By case: this rank's output rows, state and conv pool."""
    cp = kd.ContextParallel(timeout=TIMEOUT)
    found = []
    for case in cases:
        dtype = case.get("dtype", torch.float32)
        x, states, slots, flags = batch(case, dtype)
        shards = kd.Shards(case["lengths"], case["rows"])
        layout = cp.layout(shards, "cpu", replicate=case.get("replicate", True), segments=case.get("segments"))
        out = cp.layer(layer(dtype=dtype, bias=case.get("bias", False)), x[shards.slice(rank)], states, layout, slots, flags)
        cp.peers.finish()
        found.append((out, states.state, states.conv))
    return found


def ledger(rank, ranks, cases):
    """F64's prompts through the operators: token t writes 0.5 into column t of the state and leaves t in the window."""
    cp = kd.ContextParallel(timeout=TIMEOUT)
    found = []
    for lengths, rows in cases:
        shards = kd.Shards(lengths, rows)
        layout = cp.layout(shards, "cpu")
        tokens = torch.cat([torch.arange(n) for n in lengths])[shards.slice(rank)]
        keys, n = 16, len(lengths)
        k = torch.nn.functional.one_hot(tokens, keys).float()[:, None]
        v = torch.full((len(tokens), 1, 1), 1.0)
        gate, beta = torch.full((len(tokens), 1, keys), -1e-6), torch.full((len(tokens), 1), 0.5)
        state, slots = torch.zeros(n + 1, 1, 1, keys), torch.arange(n, dtype=torch.int32)
        state[:, :, :, -1] = 2  # S0, in a column that no token touches
        flags = torch.ones(n, dtype=torch.bool)
        form = {"gate_family": "plain", "beta_is_logits": False, "qk_norm": False}
        cp.prefill(k, k, v, gate, beta, state=state, layout=layout, slots=slots, has_initial_state=flags, **form)
        window = torch.zeros(n + 1, 3, 1)
        x = (tokens + 1).float()[:, None]
        cp.conv_prefill([x], [torch.ones(1, 4)], [window], layout=layout, slots=slots, has_initial_state=flags)
        found.append((state, window))
    return found


def tensor_parallel(rank, ranks, _):
    """A prompt and a decode step with uneven shares; with more ranks than heads, some hold none."""
    tp = kd.TensorParallel(timeout=TIMEOUT)
    x, *_ = batch({"lengths": [20]})
    mine = layer(tp.heads(SPEC.num_heads))
    states, slot = mine.new_state(3), torch.tensor([1], dtype=torch.int32)
    first = tp.add(mine.prefill(x[:19], states, torch.tensor([0, 19], dtype=torch.int32), slot))
    one = torch.zeros(1, dtype=torch.int32)
    step = kt.Step(decode=kt.Group(one, one + 1, slot))
    return first, tp(mine, x[19:], states, step)


def _expect_peer_error(body):
    try:
        for _ in range(100):
            body()
    except kd.PeerError as error:
        try:
            body()
        except kd.PeerError:
            return str(error)
    return "no error"


def exception(rank, ranks, where):
    """Rank 1 fails in its third step, inside the layer or between layers; the others must raise."""
    cp = kd.ContextParallel(timeout=TIMEOUT)
    case = {"lengths": [12 * ranks], "rows": [12] * ranks}
    mine, (x, states, slots, flags) = layer(), batch(case)
    shards = kd.Shards(case["lengths"], case["rows"])
    layout, steps = cp.layout(shards, "cpu"), 0

    def body():
        nonlocal steps
        steps += 1
        rows = x[shards.slice(rank)]
        if rank == 1 and steps == 3:
            if where == "layer":
                rows = rows[:, :-1]  # a shape that its projection refuses
            else:
                with cp.peers.telling():
                    raise ValueError("no such token")
        cp.layer(mine, rows, states, layout, slots, flags)

    if rank == 1:
        try:
            for _ in range(100):
                body()
        except kd.PeerError:
            return "PeerError"
        except (RuntimeError, ValueError) as error:
            return f"own: {error}"
    return _expect_peer_error(body)


def killed(rank, ranks, _):
    """Rank 1 is killed after its second step."""
    cp = kd.ContextParallel(timeout=TIMEOUT)
    case = {"lengths": [12 * ranks], "rows": [12] * ranks}
    mine, (x, states, slots, flags) = layer(), batch(case)
    shards = kd.Shards(case["lengths"], case["rows"])
    layout, steps = cp.layout(shards, "cpu"), 0

    def body():
        nonlocal steps
        steps += 1
        if rank == 1 and steps == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        cp.layer(mine, x[shards.slice(rank)], states, layout, slots, flags)

    return _expect_peer_error(body)


def silent(rank, ranks, timeout):
    """Rank 1 does not come; the others wait no longer than the timeout."""
    if rank == 1:
        store = dist.distributed_c10d._get_default_store()
        for r in range(ranks):
            if r != 1:
                store.wait([f"over/{r}"])
        return "silent"
    cp = kd.ContextParallel(timeout=timeout)
    message = _expect_peer_error(lambda: cp.peers.gather(torch.zeros(4)).wait())
    dist.distributed_c10d._get_default_store().set(f"over/{rank}", "1")
    return message


def main(name, rank, ranks, folder, argument):
    torch.set_num_threads(1)
    folder = pathlib.Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = globals()[name](rank, ranks, argument)
    torch.save(result, folder / f"{rank}.part")
    (folder / f"{rank}.part").rename(folder / f"{rank}.pt")
    # Without goodbyes: after a failure a group that is taken down in order would wait for those who are gone.
    os._exit(0)

"""Prefill and layers over several ranks with torch.distributed: gloo on the CPU, NCCL on CUDA. docs/distributed.md."""

from libkda.distributed.context_parallel import ContextParallel, Layout
from libkda.distributed.peers import PeerError, Peers, Pending
from libkda.distributed.shards import Piece, Shards
from libkda.distributed.tensor_parallel import TensorParallel, share_heads

__all__ = [
    "ContextParallel",
    "Layout",
    "PeerError",
    "Peers",
    "Pending",
    "Piece",
    "Shards",
    "TensorParallel",
    "share_heads",
]

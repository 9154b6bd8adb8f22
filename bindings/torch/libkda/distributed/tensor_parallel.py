"""Tensor-parallel layers: heads over ranks, partial outputs added (spec L-6, with uneven shares too)."""

from __future__ import annotations

from typing import Any

import torch

import libkda
from libkda.distributed.peers import Peers, Pending
from libkda.torch.layer import KDALayer, LayerState
from libkda.torch.serving import Step

_Tensor = torch.Tensor


def share_heads(num_heads: int, ranks: int, rank: int) -> tuple[int, int]:
    """(first, count) of the query/key heads of a rank; the first num_heads mod ranks ranks hold one more."""
    if not 0 <= rank < ranks:
        raise libkda.InvalidArgument(f"rank: wanted 0 to {ranks - 1}, got {rank}")
    count, more = divmod(num_heads, ranks)
    return rank * count + min(rank, more), count + (rank < more)


class TensorParallel:
    """Layers whose heads are shared by the ranks of a group. Every rank calls the same methods in the same order, with the
    same rows. group, timeout, store: as in ``Peers``.

        tp = TensorParallel()
        layer = KDALayer.from_checkpoint(path, heads=tp.heads(32))
        y = tp(layer, x, states, step)
    """

    def __init__(self, group: Any = None, *, timeout: float = 60.0, store: Any = None, peers: Peers | None = None) -> None:
        self.peers = Peers(group, timeout=timeout, store=store) if peers is None else peers

    def heads(self, num_heads: int) -> tuple[int, int]:
        """This rank's share."""
        return share_heads(num_heads, self.peers.ranks, self.peers.rank)

    def __call__(self, layer: KDALayer, x: _Tensor, states: LayerState | None = None, step: Step | None = None) -> _Tensor:
        """The layer on a serving step (``KDALayer.forward``), summed over ranks: the same bits on all of them."""
        return self.start(layer, x, states, step).wait()

    def start(self, layer: KDALayer, x: _Tensor, states: LayerState | None = None, step: Step | None = None) -> Pending:
        """The same with the sum under way; ``wait()`` gives it."""
        with self.peers.telling():
            return self.peers.add(layer(x, states, step))

    def add(self, partial: _Tensor) -> _Tensor:
        """The sum over ranks of partial outputs, in place (of ``KDALayer.prefill``, ``decode``, ``ContextParallel.layer``)."""
        return self.peers.add(partial).wait()

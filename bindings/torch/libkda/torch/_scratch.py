"""Scratch memory of the operators from somewhere else than PyTorch's allocator, for frameworks that plan their memory."""

from __future__ import annotations

from types import TracebackType

import torch

from libkda.torch._load import OPERATORS


class scratch:
    """``with libkda.torch.scratch(memory):`` operators of this thread take their scratch from ``memory`` (uint8, dense, on
    their device; unless aligned to 256 bytes, up to 255 are lost) and not from PyTorch's allocator; one run at a time uses
    it. An operator that needs more raises ``libkda.Error`` ("WORKSPACE_TOO_SMALL") and has written nothing. Does not nest;
    None lends nothing."""

    def __init__(self, memory: torch.Tensor | None) -> None:
        if memory is not None and (memory.dtype != torch.uint8 or not memory.is_contiguous()):
            raise ValueError(f"memory: wanted dense uint8, got {memory.dtype} with strides {memory.stride()}")
        self._memory = memory

    def __enter__(self) -> None:
        if self._memory is not None:
            OPERATORS.libkda_torch_lend(self._memory.data_ptr(), self._memory.numel())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        OPERATORS.libkda_torch_lend(None, 0)


class measure:
    """``with libkda.torch.measure() as need:`` operators of this thread check nothing and write nothing, but make and keep the
    plans of their calls; afterwards ``need.bytes`` is the largest scratch that one of them takes. What is to run in a captured
    graph or must not make plans while serving is called here first, with the same arguments."""

    bytes = 0

    def __enter__(self) -> measure:
        OPERATORS.libkda_torch_measure(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bytes = OPERATORS.libkda_torch_measure(0)

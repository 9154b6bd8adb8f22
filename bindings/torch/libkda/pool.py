"""The paged pool of recurrent states and conv windows (kda/state_pool.h)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

from libkda import _abi
from libkda._library import check, library
from libkda._structs import fill
from libkda.context import Context
from libkda.tensors import Tensor


class StatePool:
    """Pages that each hold, for every layer, a state [HV,V,K] and a conv window; a page number is a slot of all of them.

    Description: num_layers, num_value_heads, key_dim, value_dim, state_dtype, conv_channels, conv_width, conv_columns,
    conv_dtype, conv_layout, pages, null_slot. Not thread-safe, views excepted. Pages are never cleared.
    """

    def __init__(self, context: Context, **description: Any) -> None:
        desc = _abi.kda_state_pool_desc()
        library().kda_state_pool_desc_init(ctypes.byref(desc))
        fill(desc, description)
        handle = ctypes.c_void_p()
        check(library().kda_state_pool_create(context.handle, ctypes.byref(desc), ctypes.byref(handle)))
        self.handle = handle
        self.context = context
        self._finalizer = weakref.finalize(self, library().kda_state_pool_destroy, handle)

    def _view(self, function: str, layer: int) -> Tensor:
        tensor = _abi.kda_tensor()
        check(getattr(library(), function)(self.handle, layer, ctypes.byref(tensor)))
        return Tensor(tensor, self)

    def state(self, layer: int) -> Tensor:
        """[pages,HV,V,K] of one layer; stride(0) is the page. NotFound past the last layer."""
        return self._view("kda_state_pool_state", layer)

    def conv(self, layer: int) -> Tensor:
        """[pages,L,channels] or [pages,channels,L] of one layer. NotFound if the pages hold no window."""
        return self._view("kda_state_pool_conv", layer)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages, or raises OutOfMemory and takes none."""
        pages = (ctypes.c_int64 * max(1, count))()
        check(library().kda_state_pool_allocate(self.handle, count, pages))
        return list(pages[:count])

    def free(self, pages: Sequence[int]) -> None:
        """Gives pages back; InvalidArgument, and nothing is freed, if one is not allocated or named twice."""
        check(library().kda_state_pool_free(self.handle, len(pages), (ctypes.c_int64 * max(1, len(pages)))(*pages)))

    @property
    def available(self) -> int:
        """Pages that allocate could still give."""
        return library().kda_state_pool_available(self.handle)

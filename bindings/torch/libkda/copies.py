"""Copy sets: the state copies of all layers of one worker, prepared, sealed and published together (kda/state_copy.h)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from libkda import _abi
from libkda._library import check, library
from libkda._structs import fill
from libkda.context import Context


class CopySet:
    """EMPTY -> prepare -> seal -> publish -> PUBLISHED; reset goes back. Publishing makes every layer ready or none.

    ``layers``: names that must all be prepared before seal. ``binding_version``: what the set is used with, e.g.
    "torch 2.11.0"; part of the snapshot that seal compares. ``checked``: report bad indices instead of ignoring them.
    """

    def __init__(
        self, context: Context, layers: Sequence[str] = (), *, checked: bool = False, binding_version: str | None = None
    ) -> None:
        names = (ctypes.c_char_p * max(1, len(layers)))(*(name.encode() for name in layers))
        options = _abi.kda_copy_set_options(
            struct_size=ctypes.sizeof(_abi.kda_copy_set_options),
            layers=names,
            num_layers=len(layers),
            flags=_abi.KDA_PLAN_CHECKED if checked else 0,
            binding_version=binding_version and binding_version.encode(),
        )
        handle = ctypes.c_void_p()
        check(library().kda_copy_set_create(context.handle, ctypes.byref(options), ctypes.byref(handle)))
        self.handle = handle
        self.context = context
        self._finalizer = weakref.finalize(self, library().kda_copy_set_destroy, handle)

    def prepare(
        self, pools: Mapping[str, Any], max_selected: int, *, backend: str | None = None, packed_dtype: Any = None
    ) -> None:
        """Prepares layers: name -> pool [slots,HV,V,K] (any tensor with __dlpack__), for calls of up to max_selected rows.
        The pools are neither read nor written. PreconditionFailed for a layer prepared before or a set past preparing."""
        bindings = (_abi.kda_copy_binding * max(1, len(pools)))()
        keep = []
        for binding, (name, pool) in zip(bindings, pools.items(), strict=False):
            values = {"layer": name, "pool": pool, "backend": backend, "packed_dtype": packed_dtype}
            binding.struct_size = ctypes.sizeof(_abi.kda_copy_binding)
            keep += fill(binding, values)[1]
        check(library().kda_copy_set_prepare(self.handle, bindings, len(pools), max_selected))

    def seal(self) -> None:
        """After the last prepare. PreconditionFailed if a layer is missing or the configuration has changed since."""
        check(library().kda_copy_set_seal(self.handle))

    def publish(self) -> None:
        """Makes all layers ready in one atomic step."""
        check(library().kda_copy_set_publish(self.handle))

    def reset(self) -> None:
        """Back to EMPTY. No call may be in flight."""
        check(library().kda_copy_set_reset(self.handle))

    @property
    def state(self) -> str:
        """ "empty", "preparing", "sealed", "published" or "failed"."""
        number = library().kda_copy_set_get_state(self.handle)
        names = _abi.ENUMS["kda_copy_set_state"]
        return next(n for n, v in names.items() if v == number).removeprefix("KDA_COPY_SET_").lower()

    @property
    def ready(self) -> int:
        """Layers that serve now: none, or all of them."""
        return library().kda_copy_set_ready(self.handle)

    @property
    def last_error(self) -> str:
        """First cause of a failure, with the layer's name; "" unless failed."""
        return library().kda_copy_set_last_error(self.handle).decode()

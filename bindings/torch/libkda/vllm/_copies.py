"""vLLM's own prefill with libkda's state copies (option state_copy, default off).

`gather_initial_states` of the three layers' modules and `scatter_states` of GLM's become torch.ops.libkda.state_gather and
state_scatter, resolved by layer name; the copies of all layers are prepared, sealed and published together once vLLM has given
each layer its page. Kimi-K3 and Kimi-Linear write their final states inline, which no hook reaches.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn as kimi_linear
import vllm.models.glm5next.common.kda as glm
import vllm.models.kimi_k3.nvidia.kda as kimi_k3

import libkda
from libkda import _stats
from libkda import torch as kt

_WRAPPED: tuple[tuple[ModuleType, str], ...] = (
    (kimi_linear, "gather_initial_states"),
    (kimi_k3, "gather_initial_states"),
    (glm, "gather_initial_states"),
    (glm, "scatter_states"),
)
_originals: dict[tuple[ModuleType, str], Any] = {}
_layer = threading.local()  # .name: the layer whose vLLM path runs on this thread
_lock = threading.Lock()
_expected: set[str] = set()
_pools: dict[str, torch.Tensor] = {}
_published: libkda.CopySet | None = None


class _Copy:
    """vLLM's function, but libkda's operator inside a layer that asked for it. Its attributes are the function's."""

    def __init__(self, original: Callable[..., Any], copy: Callable[..., Any]) -> None:
        self._original, self._copy = original, copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = getattr(_layer, "name", None)
        if name is None:
            return self._original(*args, **kwargs)
        _stats.served("vllm", self._copy.__name__)
        return self._copy(*args, **kwargs, layer=name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _gather(state: torch.Tensor, indices: torch.Tensor, has_initial_state: torch.Tensor, *, layer: str) -> torch.Tensor:
    return kt.state_gather(state, indices, has_initial_state, layer)


def _scatter(state: torch.Tensor, src: torch.Tensor, indices: torch.Tensor, *, layer: str) -> None:
    kt.state_scatter(state, indices, src, layer)


def expect(layer: str) -> None:
    """A layer that will have a page: the copies are published with the last one's. Wraps vLLM's functions once."""
    _expected.add(layer)
    for module, name in _WRAPPED:
        if (module, name) not in _originals:
            original = _originals[module, name] = getattr(module, name)
            setattr(module, name, _Copy(original, _gather if name.startswith("gather") else _scatter))


def unwrap() -> None:
    """Puts vLLM's functions back and forgets all pages."""
    global _published
    for (module, name), original in _originals.items():
        setattr(module, name, original)
    _originals.clear()
    _expected.clear()
    _pools.clear()
    _published = None


def bound(layer: str, state: torch.Tensor, max_selected: int) -> None:
    """A layer's page is there (again, after vLLM slept). With the last one: prepare, seal and publish, all layers or none."""
    global _published
    with _lock:
        if _published is not None:
            _published, _ = None, _pools.clear()
        _pools[layer] = state
        if not _expected <= _pools.keys():
            return
        copies = libkda.CopySet(libkda.Context(str(state.device)), sorted(_pools), binding_version=f"torch {torch.__version__}")
        copies.prepare(_pools, max_selected)
        copies.seal()
        copies.publish()
        _published = copies


@contextlib.contextmanager
def active(layer: str | None) -> Iterator[None]:
    """vLLM's path of a layer inside: its copies are libkda's, if they are published."""
    if layer is None or _published is None:
        yield
        return
    _layer.name = layer
    try:
        with kt.serving(_published):
            yield
    finally:
        _layer.name = None

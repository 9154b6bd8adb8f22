"""transformers' KDA models (kimi_linear, glm5_next, bailing_hybrid) on libkda: ``libkda.transformers.enable()``.

Where FLA is installed, transformers calls FLA's functions and libkda answers as FLA's backend (``libkda.fla``). Where a
modelling module has fallen back to its PyTorch reference, its two functions are replaced (they are looked up at each call);
``disable()`` puts the originals back. In inference only: calls that need gradients go to the original. Copied: tensors whose
last dimension is not dense (transformers' convolution leaves such q, k and v) and the K-first states.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from libkda import _guard, _stats
from libkda._interop import numeric_form, run, tokens_reason, training

MODELS = ("kimi_linear", "glm5_next", "bailing_hybrid")
FUNCTIONS = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
TESTED = ((5, 20, 0), (5, 25, 0))  # from, below
_RELIED_ON = ("query", "key", "value", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
_originals: dict[tuple[ModuleType, str], Callable[..., Any]] = {}


def _fell_back(function: Callable[..., Any]) -> bool | None:
    """Whether transformers' decorator found no package for a function; None if it does not say."""
    layer: Any = function
    while layer is not None:
        code = getattr(layer, "__code__", None)
        if code is not None and "is_new_implementation" in code.co_freevars:
            return not layer.__closure__[code.co_freevars.index("is_new_implementation")].cell_contents
        layer = getattr(layer, "__wrapped__", None)
    return None


def _replacement(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    recurrent = name.startswith("recurrent")

    @functools.wraps(original)
    def call(query: Any, key: Any, value: Any, g: Any, beta: Any, **o: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        first = o.get("initial_state")
        reason = "gradients" if training(query, key, value, g, beta, first) else None
        reason = reason or tokens_reason(query, key, value, g, beta, o.get("cu_seqlens"))
        if reason is not None:
            _stats.declined("transformers", name, reason)
            return original(query, key, value, g=g, beta=beta, **o)
        gate, beta, numbers = numeric_form(query, g, beta, A_log=None, dt_bias=None, raw_gate=False, raw_beta=False, o=o)
        _stats.served("transformers", name)
        first = None if first is None else first.float()
        want = bool(o.get("output_final_state"))
        return run(query, key, value, gate, beta, numbers, first, want, False, o.get("cu_seqlens"), recurrent=recurrent)

    return call


def _modules() -> list[ModuleType]:
    found = []
    for model in MODELS:
        name = f"transformers.models.{model}.modeling_{model}"
        if importlib.util.find_spec(f"transformers.models.{model}") is not None:
            found.append(importlib.import_module(name))
    return found


def enable() -> list[str]:
    """Hooks every KDA model of the installed transformers and says in one INFO line what it did; idempotent. Returns the
    functions that were replaced (none where FLA serves them). ImportError without transformers; with a version that libkda does
    not know nothing is hooked, with one warning (RuntimeError under LIBKDA_STRICT=1)."""
    importlib.import_module("transformers")
    version = _guard.version_of("transformers")
    problems = []
    if not TESTED[0] <= version < TESTED[1]:
        problems.append(f"transformers {'.'.join(map(str, version))}, tested from 5.20 to below 5.25")
    modules = _modules() if not problems else []
    functions = [(m, n, _originals.get((m, n)) or getattr(m, n, None)) for m in modules for n in FUNCTIONS]
    for module, name, function in functions:
        if function is None or _fell_back(function) is None:
            problems.append(f"{module.__name__} has no {name} as libkda knows it")
        else:
            problems += _guard.missing_parameters(function, _RELIED_ON)
    if _guard.refuse("libkda.transformers", problems):
        return []
    through_fla = any(not _fell_back(function) for _, _, function in functions)
    if through_fla:
        importlib.import_module("libkda.fla")
    for module, name, function in functions:
        if _fell_back(function) and (module, name) not in _originals:
            _originals[module, name] = function
            setattr(module, name, _replacement(function, name))
    replaced = [f"{module.__name__.rsplit('.', 1)[-1]}.{name}" for module, name in _originals]
    how = "through FLA's dispatch" if through_fla else f"replaced {', '.join(replaced) or 'nothing'}"
    _stats.logger.info("libkda.transformers: transformers %s, %s", ".".join(map(str, version)), how)
    return replaced


def disable() -> None:
    """Puts the original functions back. FLA's backend stays (``FLA_LIBKDA=0`` switches it off)."""
    for (module, name), function in _originals.items():
        setattr(module, name, function)
    _originals.clear()

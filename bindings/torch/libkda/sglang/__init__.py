"""SGLang on libkda: a kernel backend of its KDA layers, by name.

SGLang finds ``register`` by its entry point (group ``sglang.srt.plugins``; ``SGLANG_PLUGINS`` is its allow-list). It adds the
name ``libkda`` to the choices of ``--linear-attn-backend`` (decode and prefill), ``--linear-attn-decode-backend``,
``--linear-attn-prefill-backend`` and ``--linear-attn-verify-backend``; without one of them nothing changes, and that is the way
back. A call that libkda does not serve (trees, ReplaySSM rings, extends that must be rolled back) goes to SGLang's Triton
kernel; ``libkda.stats()`` says which and why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from libkda import _guard, _stats

NAME = "libkda"
TESTED = ((0, 5, 23), (0, 6, 0))  # from, below
DISPATCHER = "sglang.srt.layers.attention.linear.kda_backend.KDAKernelDispatcher.__init__"
_PHASES = {"decode_backend": "decode_kernel", "prefill_backend": "extend_kernel", "verify_backend": "verify_kernel"}


def _ours() -> bool:
    """Whether a custom name of the running server is ours; without a server's configuration it is."""
    try:
        from sglang.srt.runtime_context import get_exec

        mamba = get_exec().mamba
        names = [getattr(mamba, f"linear_attn_{phase}backend") for phase in ("", "decode_", "prefill_", "verify_")]
    except Exception:  # no server in this process
        return True
    return NAME in names


def _around(original: Callable[..., None], dispatcher: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's dispatcher refuses the names it does not know: it is built with Triton in their place, then gets our kernel."""
    bound = inspect.signature(original).bind(dispatcher, *args, **kwargs)
    chosen = {name: bound.arguments[name] for name in _PHASES if bound.arguments[name].is_custom()}
    if not chosen or not _ours():
        original(dispatcher, *args, **kwargs)
        return
    for name, backend in chosen.items():
        bound.arguments[name] = type(backend)("triton")
    original(*bound.args, **bound.kwargs)
    from libkda.sglang._kernel import LibKDAKernel

    kernel = LibKDAKernel(dispatcher.triton_kernel)
    for name, backend in chosen.items():
        setattr(dispatcher, _PHASES[name], kernel)
        if hasattr(dispatcher, name):
            setattr(dispatcher, name, backend)
    if "decode_backend" in chosen:
        dispatcher.supports_packed_decode = dispatcher.supports_packed_decode_safe_gate = True
    _stats.logger.info("libkda.sglang: %s on libkda", ", ".join(_PHASES[name].split("_")[0] for name in chosen))


def _problems() -> list[str]:
    version = _guard.version_of("sglang")
    if not TESTED[0] <= version < TESTED[1]:
        return [f"sglang {'.'.join(map(str, version))}, tested from 0.5.23 to below 0.6.0"]
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.layers.attention.linear.kda_backend import KDAKernelDispatcher
        from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except (ImportError, AttributeError) as error:
        return [str(error)]
    found = _guard.missing_parameters(KDAKernelDispatcher.__init__, _PHASES)
    found += _guard.missing_parameters(HookRegistry.register, ("target", "hook", "hook_type"))
    found += _guard.missing_parameters(LinearAttnKernelBase.extend, ("ssm_states", "cache_indices", "query_start_loc"))
    for owner, name in ((choices, "add_linear_attn_kernel_backend_choices"), (HookType, "AROUND")):
        if not hasattr(owner, name):
            found.append(f"{owner.__name__} has no {name}")
    return found


_registered = False


def register() -> None:
    """SGLang's entry point: adds the name and the hook; idempotent. In an SGLang that libkda does not know nothing is hooked,
    with one warning (RuntimeError under LIBKDA_STRICT=1)."""
    global _registered
    if _registered or _guard.refuse("libkda.sglang", _problems()):
        return
    from sglang.srt.arg_groups.choices import add_linear_attn_kernel_backend_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_linear_attn_kernel_backend_choices([NAME])
    HookRegistry.register(DISPATCHER, _around, HookType.AROUND)
    _registered = True
    _stats.logger.info("libkda.sglang: sglang %s, backend name %r", ".".join(map(str, _guard.version_of("sglang"))), NAME)

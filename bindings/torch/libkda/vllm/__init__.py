"""vLLM on libkda: Kimi-K3, Kimi-Linear and GLM-5.3-Flash layers whose mixer is libkda's.

Nothing to type: vLLM finds ``register`` by its entry point (group ``vllm.general_plugins``) in each of its processes and makes
libkda's layer classes in place of its own; ``VLLM_PLUGINS`` is its allow-list. Options: ``additional_config["libkda"]`` (see
``Options``) or the environment variable LIBKDA_VLLM with the same JSON. Back: ``LIBKDA_VLLM=off``, or per phase an explicit
value of vLLM's own keys (``kda_prefill_backend=triton``, ...). What is served and what is not, and why: ``libkda.stats()``.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from libkda import _guard
from libkda.vllm import _log
from libkda.vllm._options import Options, switched_off

TESTED = ((0, 33, 0), (0, 34, 0))  # from, below
_FORWARD = {
    "KimiK3DeltaAttention": ["self", "mixed_qkv", "g1", "g2", "beta", "core_attn_out"],
    "KimiGatedDeltaNetAttention": ["self", "mixed_qkv", "g1", "g2", "beta", "core_attn_out"],
    "Glm5NextLinearAttention": ["self", "qkv_proj_states", "g1", "beta", "core_attn_out"],
}
_BUILD = ["common_attn_metadata", "num_accepted_tokens", "num_decode_draft_tokens_cpu", "fast_build"]
_FIELDS = [
    "num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens", "num_spec_decodes", "num_actual_tokens",
    "checkpoint", "has_initial_state", "spec_query_start_loc", "non_spec_query_start_loc", "spec_state_indices_tensor",
    "non_spec_state_indices_tensor", "num_accepted_tokens",
]  # fmt: skip

__all__ = ["Options", "register"]


def _classes() -> dict[str, type[Any]]:
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
    from vllm.models.glm5next.common.kda import Glm5NextLinearAttention
    from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention

    return {c.__name__: c for c in (KimiK3DeltaAttention, KimiGatedDeltaNetAttention, Glm5NextLinearAttention)}


def _problems() -> list[str]:
    """What of vLLM is not as libkda knows it."""
    version = _guard.version_of("vllm")
    if not TESTED[0] <= version < TESTED[1]:
        return [f"vllm {'.'.join(map(str, version))}, tested from 0.33.0 to below 0.34.0"]
    try:
        from vllm.compilation.breakable_cudagraph import eager_break_during_capture  # noqa: F401
        from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot  # noqa: F401
        from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadata, KimiK3KDAMetadataBuilder
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata, GDNAttentionMetadataBuilder
        from vllm.v1.kv_cache_interface import MambaSpec
        from vllm.v1.worker.workspace import WorkspaceManager

        classes = _classes()
    except (ImportError, AttributeError) as error:
        return [str(error)]
    found = []
    for name, wanted in _FORWARD.items():
        c = classes[name]
        have = list(inspect.signature(inspect.unwrap(c._forward)).parameters)
        if have != wanted:
            found.append(f"{name}._forward has the parameters {', '.join(have)}")
        found += _guard.missing_parameters(c.__init__, ("config", "vllm_config", "prefix"))
        found += [f"{name} has no {a}" for a in ("get_attn_backend", "get_kv_cache_spec", "bind_kv_cache") if not hasattr(c, a)]
        if not issubclass(c, PluggableLayer):
            found.append(f"{name} is no PluggableLayer")
    for builder in (GDNAttentionMetadataBuilder, KimiK3KDAMetadataBuilder):
        found += _guard.missing_parameters(builder.build, _BUILD)
    found += _guard.missing_parameters(
        GDNAttentionMetadataBuilder._build_chunk_metadata, ("prefill_query_start_loc", "prefill_query_start_loc_cpu", "device")
    )
    found += _guard.missing_parameters(GDNAttentionMetadataBuilder.update_block_table, ("metadata", "blk_table"))
    found += _guard.missing_parameters(PluggableLayer.register_oot, ("name",))
    for kind in (GDNAttentionMetadata, KimiK3KDAMetadata, MambaSpec):
        wanted = ["num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"] if kind is MambaSpec else _FIELDS
        have = {f.name for f in dataclasses.fields(kind)}
        found += [f"{kind.__name__} has no field {name!r}" for name in wanted if name not in have]
    if not hasattr(WorkspaceManager, "get_simultaneous"):
        found.append("WorkspaceManager has no get_simultaneous")
    return found


def register() -> None:
    """vLLM's entry point: registers the three layers out of tree; idempotent, makes no CUDA context. Hooks nothing on other
    platforms than CUDA (and vLLM's CPU, for tests), with LIBKDA_VLLM=off, or, with one warning, in a vLLM that libkda does not
    know (RuntimeError under LIBKDA_STRICT=1). A layer that another plug-in holds stays that plug-in's."""
    from vllm.platforms import current_platform

    _log.join()
    if switched_off():
        _log.announce("libkda.vllm: LIBKDA_VLLM=off, nothing was hooked")
        return
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        _log.announce(f"libkda.vllm: {type(current_platform).__name__}, nothing was hooked")
        return
    if _guard.refuse("libkda.vllm", _problems()):
        return
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    from libkda.vllm._layers import LAYERS

    hooked, left = [], []
    for name, layer in LAYERS.items():
        holder = op_registry_oot.get(name)
        if holder is None:
            PluggableLayer.register_oot(name=name)(layer)
            hooked.append(name)
        elif holder is not layer:
            left.append(f"{name} is {holder.__module__}.{holder.__qualname__}'s")
    if hooked or left:
        text = f"hooked {', '.join(hooked) or 'nothing'}" + "".join(f"; {reason}" for reason in left)
        _log.announce(f"libkda.vllm: vllm {'.'.join(map(str, _guard.version_of('vllm')))}, {text}")

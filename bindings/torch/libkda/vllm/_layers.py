"""The three KDA layers of vLLM with libkda as their mixer.

Each is a subclass that vLLM makes in place of its own class (its out-of-tree mechanism); projections, weight loading, state
shapes and dtypes, and everything before and after the mixer stay vLLM's. State and windows in the pages mean the same to both,
so that steps of the two may alternate.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import vllm.envs
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention
from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention

from libkda import _stats
from libkda.vllm import _copies, _log, _options
from libkda.vllm._metadata import LibKDAGDNBackend, LibKDAK3Backend, Step
from libkda.vllm._mixer import Inputs, Mixer, Parameters, Shape

_Tensor = torch.Tensor
CHECKPOINT_ALIGNMENT = 16  # tokens; libkda is exact at any, vLLM's scheduler wants one that all layers of a group share


class _Layer:
    """What the three have in common. `libkda` is None where the whole layer is vLLM's."""

    _backend: type[Any]
    _needs = (
        "local_num_heads",
        "head_dim",
        "conv_size",
        "num_spec",
        "A_log",
        "dt_bias",
        "o_norm",
        "conv1d",
        "gate_lower_bound",
    )
    prefix: str
    kv_cache: tuple[_Tensor, ...]

    # ---- set-up ----

    @torch.no_grad()
    def _start(self, vllm_config: Any, prefix: str) -> None:
        """After vLLM's constructor: reads the options, judges the phases, makes the plans."""
        _log.announce_pending()
        self.libkda: Mixer | None = None
        self._options = _options.read(vllm_config.additional_config)
        self._name = type(self).__mro__[2].__name__  # vLLM's class
        self._off: dict[str, str] = {}
        self._pools: tuple[tuple[_Tensor, ...] | None, list[_Tensor], _Tensor | None] = (None, [], None)
        if self._options.state_copy == "auto":
            _copies.expect(prefix)
        # A captured step may be padded beyond the scheduler's bounds.
        self._capture = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._max_sequences = max(vllm_config.scheduler_config.max_num_seqs, self._capture)
        layer_reason = self._why_not(vllm_config)
        self._phases = ("prefill", "decode", "spec") if getattr(self, "num_spec", 0) else ("prefill", "decode")
        named = self._options.prefill in ("portable", "fused")
        if layer_reason is not None:
            if self._options.strict or named:  # asked for by name
                raise RuntimeError(f"libkda.vllm: {self._name} {prefix}: {layer_reason}")
            self._off = dict.fromkeys(self._phases, layer_reason)
        else:
            self._off = _options.left_to_vllm(vllm_config.additional_config)
            for phase in self._phases:
                if getattr(self._options, phase) == "off":
                    self._off[phase] = f"{phase}=off"
        served = [phase for phase in self._phases if phase not in self._off]
        if served:
            self._keep_fp32()
            self._make(vllm_config, served)
        for phase in self._phases:
            if phase in self._off:
                _stats.declined("vllm", f"{self._name}.{phase}", self._off[phase])

    def _why_not(self, vllm_config: Any) -> str | None:
        missing = [name for name in self._needs if not hasattr(self, name)]
        if missing:  # part of the version guard: only a made layer shows them
            return f"vLLM's layer has no {', '.join(missing)}"
        cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
        bound = self._lower_bound()
        if cache.use_replayssm or cache.use_kda_recoverssm:
            return "RecoverSSM"
        if parallel.prefill_context_parallel_size > 1:
            return "prefill context parallelism"
        if self.conv_size != 4:
            return f"conv width {self.conv_size}"
        if bound is not None and not -5 <= bound < 0:
            return f"gate bound {bound}"
        return None

    def _make(self, vllm_config: Any, phases: list[str]) -> None:
        conv_dtype, state_dtype = self.get_state_dtype()[:2]
        shape = Shape(
            heads=self.local_num_heads, head_dim=self.head_dim, lower_bound=self._lower_bound(),
            dtype=vllm_config.model_config.dtype, state_dtype=state_dtype, conv_dtype=conv_dtype,
            conv_columns=self.conv_size - 1 + self.num_spec, width=1 + self.num_spec,
            layout="DS" if is_conv_state_dim_first() else "SD", norm_eps=self._norm_eps(),
            max_tokens=max(vllm_config.scheduler_config.max_num_batched_tokens, self._capture),
            max_sequences=self._max_sequences,
            batch_invariant=bool(vllm.envs.VLLM_BATCH_INVARIANT),
        )  # fmt: skip
        named = self._options.prefill if self._options.prefill != "auto" else None
        self.libkda = Mixer(shape, prefill_backend=named)
        inputs = self._blank(shape)
        for phase in phases:
            try:
                self.libkda.book([phase], inputs)
            except RuntimeError as error:  # libkda.Unsupported lists every unmet condition
                self._off[phase] = str(error)
                if self._options.strict or (phase == "prefill" and named is not None):
                    raise RuntimeError(f"libkda.vllm: {self._name} {self.prefix}: {error}") from None
        if len(self._off.keys() & set(self._phases)) == len(self._phases):
            self.libkda = None

    def _blank(self, s: Shape) -> Inputs:
        """Tensors as a step's are, of one token and two slots."""
        channels = s.heads * s.head_dim
        device = self.dt_bias.device
        like = dict(dtype=s.dtype, device=device)
        columns = (s.conv_columns, 3 * channels) if s.layout == "SD" else (3 * channels, s.conv_columns)
        conv = torch.empty((2, *columns), dtype=s.conv_dtype, device=device)
        state = torch.empty((2, s.heads, s.head_dim, s.head_dim), dtype=s.state_dtype, device=device)
        head = torch.empty((1, s.heads, s.head_dim), **like)
        return Inputs(
            self._tensors(), self._split(torch.empty((1, 3 * channels), **like), -1), torch.empty_like(head),
            torch.empty((1, s.heads), **like), None if s.norm_eps is None else torch.empty_like(head), head,
            self._split(conv, 2 if s.layout == "SD" else 1), state,
        )  # fmt: skip

    def _split(self, t: _Tensor, dim: int) -> list[_Tensor]:
        """Per conv part; one where q, k and v are merged."""
        return [t]

    def _lower_bound(self) -> float | None:
        return self.gate_lower_bound

    def _norm_eps(self) -> float | None:
        return self.o_norm.eps

    def _tensors(self) -> Parameters:
        return Parameters([self.conv1d.weight], self.A_log.view(-1), self.dt_bias, self.libkda_norm_weight)

    def _keep_fp32(self) -> None:
        """The norm's weight as the operators want it, at a place that stays; follows the weight whenever that is loaded."""
        weight = self.o_norm.weight
        self.register_buffer("libkda_norm_weight", weight.detach().float().clone(), persistent=False)
        load = getattr(weight, "weight_loader", default_weight_loader)

        def loader(param: _Tensor, loaded_weight: _Tensor, *args: Any, **kwargs: Any) -> None:
            load(param, loaded_weight, *args, **kwargs)
            self._refresh()

        weight.weight_loader = loader

    def _refresh(self) -> None:
        if self._norm_eps() is not None and not self.o_norm.weight.is_meta:
            self.libkda_norm_weight.copy_(self.o_norm.weight.detach())

    # ---- what vLLM asks ----

    def get_attn_backend(self) -> type[Any]:
        """libkda's metadata, or vLLM's where the layer is vLLM's."""
        return super().get_attn_backend() if self.libkda is None else self._backend  # type: ignore[misc]

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """With libkda's prefill: one checkpoint block, aligned to 16 tokens. Only where every step that has a prefill is
        libkda's, or vLLM's own kernel writes checkpoints too: one that is handed out and not written would be served."""
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        if self.libkda is None or "prefill" in self._off:
            return spec
        everything = not self._off.keys() & set(self._phases)
        offered = self._options.checkpoint and (everything or spec.num_prefill_checkpoint_blocks > 0)
        alignment = CHECKPOINT_ALIGNMENT if offered else None
        return dataclasses.replace(spec, num_prefill_checkpoint_blocks=int(offered), prefill_checkpoint_alignment=alignment)

    def bind_kv_cache(self, kv_cache: _Tensor) -> None:
        """vLLM's views of the page; the state's is given to the copies where they are asked for."""
        super().bind_kv_cache(kv_cache)  # type: ignore[misc]
        if self._options.state_copy == "auto":
            _copies.bound(self.prefix, self.kv_cache[1], self._max_sequences)

    # ---- a step ----

    def _serve(
        self, stock: Callable[..., None], x: _Tensor, g1: _Tensor, z: _Tensor | None, beta: _Tensor, out: _Tensor
    ) -> None:
        """The mixer's part of forward: libkda's, or `stock` for the whole step."""
        context = get_forward_context().attn_metadata
        metadata = None if context is None else context.get(self.prefix)
        mixer = self.libkda
        if metadata is None:  # vLLM finds out how much memory a step takes, or warms up
            if mixer is not None and out.shape[1] > 0:
                self._refresh()
                served = [phase for phase in self._phases if phase not in self._off]
                mixer.book(served, self._inputs(x, g1, z, beta, out, out.shape[1], bound=False))
            return
        step = getattr(metadata, "libkda", None)
        reason = self._declines(mixer, step)
        if reason is not None:
            for phase in self._phases:
                if step is None or getattr(step, phase) is not None:
                    _stats.declined("vllm", f"{self._name}.{phase}", reason)
            with _copies.active(self.prefix if self._options.state_copy == "auto" else None):
                stock()
            return
        mixer(self._inputs(x, g1, z, beta, out, metadata.num_actual_tokens), step)
        for phase in self._phases:
            if getattr(step, phase) is not None:
                _stats.served("vllm", f"{self._name}.{phase}")

    def _declines(self, mixer: Mixer | None, step: Step | None) -> str | None:
        if mixer is None:
            return next(iter(self._off.values()), "switched off")
        if step is None:
            return "metadata of another backend"
        for phase in self._phases:
            if phase in self._off and getattr(step, phase) is not None:
                return self._off[phase]
        return None

    def _inputs(
        self, x: _Tensor, g1: _Tensor, z: _Tensor | None, beta: _Tensor, out: _Tensor, tokens: int, bound: bool = True
    ) -> Inputs:
        if not bound:
            blank = self._blank(self.libkda.shape)
            conv, state = blank.conv, blank.state
        else:
            if self._pools[0] is not self.kv_cache:  # bound anew
                dim = 2 if self.libkda.shape.layout == "SD" else 1
                self._pools = (self.kv_cache, self._split(self.kv_cache[0], dim), self.kv_cache[1])
            _, conv, state = self._pools
        return Inputs(
            self._tensors(), self._split(x[:tokens], -1), g1[0, :tokens], beta[0, :tokens],
            None if z is None else z[:tokens], out[0, :tokens], conv, state,
        )  # fmt: skip


class LibKDAKimiK3DeltaAttention(_Layer, KimiK3DeltaAttention):
    """Kimi-K3's layer on libkda."""

    _backend = LibKDAK3Backend

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "", *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, prefix, *args, **kwargs)
        self._start(vllm_config, prefix)

    @eager_break_during_capture
    def _forward(self, mixed_qkv: _Tensor, g1: _Tensor, g2: _Tensor, beta: _Tensor, core_attn_out: _Tensor) -> None:
        def stock() -> None:
            super(LibKDAKimiK3DeltaAttention, self)._forward(mixed_qkv, g1, g2, beta, core_attn_out)

        self._serve(stock, mixed_qkv, g1, g2, beta, core_attn_out)


class LibKDAKimiGatedDeltaNetAttention(_Layer, KimiGatedDeltaNetAttention):
    """Kimi-Linear's layer on libkda."""

    _backend = LibKDAGDNBackend

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "") -> None:
        with _without_prefill_key(vllm_config) as refused:
            super().__init__(config, vllm_config, prefix)
        self._start(vllm_config, prefix)
        if refused is not None and self._options.strict:
            raise RuntimeError(f"libkda.vllm: {prefix}: {refused}")
        if refused is not None:
            _stats.logger.warning("libkda.vllm: %s", refused)

    @eager_break_during_capture
    def _forward(self, mixed_qkv: _Tensor, g1: _Tensor, g2: _Tensor, beta: _Tensor, core_attn_out: _Tensor) -> None:
        def stock() -> None:
            super(LibKDAKimiGatedDeltaNetAttention, self)._forward(mixed_qkv, g1, g2, beta, core_attn_out)

        self._serve(stock, mixed_qkv, g1, g2, beta, core_attn_out)


class LibKDAGlm5NextLinearAttention(_Layer, Glm5NextLinearAttention):
    """GLM's layer on libkda: three convolutions, the norm after the mixer."""

    _backend = LibKDAGDNBackend
    _needs = (*_Layer._needs[:6], "q_conv1d", "k_conv1d", "v_conv1d", "kda_lower_bound")

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(config, vllm_config, prefix)
        self._start(vllm_config, prefix)

    @eager_break_during_capture
    def _forward(self, qkv_proj_states: _Tensor, g1: _Tensor, beta: _Tensor, core_attn_out: _Tensor) -> None:
        def stock() -> None:
            super(LibKDAGlm5NextLinearAttention, self)._forward(qkv_proj_states, g1, beta, core_attn_out)

        self._serve(stock, qkv_proj_states, g1, None, beta, core_attn_out)

    def _split(self, t: _Tensor, dim: int) -> list[_Tensor]:
        return list(t.chunk(3, dim=dim))

    def _lower_bound(self) -> float | None:
        return self.kda_lower_bound

    def _norm_eps(self) -> float | None:
        return None

    def _keep_fp32(self) -> None:
        """Nothing: all that the mixer reads is fp32 already."""

    def _tensors(self) -> Parameters:
        conv = [self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]
        return Parameters(conv, self.A_log.view(-1), self.dt_bias, None)

    def _why_not(self, vllm_config: Any) -> str | None:
        return "no gate bound" if getattr(self, "kda_lower_bound", 0.0) is None else super()._why_not(vllm_config)


@contextlib.contextmanager
def _without_prefill_key(vllm_config: Any) -> Iterator[str | None]:
    """vLLM's Kimi-Linear layer asserts that kda_prefill_backend is Triton's; what else was asked for is refused here."""
    given, key = vllm_config.additional_config, "kda_prefill_backend"
    if not isinstance(given, dict) or given.get(key, "auto") in ("auto", "triton"):
        yield None
        return
    vllm_config.additional_config = {name: value for name, value in given.items() if name != key}
    try:
        yield f"{key}={given[key]}: vLLM's Kimi-Linear layer has Triton alone, which its prefill stays with"
    finally:
        vllm_config.additional_config = given


LAYERS: dict[str, type[Any]] = {
    "KimiK3DeltaAttention": LibKDAKimiK3DeltaAttention,
    "KimiGatedDeltaNetAttention": LibKDAKimiGatedDeltaNetAttention,
    "Glm5NextLinearAttention": LibKDAGlm5NextLinearAttention,
}

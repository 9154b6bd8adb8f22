"""FLA on libkda's kernels, CPU and CUDA: ``import libkda.fla`` registers a backend with FLA's own dispatch.

Served: chunk_kda, fused_recurrent_kda, causal_conv1d (forward and update) and the gated RMS norm, in inference. Everything
else (gradients, context parallelism, intermediate states, ...) is declined and answered by FLA, whose messages stay; see
``libkda.stats()``. Not copied: pools and states that are V-first and updated in place. Copied: tensors whose last dimension is
not dense, K-first states (there and back), the state that fused_recurrent_kda is to leave alone, plain gates and betas that are
not float32.

Back to FLA: ``FLA_LIBKDA=0`` in the environment (read at every call).
"""

from __future__ import annotations

from typing import Any

import fla.backends
import torch
from fla.modules.causal_conv1d import ops as _conv
from fla.modules.norm import fused_norm_gate as _norm
from fla.ops.kda import chunk as _chunk
from fla.ops.kda import fused_recurrent as _recurrent

from libkda import _guard, _stats
from libkda import torch as kt
from libkda._interop import FLOATS, dense, numeric_form, run, tokens_reason, training

TESTED = ((0, 6, 0), (0, 7, 0))  # from, below
_Tensor = torch.Tensor
_RELIED_ON = {
    _chunk.chunk_kda: ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first", "cp_context", "use_graph"),
    _recurrent.fused_recurrent_kda_fwd: ("A_log", "dt_bias", "inplace_final_state", "ssm_state_indices", "state_v_first"),
    _conv.causal_conv1d_fwd: ("x", "weight", "bias", "residual", "initial_state", "output_final_state", "cu_seqlens"),
    _conv.causal_conv1d_update: ("x", "cache", "residual", "weight", "bias", "activation"),
    _conv.causal_conv1d_update_states: ("x", "state_len", "initial_state", "cu_seqlens"),
    _norm.layer_norm_gated_fwd: ("x", "g", "weight", "bias", "activation", "eps", "residual", "is_rms_norm"),
}


class LibKDABackend(fla.backends.BaseBackend):
    """FLA's entry points on libkda; each has a verifier that looks at metadata alone."""

    backend_type = "libkda"
    env_var = "FLA_LIBKDA"
    priority = 1

    def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        """FLA's hook: whether libkda answers this call, else why not."""
        accepted, reason = super().verify(function_name, *args, **kwargs)
        if not accepted:
            _stats.declined("fla", function_name, reason or "refused")
        return accepted, reason

    def chunk_kda_verifier(self, q: Any, k: Any, v: Any, g: Any, beta: Any, **o: Any) -> tuple[bool, str | None]:
        """Declines what FLA would refuse, training, and what libkda does not do."""
        first, sequences = o.get("initial_state"), o.get("cu_seqlens")
        raw, bound = bool(o.get("use_gate_in_kernel")), o.get("lower_bound")
        n = q.shape[0] if sequences is None else sequences.shape[0] - 1
        unknown = set(o) - _CHUNK_KNOWN
        reason = (
            ("gradients" if training(q, k, v, g, beta, first, o.get("A_log"), o.get("dt_bias")) else None)
            or ("context parallelism" if o.get("cp_context") is not None else None)
            or ("intermediate states" if o.get("return_intermediate_states") else None)
            or ("use_graph on the CPU" if o.get("use_graph") and q.device.type == "cpu" else None)
            or (f"keywords {', '.join(sorted(unknown))}" if unknown else None)
            or tokens_reason(q, k, v, g, beta, sequences)
            or ("a wrong number of initial states" if first is not None and first.shape[0] != n else None)
            or ("an initial state that is not float32" if first is not None and first.dtype != torch.float32 else None)
            or ("chunk_size" if o.get("chunk_size", 64) not in (32, 64) else None)
            or ("two names of the state's layout" if o.get("state_v_first") and "transpose_state_layout" in o else None)
            or ("no A_log and no bound" if raw and o.get("A_log") is None and bound is None else None)
            or ("no bound with safe_gate" if raw and o.get("safe_gate") and bound is None else None)
            or (f"lower_bound {bound}" if raw and bound is not None and not -5 <= bound < 0 else None)
            or ("neg_eigval without sigmoid" if o.get("allow_neg_eigval") and not o.get("use_beta_sigmoid_in_kernel") else None)
        )
        return reason is None, reason

    def chunk_kda(self, q: Any, k: Any, v: Any, g: Any, beta: Any, **o: Any) -> tuple[_Tensor, _Tensor | None]:
        """FLA's chunk_kda: o [B,T,HV,V] of q's dtype and, with output_final_state, the final state fp32."""
        v_first = bool(o.get("transpose_state_layout", o.get("state_v_first")))
        g, beta, numbers = numeric_form(
            q, g, beta, A_log=o.get("A_log"), dt_bias=o.get("dt_bias"), raw_gate=bool(o.get("use_gate_in_kernel")),
            raw_beta=bool(o.get("use_beta_sigmoid_in_kernel")), o=o,
        )  # fmt: skip
        _stats.served("fla", "chunk_kda")
        return run(
            q, k, v, g, beta, numbers, o.get("initial_state"), bool(o.get("output_final_state")), v_first, o.get("cu_seqlens")
        )

    def fused_recurrent_kda_fwd_verifier(self, q: Any, k: Any, v: Any, g: Any, beta: Any, **o: Any) -> tuple[bool, str | None]:
        """Declines training, accepted counts, and states in place that are K-first or of several tokens with slots."""
        first, bound = o.get("initial_state"), o.get("lower_bound")
        raw = bool(o.get("use_gate_in_kernel"))
        reason = (
            ("gradients" if training(q, k, v, g, beta, first, o.get("A_log"), o.get("dt_bias")) else None)
            or ("accepted counts" if o.get("num_accepted_tokens") is not None else None)
            or tokens_reason(q, k, v, g, beta, o.get("cu_seqlens"))
            or (_in_place_reason(q, first, o) if o.get("inplace_final_state", True) else _fresh_reason(first, o))
            or ("no A_log and no bound" if raw and o.get("A_log") is None and bound is None else None)
            or (f"lower_bound {bound}" if raw and bound is not None and not bound < 0 else None)
        )
        return reason is None, reason

    def fused_recurrent_kda_fwd(self, q: Any, k: Any, v: Any, g: Any, beta: Any, **o: Any) -> tuple[_Tensor, _Tensor | None]:
        """FLA's fused_recurrent_kda_fwd as its public function calls it."""
        g, beta, numbers = numeric_form(
            q, g, beta, A_log=o.get("A_log"), dt_bias=o.get("dt_bias"), raw_gate=bool(o.get("use_gate_in_kernel")),
            raw_beta=bool(o.get("use_beta_sigmoid_in_kernel")), o=o,
        )  # fmt: skip
        _stats.served("fla", "fused_recurrent_kda_fwd")
        return run(
            q, k, v, g, beta, numbers, o.get("initial_state"), bool(o.get("output_final_state")), bool(o.get("state_v_first")),
            o.get("cu_seqlens"), recurrent=True, out=o.get("out"), in_place=bool(o.get("inplace_final_state", True)),
            slots=o.get("ssm_state_indices"),
        )  # fmt: skip

    def causal_conv1d_fwd_verifier(self, x: Any, weight: Any, bias: Any, residual: Any, **o: Any) -> tuple[bool, str | None]:
        """Declines residuals, odd activations, training and widths outside 2 to 8."""
        reason = _conv_reason(x, weight, bias, residual, o.get("activation"), o.get("initial_state"))
        return reason is None, reason

    def causal_conv1d_fwd(
        self, x: Any, weight: Any, bias: Any, residual: Any, initial_state: Any = None, output_final_state: bool = False,
        activation: str | None = None, cu_seqlens: Any = None, **_: Any,
    ) -> tuple[_Tensor, _Tensor | None]:  # fmt: skip
        """FLA's causal_conv1d_fwd: y of x's shape and, with output_final_state, the cache [N,D,W]."""
        flat = dense(x.flatten(2) if x.shape[-1] != weight.shape[0] else x)
        rows = flat if cu_seqlens is None else flat.squeeze(0)
        n = flat.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        window = None if initial_state is None else [initial_state[:, :, 1:].to(x.dtype).contiguous()]
        slots = None if window is None else torch.arange(n, device=x.device)
        (y,) = kt.conv_prefill(
            [rows], [weight.float()], window, bias=None if bias is None else [bias.float()], cu_seqlens=cu_seqlens, slots=slots,
            layout="DS", activation=activation is not None,
        )  # fmt: skip
        _stats.served("fla", "causal_conv1d_fwd")
        final = self._last_inputs(flat, weight.shape[1], initial_state, cu_seqlens) if output_final_state else None
        return y.reshape(x.shape), final

    def causal_conv1d_update_verifier(
        self, x: Any, cache: Any, residual: Any = None, weight: Any = None, bias: Any = None, activation: Any = None
    ) -> tuple[bool, str | None]:
        """As causal_conv1d_fwd; the cache must be of x's dtype or float32."""
        reason = "no weight" if weight is None else _conv_reason(x, weight, bias, residual, activation, cache)
        if reason is None and (cache.dim() != 3 or cache.stride(2) != 1 or cache.dtype not in (x.dtype, torch.float32)):
            reason = "a cache that is not [N,D,W] with dense columns of x's dtype"
        return reason is None, reason

    def causal_conv1d_update(
        self, x: Any, cache: Any, residual: Any = None, weight: Any = None, bias: Any = None, activation: Any = None
    ) -> tuple[_Tensor, _Tensor]:
        """FLA's causal_conv1d_update: one token a sequence, the cache [N,D,W] moved along in place."""
        rows = dense(x).reshape(cache.shape[0], 1, cache.shape[1])
        oldest = cache[:, :, 1].clone()
        (y,) = kt.conv_update(
            [rows], [weight.float()], [cache[:, :, 1:]], bias=None if bias is None else [bias.float()],
            slots=torch.arange(cache.shape[0], device=x.device), layout="DS", activation=activation is not None,
        )  # fmt: skip
        cache[:, :, 0] = oldest  # which no conv reads, and FLA keeps
        _stats.served("fla", "causal_conv1d_update")
        return y.reshape(x.shape), cache

    def causal_conv1d_update_states_verifier(
        self, x: Any, state_len: int, initial_state: Any = None, cu_seqlens: Any = None
    ) -> tuple[bool, str | None]:
        """Declines training."""
        reason = "gradients" if training(x, initial_state) else None
        return reason is None, reason

    def causal_conv1d_update_states(self, x: Any, state_len: int, initial_state: Any = None, cu_seqlens: Any = None) -> _Tensor:
        """FLA's causal_conv1d_update_states: the last state_len inputs of each sequence, [N,D,state_len]."""
        _stats.served("fla", "causal_conv1d_update_states")
        return self._last_inputs(x if x.dim() == 3 else x[None], state_len, initial_state, cu_seqlens)

    @staticmethod
    def _last_inputs(x: _Tensor, columns: int, before: _Tensor | None, cu_seqlens: _Tensor | None) -> _Tensor:
        """Plain copies by index, without a wait for the device."""
        if cu_seqlens is None:
            ends = torch.full((x.shape[0],), x.shape[1], device=x.device)
            starts, batch = torch.zeros_like(ends), torch.arange(x.shape[0], device=x.device)[:, None]
        else:
            starts, ends, batch = cu_seqlens[:-1], cu_seqlens[1:], torch.zeros(1, 1, dtype=torch.long, device=x.device)
        column = torch.arange(columns, device=x.device)
        at = ends[:, None] - columns + column  # [N, columns]
        inside = at >= starts[:, None]
        values = x[batch, at.clamp(min=0, max=max(x.shape[1] - 1, 0))] if x.shape[1] > 0 else x.new_zeros(*at.shape, x.shape[2])
        if before is None:
            values = torch.where(inside[:, :, None], values, torch.zeros((), dtype=x.dtype, device=x.device))
            return values.transpose(1, 2).contiguous()
        old = (at - starts[:, None] + columns).clamp(0, columns - 1)
        kept = before.to(x.dtype).transpose(1, 2).gather(1, old[:, :, None].expand(-1, -1, x.shape[2]))
        return torch.where(inside[:, :, None], values, kept).transpose(1, 2).contiguous()

    def layer_norm_gated_fwd_verifier(self, x: Any, g: Any, weight: Any, bias: Any, **o: Any) -> tuple[bool, str | None]:
        """Serves RMS norm with a sigmoid gate, a weight and nothing else."""
        reason = (
            ("gradients" if training(x, g, weight, bias) else None)
            or ("a layer norm" if not o.get("is_rms_norm") else None)
            or (f"activation {o.get('activation', 'swish')}" if o.get("activation", "swish") != "sigmoid" else None)
            or ("bias or residual" if bias is not None or o.get("residual") is not None else None)
            or ("no weight" if weight is None else None)
            or ("dtypes" if x.dtype not in FLOATS or g.dtype != x.dtype or o.get("out_dtype") not in (None, x.dtype) else None)
            or ("a residual dtype" if o.get("residual_dtype") not in (None, x.dtype) else None)
            or (f"device {x.device.type}" if x.device.type not in ("cpu", "cuda") else None)
        )
        return reason is None, reason

    def layer_norm_gated_fwd(self, x: Any, g: Any, weight: Any, bias: Any, eps: float = 1e-5, **_: Any) -> tuple[Any, ...]:
        """FLA's layer_norm_gated_fwd: (y, None, None, x); the statistics serve the backward pass alone."""
        y = kt.gated_norm(dense(x)[:, None], dense(g)[:, None], weight.float(), eps=eps)
        _stats.served("fla", "layer_norm_gated_fwd")
        return y[:, 0], None, None, x


_CHUNK_KNOWN = {
    "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound", "disable_recompute",
    "return_intermediate_states", "state_v_first", "cu_seqlens", "cu_seqlens_cpu", "cp_context", "use_graph", "max_num_seqs",
    "A_log", "dt_bias", "chunk_size", "transpose_state_layout",
}  # fmt: skip


def _fresh_reason(first: Any, o: dict[str, Any]) -> str | None:
    if o.get("ssm_state_indices") is not None:
        return "slots of a state that is not updated in place"
    return "an initial state that is not float32" if first is not None and first.dtype != torch.float32 else None


def _in_place_reason(q: Any, first: Any, o: dict[str, Any]) -> str | None:
    """Why a state, packed or a pool with slots, cannot be worked on where it lies."""
    if first is None or first.dim() != 4 or first.dtype not in FLOATS:
        return "a state in place that is not [N,HV,V,K] of a float type"
    if not o.get("state_v_first"):
        return "a K-first state updated in place"
    if not first[0].is_contiguous():
        return "a state in place whose slots are not dense"
    slots, sequences = o.get("ssm_state_indices"), o.get("cu_seqlens")
    n = q.shape[0] if sequences is None else sequences.shape[0] - 1
    if slots is None:
        return "a wrong number of initial states" if first.shape[0] != n else None
    if slots.shape != (n,) or slots.dtype not in (torch.int32, torch.int64):
        return "slots that are not [N]"
    return "slots with several tokens of a sequence" if q.shape[0] * q.shape[1] != n else None


def _conv_reason(x: Any, weight: Any, bias: Any, residual: Any, activation: Any, state: Any) -> str | None:
    if training(x, weight, bias, state):
        return "gradients"
    if residual is not None:
        return "a residual"
    if activation not in (None, "silu", "swish"):
        return f"activation {activation}"
    if x.device.type not in ("cpu", "cuda") or x.dtype not in FLOATS:
        return f"{x.dtype} on {x.device.type}"
    return None if 2 <= weight.shape[1] <= 8 else f"width {weight.shape[1]}"


def register() -> bool:
    """Registers the backend for FLA's five functions; idempotent, done once by the import. False, with one warning, if this FLA
    is not one that libkda knows (RuntimeError under LIBKDA_STRICT=1)."""
    version = _guard.version_of("fla-core") or _guard.version_of("flash-linear-attention")
    problems = [p for function, names in _RELIED_ON.items() for p in _guard.missing_parameters(function, names)]
    if not TESTED[0] <= version < TESTED[1]:
        problems.append(f"fla {'.'.join(map(str, version))}, tested from 0.6.0 to below 0.7.0")
    if _guard.refuse("libkda.fla", problems):
        return False
    if fla.backends._DISPATCH_DISABLED:
        _stats.logger.info("libkda.fla: FLA_DISABLE_BACKEND_DISPATCH=1, nothing was hooked")
        return False
    fla.backends.register("kda")(LibKDABackend)
    for function in (f for f in _RELIED_ON if f is not _recurrent.fused_recurrent_kda_fwd):
        fla.backends.register(function)(LibKDABackend)
    names = ", ".join(f.__name__ for f in _RELIED_ON)
    _stats.logger.info("libkda.fla: fla %s, hooked %s", ".".join(map(str, version)), names)
    return True


REGISTERED = register()

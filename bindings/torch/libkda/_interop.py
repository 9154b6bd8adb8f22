"""What the plug-ins share: calls in the form of FLA's functions on libkda's operators (spec XF, XH)."""

from __future__ import annotations

from typing import Any

import torch

from libkda import torch as kt

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_Tensor = torch.Tensor


def dense(t: _Tensor) -> _Tensor:
    """The tensor, copied if its last dimension is not dense."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def training(*tensors: Any) -> bool:
    """Whether a backward pass could be asked for."""
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def tokens_reason(q: _Tensor, k: _Tensor, v: _Tensor, g: _Tensor, beta: _Tensor, cu_seqlens: _Tensor | None) -> str | None:
    """Why token tensors cannot be served, by their metadata alone."""
    if q.device.type not in ("cpu", "cuda"):
        return f"device {q.device.type}"
    if any(t.dtype not in FLOATS or t.dtype != q.dtype for t in (q, k, v)):
        return f"q, k, v of dtypes {q.dtype}, {k.dtype}, {v.dtype}"
    if q.dim() != 4 or k.shape != q.shape or v.dim() != 4 or g.shape != (*v.shape[:3], q.shape[-1]):
        return "shapes other than q, k [B,T,H,K], v [B,T,HV,V], g [B,T,HV,K]"
    if beta.shape != v.shape[:3]:
        return "beta per channel"
    if v.shape[2] % q.shape[2] != 0 or q.shape[-1] > 256 or v.shape[-1] > 256:
        return "head sizes"
    if cu_seqlens is not None and q.shape[0] != 1:
        return "cu_seqlens with B > 1"
    return None


def numeric_form(
    q: _Tensor, g: _Tensor, beta: _Tensor, *, A_log: Any, dt_bias: Any, raw_gate: bool, raw_beta: bool, o: dict[str, Any]
) -> tuple[_Tensor, _Tensor, dict[str, Any]]:
    """gate, beta and the numeric form as libkda takes them."""
    lower = o.get("lower_bound")
    form: dict[str, Any] = {
        "scale": o.get("scale"),
        "qk_norm": bool(o.get("use_qk_l2norm_in_kernel")),
        "allow_neg_eigval": bool(o.get("allow_neg_eigval")),
        "beta_is_logits": raw_beta,
    }
    if not raw_gate:
        form["gate_family"] = "plain"
        g = g.float()
    else:
        form["gate_family"] = "softplus" if lower is None else "bounded"
        form["lower_bound"] = None if lower is None else float(lower)
        form["A_log"] = None if A_log is None else A_log.float()
        form["dt_bias"] = None if dt_bias is None else dt_bias.float()
        g = g if g.dtype in (q.dtype, torch.float32) else g.float()
    beta = beta if raw_beta and beta.dtype in (q.dtype, torch.float32) else beta.float()
    return dense(g), beta, form


def to_v_first(state: _Tensor, state_v_first: bool) -> _Tensor:
    return state.contiguous() if state_v_first else state.transpose(-1, -2).contiguous()


def run(
    q: _Tensor, k: _Tensor, v: _Tensor, g: _Tensor, beta: _Tensor, form: dict[str, Any], first: _Tensor | None,
    want_final: bool, v_first: bool, cu_seqlens: _Tensor | None, *, recurrent: bool = False, out: _Tensor | None = None,
    in_place: bool = False, slots: _Tensor | None = None,
) -> tuple[_Tensor, _Tensor | None]:  # fmt: skip
    """Output [B,T,HV,V] and final state fp32 (V-first or K-first) of a call with FLA's shapes. in_place: `first` is V-first,
    packed or a pool with slots [N], and becomes the final state."""
    tokens = [dense(t) for t in (q, k, v)] + [g, beta]
    n, (heads, values), keys = q.shape[0], v.shape[2:], q.shape[-1]
    if cu_seqlens is not None:
        n = cu_seqlens.shape[0] - 1
        tokens = [t.squeeze(0) for t in tokens]
    target = None if out is None else out.view(tokens[2].shape)
    if in_place:
        # Rows that no sequence covers are left as they come, as FLA leaves them.
        target = torch.empty_like(tokens[2]) if target is None else target
        several = q.shape[0] * q.shape[1] != n  # tokens of a sequence, of which the last one's state stays
        y = kt.decode(*tokens, first, out=target, cu_seqlens=cu_seqlens, slots=slots, final_only=several, **form)
        return y.view(v.shape), first
    final = first if first is None else to_v_first(first, v_first)
    if recurrent:
        # Decode works in place: on a copy of the initial state.
        state = q.new_empty(n, heads, values, keys, dtype=torch.float32) if final is None else final.clone()
        y = kt.decode(*tokens, state, out=target, cu_seqlens=cu_seqlens, fresh=first is None, final_only=True, **form)
        final = state
    else:
        last = q.new_empty(n, heads, values, keys, dtype=torch.float32) if want_final else None
        y = kt.prefill(
            *tokens, state=final, final_state=last, out=target, cu_seqlens=cu_seqlens, store_final=want_final, **form
        )  # fmt: skip
        final = last
    if not want_final:
        return y.view(v.shape), None
    return y.view(v.shape), final if v_first else final.transpose(-1, -2).contiguous()

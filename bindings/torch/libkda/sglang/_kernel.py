"""SGLang's kernel interface of a KDA layer on libkda's operators."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase

from libkda import _stats
from libkda import torch as kt

_CHUNK = 64  # tokens between the states that SGLang tracks
_MAX_VERIFY = 16
_Tensor = torch.Tensor


def _form(A_log: _Tensor | None, dt_bias: _Tensor | None, lower_bound: float | None) -> dict[str, Any]:
    """The gate as libkda names it: raw with a bound or softplus, or the log decay itself without A_log."""
    if A_log is None:
        return dict(gate_family="plain")
    family = "softplus" if lower_bound is None else "bounded"
    bias = None if dt_bias is None else dt_bias.reshape(-1)
    return dict(gate_family=family, lower_bound=lower_bound, A_log=A_log.reshape(-1), dt_bias=bias)


def _some(t: _Tensor | None) -> bool:
    return t is not None and t.numel() > 0


class LibKDAKernel(LinearAttnKernelBase):
    """SGLang's kernel interface on libkda's operators: V-major pools in place by slot, -1 a dead slot and 0 a live one."""

    supports_packed_decode = True
    supports_packed_decode_safe_gate = True
    supports_safe_gate_verify = True
    supports_strided_target_verify_qkv = True
    supports_track_state_snapshot = True

    def __init__(self, triton: Any) -> None:
        self.triton = triton

    def _stock(self, phase: str, reason: str) -> Any:
        _stats.declined("sglang", phase, reason)
        return self.triton

    def packed_decode(
        self,
        mixed_qkv: _Tensor,
        a: _Tensor,
        b: _Tensor,
        *,
        A_log: _Tensor,
        dt_bias: _Tensor,
        scale: float,
        ssm_states: _Tensor,
        cache_indices: _Tensor,
        num_v_heads: int,
        head_v_dim: int,
        lower_bound: float | None = None,
        **more: Any,
    ) -> _Tensor:
        """One token a row: mixed_qkv [B, 2*H*K + HV*V] after the convolution; returns [1,B,HV,V]."""
        ring = [name for name in ("replayssm_d", "replayssm_write_pos") if more.get(name) is not None]
        if ring and lower_bound is None:
            return self._stock("decode", "ReplaySSM").packed_decode(
                mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, scale=scale, ssm_states=ssm_states,
                cache_indices=cache_indices, num_v_heads=num_v_heads, head_v_dim=head_v_dim, lower_bound=lower_bound,
                **more,
            )  # fmt: skip
        rows, keys, values = mixed_qkv.shape[0], ssm_states.shape[-1], num_v_heads * head_v_dim
        queries = (mixed_qkv.shape[1] - values) // 2
        q, k, v = mixed_qkv.split([queries, queries, values], dim=-1)
        out = kt.decode(
            q.unflatten(-1, (-1, keys))[:, None], k.unflatten(-1, (-1, keys))[:, None],
            v.unflatten(-1, (-1, head_v_dim))[:, None], a.reshape(rows, 1, num_v_heads, keys),
            b.reshape(rows, 1, num_v_heads), ssm_states, slots=cache_indices, scale=scale,
            **_form(A_log, dt_bias, lower_bound),
        )  # fmt: skip
        _stats.served("sglang", "decode")
        return out.transpose(0, 1)

    def decode(
        self, q: _Tensor, k: _Tensor, v: _Tensor, a: _Tensor, b: _Tensor, *, A_log: _Tensor, dt_bias: _Tensor,
        ssm_states: _Tensor, cache_indices: _Tensor, query_start_loc: _Tensor, lower_bound: float | None = None, **_: Any,
    ) -> _Tensor:  # fmt: skip
        """q, k [1,T,H,K], v [1,T,HV,V], one token a row; returns [1,T,HV,V]."""
        heads, keys = v.shape[2], ssm_states.shape[-1]
        out = kt.decode(
            q[0], k[0], v[0], a.reshape(-1, heads, keys), b.reshape(-1, heads), ssm_states, slots=cache_indices,
            cu_seqlens=query_start_loc, **_form(A_log, dt_bias, lower_bound),
        )  # fmt: skip
        _stats.served("sglang", "decode")
        return out[None]

    def extend(
        self,
        q: _Tensor,
        k: _Tensor,
        v: _Tensor,
        g: _Tensor,
        beta: _Tensor,
        *,
        ssm_states: _Tensor,
        cache_indices: _Tensor,
        query_start_loc: _Tensor,
        A_log: _Tensor | None = None,
        dt_bias: _Tensor | None = None,
        lower_bound: float | None = None,
        beta_is_raw: bool = False,
        return_intermediate_states: bool = False,
        **more: Any,
    ) -> Any:
        """q, k [1,T,H,K], v [1,T,HV,V], g [1,T,HV,K], beta [1,T,HV]; states in place. Returns out [1,T,HV,V], with a
        second None where tracking is asked for: the snapshot is in track_state then."""
        track, at = more.get("track_state"), more.get("track_chunk_idx")
        source = more.get("track_ssm_h_src")
        reason = (
            ("an extend that must be rolled back" if more.get("is_spec_decode") else None)
            or ("states of every chunk" if return_intermediate_states and track is None and _some(source) else None)
            or ("checkpoints of another kernel" if more.get("state_checkpoint_cu_starts") is not None else None)
        )
        if reason is not None:
            return self._stock("extend", reason).extend(
                q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices, query_start_loc=query_start_loc,
                A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, beta_is_raw=beta_is_raw,
                return_intermediate_states=return_intermediate_states, **more,
            )  # fmt: skip
        prefix = more.get("extend_prefix_lens")
        n = query_start_loc.shape[0] - 1
        flags = None if prefix is None else (prefix[:n] > 0)
        tracking = {}
        if track is not None:
            # Chunk i's state is the one before it; before chunk 0 it is the one that the sequence starts from.
            start = ssm_states[cache_indices[:n].clamp(min=0).long()].to(track.dtype)
            track[:n] = start if flags is None else start * flags[:, None, None, None].to(start.dtype)
            tracking = dict(checkpoint_offsets=(at[:n] * _CHUNK)[:, None], checkpoint_states=track[:n, None])
        out = kt.prefill(
            q[0], k[0], v[0], g[0] if A_log is not None else g[0].float(), beta[0] if beta_is_raw else beta[0].float(),
            state=ssm_states, slots=cache_indices[:n], has_initial_state=flags, cu_seqlens=query_start_loc,
            beta_is_logits=beta_is_raw, **_form(A_log, dt_bias, lower_bound), **tracking,
        )[None]  # fmt: skip
        _stats.served("sglang", "extend")
        return (out, None) if return_intermediate_states else out

    def target_verify(
        self, A_log: _Tensor, dt_bias: _Tensor, q: _Tensor, k: _Tensor, v: _Tensor, a: _Tensor, b: _Tensor, *,
        ssm_states: _Tensor, cache_indices: _Tensor, query_start_loc: _Tensor, intermediate_states_buffer: _Tensor,
        intermediate_state_indices: _Tensor, cache_steps: int, retrieve_parent_token: _Tensor | None,
        lower_bound: float | None = None, **more: Any,
    ) -> _Tensor:  # fmt: skip
        """A chain of up to cache_steps tokens a row; the state after token t goes to intermediate_states_buffer[row, t]
        and the pool keeps its states. Returns [1,T,HV,V]."""
        steps, buffer = intermediate_states_buffer.shape[1], intermediate_states_buffer
        reason = (
            ("a tree" if retrieve_parent_token is not None else None)
            or ("ReplaySSM" if more.get("cache_ring") else None)
            or ("states seeded from accepted ones" if more.get("fused_accept_state_indices") is not None else None)
            or (f"{steps} steps" if steps > _MAX_VERIFY else None)
            or ("a buffer of another dtype" if buffer.dtype != ssm_states.dtype else None)
            or ("a buffer with gaps" if buffer.stride(0) != steps * buffer.stride(1) else None)
        )
        if reason is not None:
            return self._stock("target_verify", reason).target_verify(
                A_log=A_log, dt_bias=dt_bias, q=q, k=k, v=v, a=a, b=b, ssm_states=ssm_states, cache_indices=cache_indices,
                query_start_loc=query_start_loc, intermediate_states_buffer=buffer,
                intermediate_state_indices=intermediate_state_indices, cache_steps=cache_steps,
                retrieve_parent_token=retrieve_parent_token, lower_bound=lower_bound, **more,
            )  # fmt: skip
        n = query_start_loc.shape[0] - 1
        live = cache_indices[:n] >= 0
        rows = intermediate_state_indices[:n].long()
        # A window starts from its first column, which it overwrites: the committed state is put there.
        start = ssm_states[cache_indices[:n].clamp(min=0).long()]
        buffer[rows, 0] = torch.where(live[:, None, None, None], start, buffer[rows, 0])
        columns = rows[:, None] * steps + torch.arange(steps, device=rows.device)
        heads, keys = v.shape[2], ssm_states.shape[-1]
        out = kt.decode(
            q[0], k[0], v[0], a.reshape(-1, heads, keys), b.reshape(-1, heads), buffer.flatten(0, 1),
            slots=torch.where(live[:, None], columns, -1), cu_seqlens=query_start_loc, width=steps,
            **_form(A_log, dt_bias, lower_bound),
        )  # fmt: skip
        _stats.served("sglang", "target_verify")
        return out[None]

// The fp32 path of N-7: what a consumer warp does with its 16 value rows when a right-hand side or U leaves fp16's
// range.
//
// From the state at the start of the item, token by token as E-7 says; writes the outputs of tokens >= `first`. Reads
// the raw rows again. Never taken on ordinary activations, so it is written for few registers, not for speed.
#pragma once

#include "cuda/kernels/prefill_fused/prepare_rows.cuh"
#include "cuda/kernels/prefill_fused/recurrence.cuh"

namespace kda::cuda::prefill_fused {

__device__ __forceinline__ float sum_over_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ float load_beta(const Params& p, const Work& work, int64_t token) {
  const int64_t at = row_offset(p.beta_rows, work, token, work.head);
  const float x = p.beta_type == Real::kF32
                      ? static_cast<const float*>(p.beta)[at]
                      : __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(p.beta)[at]) << 16);
  return beta_value(p, x);
}

__device__ __forceinline__ int64_t output_row(const Params& p, int64_t row) {
  if (p.out_row_of.data == nullptr) return row;
  const int64_t target = load_index(p.out_row_of, row);
  return target >= 0 && target < p.out_row_count ? target : -1;
}

__device__ __forceinline__ uint16_t bf16_bits(float x) { return static_cast<uint16_t>(ptx::pack_bf16(x, 0.0f)); }

// The gate by its family at run time: one copy of this code serves all chains.
__device__ __forceinline__ float2 load_gate_pair(const Params& p, int64_t at) {
  if (p.gate_type == Real::kF32) {
    float2 x;
    load_pair(x, p.gate, at);
    return x;
  }
  uint32_t x;
  load_pair(x, p.gate, at);
  return widen_pair(x);
}
__device__ __forceinline__ float log_decay(const Params& p, float x, float bias, float factor, float bound) {
  if (p.gate_family == Gate::kBounded) return add_log_decay<Gate::kBounded>(0.0f, x, bias, factor, bound);
  if (p.gate_family == Gate::kSoftplus) return add_log_decay<Gate::kSoftplus>(0.0f, x, bias, factor, bound);
  return add_log_decay<Gate::kPlain>(0.0f, x, bias, factor, bound);
}

// `memory` holds the accumulators, on return S in true units; `value_row` is this warp's first value row.
// Not inlined, so that it costs the chain neither registers nor instruction cache.
__device__ __noinline__ inline void run_slow_path(const Params& p, const Work& work, const Item& item, int first,
                                                  float* memory, float inverse0, float inverse1, int value_row,
                                                  int thread) {
  const ConsumerLane me(thread);
  float state[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) state[i] = memory[i] * (((i >> 1) & 1) == 0 ? inverse0 : inverse1);
  const int query_head = work.head / (p.value_heads / p.heads);
  const float bound = p.lower_bound * kLog2e;
  const float factor = p.gate_family == Gate::kPlain
                           ? 0.0f
                           : gate_factor(p.a_log != nullptr ? p.a_log[work.head] : 0.0f, p.a_log != nullptr);
  for (int t = 0; t < item.count; ++t) {
    const int64_t token = item.first + t;
    const int64_t q_at = row_offset(p.q_rows, work, token, query_head) + 2 * me.c;
    const int64_t k_at = row_offset(p.k_rows, work, token, query_head) + 2 * me.c;
    const int64_t g_at = row_offset(p.gate_rows, work, token, work.head) + 2 * me.c;
    const uint16_t* v = static_cast<const uint16_t*>(p.v) + row_offset(p.v_rows, work, token, work.head) + value_row;
    float dot[2] = {0.0f, 0.0f}, kk = 0.0f;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      uint32_t raw_k;
      load_pair(raw_k, p.k, k_at + 8 * n);
      const float2 gate = load_gate_pair(p, g_at + 8 * n), k = widen_pair(raw_k);
      float2 bias = {0.0f, 0.0f};
      if (p.gate_family != Gate::kPlain && p.dt_bias != nullptr)
        bias =
            *reinterpret_cast<const float2*>(p.dt_bias + static_cast<int64_t>(work.head) * kDim + 8 * n + 2 * me.c);
      const float d0 = ptx::exp2_approx(log_decay(p, gate.x, bias.x, factor, bound));
      const float d1 = ptx::exp2_approx(log_decay(p, gate.y, bias.y, factor, bound));
      kk = fmaf(k.x, k.x, fmaf(k.y, k.y, kk));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        state[4 * n + 2 * r] *= d0;
        state[4 * n + 2 * r + 1] *= d1;
        dot[r] = fmaf(state[4 * n + 2 * r], k.x, fmaf(state[4 * n + 2 * r + 1], k.y, dot[r]));
      }
    }
    const float k_norm = norm_factor(p, sum_over_quad(kk));
    const float beta = load_beta(p, work, token);
    float u[2], o[2] = {0.0f, 0.0f}, qq = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float value = work.is_map ? 0.0f : __uint_as_float(static_cast<uint32_t>(v[me.g + 8 * r]) << 16);
      u[r] = beta * (value - sum_over_quad(dot[r]) * k_norm) * k_norm;
    }
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      uint32_t raw_k, raw_q;
      load_pair(raw_k, p.k, k_at + 8 * n);
      load_pair(raw_q, p.q, q_at + 8 * n);
      const float2 k = widen_pair(raw_k), q = widen_pair(raw_q);
      qq = fmaf(q.x, q.x, fmaf(q.y, q.y, qq));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        state[4 * n + 2 * r] = fmaf(u[r], k.x, state[4 * n + 2 * r]);
        state[4 * n + 2 * r + 1] = fmaf(u[r], k.y, state[4 * n + 2 * r + 1]);
        o[r] = fmaf(state[4 * n + 2 * r], q.x, fmaf(state[4 * n + 2 * r + 1], q.y, o[r]));
      }
    }
    const float q_norm = norm_factor(p, sum_over_quad(qq)) * p.scale;
    const int64_t row = output_row(p, work.span.begin + token);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float result = sum_over_quad(o[r]) * q_norm;
      if (t >= first && me.c == 0 && row >= 0) {
        const int64_t at = work.span.batch * p.out_rows.batch + row * p.out_rows.token + work.head * p.out_rows.head;
        static_cast<uint16_t*>(p.out)[at + value_row + me.g + 8 * r] = bf16_bits(result);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) memory[i] = state[i];
}

}  // namespace kda::cuda::prefill_fused

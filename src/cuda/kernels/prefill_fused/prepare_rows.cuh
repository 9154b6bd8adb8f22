// Producer warps, first half of an item: raw rows to log decays, prefix sums, norms, beta.
//
// A warp owns 32 of the 128 key channels and all 32 tokens, so the gate never leaves the warp. Two register layouts:
//   gate layout      lane = channel pair (lane % 16) of token block (lane / 16): prefix sums run inside a lane
//   fragment layout  lane = 4*g + c holds 8 channels (8c..8c+7) of tokens a = tau(g) and b = 15 - a of each block:
//                    at every dyadic level one of the two is a row and the other a column (H-5a)
#pragma once

#include "cuda/kernels/prefill_fused/gate.cuh"
#include "cuda/kernels/prefill_fused/work.cuh"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/copy.h"

namespace kda::cuda::prefill_fused {

struct ProducerLane {
  int group;  // warpgroup of the CTA, 0 or 1
  int warp;   // of the group, 0..3
  int lane;
  int g, c;     // lane / 4, lane % 4
  int token_a;  // in a block; 16-byte stores of lanes 4g..4g+7 then hit eight different 16-byte columns
  int token_b;
  __device__ ProducerLane(int thread, int group_index) : group(group_index) {
    warp = (thread >> 5) & 3;
    lane = thread & 31;
    g = lane >> 2;
    c = lane & 3;
    token_a = ((g & 1) << 2) | (g >> 1);
    token_b = 15 - token_a;
  }
  __device__ int index() const { return warp * 32 + lane; }  // in the group
};

// An item of a work: tokens [first, first + count) of its sequence.
struct Item {
  int64_t first = 0;
  int count = 0;
};

__device__ __forceinline__ Item item_of(const Work& work, int index) {
  Item item;
  item.first = static_cast<int64_t>(index) * kChunk;
  const int64_t left = work.span.length - item.first;
  item.count = left < kChunk ? static_cast<int>(left) : kChunk;
  return item;
}

__device__ __forceinline__ int64_t row_offset(const Rows& rows, const Work& work, int64_t token, int64_t head) {
  return work.span.batch * rows.batch + (work.span.begin + token) * rows.token + head * rows.head;
}

// Raw registers of one item, loaded an item ahead.
template <class GateT>
struct RawRows {
  uint4 q[2][2], k[2][2];  // [block][token a, token b], 8 channels
  GateT gate[16];          // channel pair of 16 tokens: uint32_t (bf16) or float2
  float2 bias;
  float factor;
  float beta;  // raw, of token `index` (threads 0..31)
};

__device__ __forceinline__ void load_pair(uint32_t& x, const void* base, int64_t element) {
  x = *reinterpret_cast<const uint32_t*>(static_cast<const char*>(base) + 2 * element);
}
__device__ __forceinline__ void load_pair(float2& x, const void* base, int64_t element) {
  x = *reinterpret_cast<const float2*>(static_cast<const char*>(base) + 4 * element);
}
__device__ __forceinline__ float2 widen_pair(uint32_t x) { return {ptx::bf16_low(x), ptx::bf16_high(x)}; }
__device__ __forceinline__ float2 widen_pair(float2 x) { return x; }

// One instruction; the launcher's caller keeps 32 rows below 2^32 bytes.
__device__ __forceinline__ uint64_t step_bytes(uint32_t rows, uint32_t bytes) {
  return static_cast<uint64_t>(rows) * bytes;
}

template <Gate kGate, class GateT>
__device__ __forceinline__ void load_rows(RawRows<GateT>& raw, const Params& p, const Work& work, const Item& item,
                                          const ProducerLane& me) {
  const int query_head = work.head / (p.value_heads / p.heads);
  const int channel = 32 * me.warp + 8 * me.c;
  const char* q = static_cast<const char*>(p.q) + 2 * (row_offset(p.q_rows, work, item.first, query_head) + channel);
  const char* k = static_cast<const char*>(p.k) + 2 * (row_offset(p.k_rows, work, item.first, query_head) + channel);
  const uint32_t q_step = 2 * static_cast<uint32_t>(p.q_rows.token);
  const uint32_t k_step = 2 * static_cast<uint32_t>(p.k_rows.token);
#pragma unroll
  for (int block = 0; block < 2; ++block) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const uint32_t token = 16 * block + (side == 0 ? me.token_a : me.token_b);
      const bool valid = token < static_cast<uint32_t>(item.count);
      raw.q[block][side] = valid ? ptx::load_global_16(q + step_bytes(token, q_step)) : uint4{};
      raw.k[block][side] = valid ? ptx::load_global_16(k + step_bytes(token, k_step)) : uint4{};
    }
  }
  const int pair = 32 * me.warp + 2 * (me.lane & 15);
  const int first = (me.lane >> 4) * 16;
  const char* gate = static_cast<const char*>(p.gate) +
                     (sizeof(GateT) / 2) * (row_offset(p.gate_rows, work, item.first + first, work.head) + pair);
  const uint32_t gate_step = (sizeof(GateT) / 2) * static_cast<uint32_t>(p.gate_rows.token);
#pragma unroll
  for (int t = 0; t < 16; ++t) {
    raw.gate[t] = GateT{};
    if (first + t < item.count) raw.gate[t] = *reinterpret_cast<const GateT*>(gate + step_bytes(t, gate_step));
  }
  raw.bias = {0.0f, 0.0f};
  raw.factor = 0.0f;
  if constexpr (kGate != Gate::kPlain) {
    if (p.dt_bias != nullptr)
      raw.bias = *reinterpret_cast<const float2*>(p.dt_bias + static_cast<int64_t>(work.head) * kDim + pair);
    raw.factor = gate_factor<kGate>(p.a_log != nullptr ? p.a_log[work.head] : 0.0f, p.a_log != nullptr);
  }
  raw.beta = 0.0f;
  if (me.warp == 0 && me.lane < item.count) {
    const int64_t at = row_offset(p.beta_rows, work, item.first + me.lane, work.head);
    raw.beta = p.beta_type == Real::kF32
                   ? static_cast<const float*>(p.beta)[at]
                   : __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(p.beta)[at]) << 16);
  }
}

// Block-local inclusive prefix sums of log2-decays to this warp's scratch (H-3c), and the chunk decay to `decay`.
template <Gate kGate, class GateT>
__device__ __forceinline__ void write_prefix_sums(const RawRows<GateT>& raw, const Params& p, const Item& item,
                                                  const ProducerLane& me, uint32_t scratch) {
  const int first = (me.lane >> 4) * 16;
  const int pair = me.lane & 15;
  // prefix_offset(first + t, pair / 2), with the swizzle of t as one of two bases.
  const uint32_t at = scratch + first * 128 + (pair >> 1) * 16 + (pair & 1) * 8;
  const uint32_t at_swizzled = at ^ 16;
  const float bound = p.lower_bound * kLog2e;
  float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
  for (int t = 0; t < 16; ++t) {
    const float2 x = widen_pair(raw.gate[t]);
    const float g0 = log_decay<kGate>(x.x, raw.bias.x, raw.factor, bound);
    const float g1 = log_decay<kGate>(x.y, raw.bias.y, raw.factor, bound);
    const bool valid = first + t < item.count;
    sum0 += valid ? g0 : 0.0f;
    sum1 += valid ? g1 : 0.0f;
    ptx::store_shared(((t >> 2) & 1 ? at_swizzled : at) + t * 128, float2{sum0, sum1});
  }
}

__device__ __forceinline__ float load_prefix(uint32_t scratch, int token, int channel) {
  return ptx::load_shared_f1(scratch + prefix_offset(token, channel >> 2) + (channel & 3) * 4);
}

// Sums over this lane's 8 channels.
__device__ __forceinline__ void add_products(const uint4& q, const uint4& k, float& qq, float& kk, float& qk) {
  const uint32_t qs[4] = {q.x, q.y, q.z, q.w};
  const uint32_t ks[4] = {k.x, k.y, k.z, k.w};
  qq = kk = qk = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float q0 = ptx::bf16_low(qs[i]), q1 = ptx::bf16_high(qs[i]);
    const float k0 = ptx::bf16_low(ks[i]), k1 = ptx::bf16_high(ks[i]);
    qq = fmaf(q0, q0, fmaf(q1, q1, qq));
    kk = fmaf(k0, k0, fmaf(k1, k1, kk));
    qk = fmaf(q0, k0, fmaf(q1, k1, qk));
  }
}

// Writes this warp's share of |q|^2, |k|^2 and q.k of every token; a group barrier must follow.
template <class GateT>
__device__ __forceinline__ void write_sums(const RawRows<GateT>& raw, const ProducerLane& me, uint32_t area) {
#pragma unroll
  for (int block = 0; block < 2; ++block) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float sums[3];
      add_products(raw.q[block][side], raw.k[block][side], sums[0], sums[1], sums[2]);
#pragma unroll
      for (int kind = 0; kind < 3; ++kind) {
        sums[kind] += __shfl_xor_sync(0xffffffffu, sums[kind], 1);
        sums[kind] += __shfl_xor_sync(0xffffffffu, sums[kind], 2);
      }
      const int token = 16 * block + (side == 0 ? me.token_a : me.token_b);
      const float mine = me.c == 0 ? sums[0] : (me.c == 1 ? sums[1] : sums[2]);
      if (me.c < 3) ptx::store_shared(area + GroupArea::kSums + (me.c * 32 + token) * 16 + me.warp * 4, mine);
    }
  }
}

enum SumKind { kSumQ = 0, kSumK = 1, kSumQK = 2 };

__device__ __forceinline__ float load_sum(uint32_t area, int kind, int token) {
  const float4 x = ptx::load_shared_f4(area + GroupArea::kSums + (kind * 32 + token) * 16);
  return (x.x + x.y) + (x.z + x.w);
}

// Factor that normalises a row with this sum of squares (E-4).
__device__ __forceinline__ float norm_factor(const Params& p, float sum) {
  return p.normalize ? ptx::rsqrt_approx(sum + 1e-6f) : 1.0f;
}

}  // namespace kda::cuda::prefill_fused

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
  int thread;
  int group;  // warpgroup of the CTA, 0 or 1
  int warp;   // of the group, 0..3
  int lane;
  int g, c;     // lane / 4, lane % 4
  int token_a;  // in a block; 16-byte stores of lanes 4g..4g+7 then hit eight different 16-byte columns
  int token_b;
  __device__ explicit ProducerLane(int thread_index) : thread(thread_index), group((thread_index >> 7) - 1) {
    warp = (thread >> 5) & 3;
    lane = thread & 31;
    g = lane >> 2;
    c = lane & 3;
    token_a = ((g & 1) << 2) | (g >> 1);
    token_b = 15 - token_a;
  }
  __device__ int index() const { return warp * 32 + lane; }  // in the group
};

// Hides a value's origin, so that what is computed from it is not kept in registers across the item loop.
__device__ __forceinline__ uint32_t renew(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ uint64_t renew(uint64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
__device__ __forceinline__ ProducerLane renew(const ProducerLane& me) {
  return ProducerLane(static_cast<int>(renew(static_cast<uint32_t>(me.thread))));
}

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

// Query and key registers of an item.
struct RawRows {
  uint4 q[2][2], k[2][2];  // [block][token a, token b], 8 channels
};

constexpr int kGateBatch = 8;  // tokens of a batch of gate loads

// What a producer group keeps of its open work, in shared memory: byte addresses of the sequence's first token.
struct Source {
  static constexpr uint32_t kQ = 0, kK = 8, kGate = 16, kBeta = 24, kLength = 32,
                            kFactor = 40;  // in GroupArea::kSource
};

__device__ __forceinline__ void load_pair(uint32_t& x, const void* base, int64_t element) {
  x = *reinterpret_cast<const uint32_t*>(static_cast<const char*>(base) + 2 * element);
}
__device__ __forceinline__ void load_pair(float2& x, const void* base, int64_t element) {
  x = *reinterpret_cast<const float2*>(static_cast<const char*>(base) + 4 * element);
}
__device__ __forceinline__ float2 widen_pair(uint32_t x) { return {ptx::bf16_low(x), ptx::bf16_high(x)}; }
__device__ __forceinline__ float2 widen_pair(float2 x) { return x; }

// A raw gate whose log decay is 0, for rows past the end.
template <Gate kGate>
__device__ __forceinline__ uint32_t padding_gate(uint32_t) {
  return kGate == Gate::kPlain ? 0u : 0xff80ff80u;
}
template <Gate kGate>
__device__ __forceinline__ float2 padding_gate(float2) {
  const float x = kGate == Gate::kPlain ? 0.0f : -INFINITY;
  return {x, x};
}

// One instruction; the launcher's caller keeps 32 rows below 2^32 bytes.
__device__ __forceinline__ uint64_t step_bytes(uint32_t rows, uint32_t bytes) {
  return static_cast<uint64_t>(rows) * bytes;
}

// The initial state of this CTA's rows into the L2: the consumers will want it some items from now.
__device__ __forceinline__ void prefetch_state(const Params& p, const Work& work) {
  const Slots slots = sequence_slots(p, work.sequence);
  if (slots.is_fresh) return;
  const int size = p.state_in_type == Real::kF32 ? 4 : 2;
  const int64_t row = static_cast<int64_t>(work.head) * kDim + ptx::cluster_rank() * kRowsPerCta;
  const char* at = static_cast<const char*>(p.state_in) + (slots.read * p.state_in_stride + row * kDim) * size;
  if ((reinterpret_cast<uintptr_t>(at) & 15) == 0)
    ptx::prefetch_block_to_l2(at, kRowsPerCta * kDim * static_cast<uint32_t>(size));
}

// Opens a work for a group: all 128 threads; returns its items. Group barriers must separate it from readers of the
// work before and of this one. Not inlined: runs once a work, and would cost the item loop registers.
template <Gate kGate, class GateT>
__device__ __noinline__ int open_source(const Params& p, int64_t w, const uint16_t* order, uint32_t area, int index) {
  const Work work = load_work(p, w, order);
  if (work.items == 0) return 0;
  const int query_head = work.head / (p.value_heads / p.heads);
  const uint32_t source = area + GroupArea::kSource;
  if (index == 0) {
    const auto bytes = [](const void* base, int64_t elements, int size) {
      return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(base)) + static_cast<uint64_t>(elements * size);
    };
    ptx::store_shared(source + Source::kQ, bytes(p.q, row_offset(p.q_rows, work, 0, query_head), 2));
    ptx::store_shared(source + Source::kK, bytes(p.k, row_offset(p.k_rows, work, 0, query_head), 2));
    ptx::store_shared(source + Source::kGate,
                      bytes(p.gate, row_offset(p.gate_rows, work, 0, work.head), sizeof(GateT) / 2));
    ptx::store_shared(source + Source::kBeta,
                      bytes(p.beta, row_offset(p.beta_rows, work, 0, work.head), p.beta_type == Real::kF32 ? 4 : 2));
    ptx::store_shared(source + Source::kLength, static_cast<uint64_t>(work.span.length));
    const float factor = gate_factor(p.a_log != nullptr ? p.a_log[work.head] : 0.0f, p.a_log != nullptr);
    ptx::store_shared(source + Source::kFactor, factor);
  }
  if (index == 32 && threadIdx.x < 256) prefetch_state(p, work);
  const float bias = p.dt_bias != nullptr ? p.dt_bias[static_cast<int64_t>(work.head) * kDim + index] : 0.0f;
  ptx::store_shared(area + GroupArea::kBias + index * 4, bias);
  return work.items;
}

// Tokens of item `index`, at most kChunk (more than that or fewer than 1 at the ends never matter).
__device__ __forceinline__ int item_count(uint32_t area, int index) {
  const int64_t length = static_cast<int64_t>(ptx::load_shared_u64(area + GroupArea::kSource + Source::kLength));
  return static_cast<int>(min(length - static_cast<int64_t>(index) * kChunk, static_cast<int64_t>(kChunk)));
}

// Address of byte `column` of the item's first row in a tensor of the open work.
__device__ __forceinline__ const char* source_row(uint32_t area, uint32_t tensor, int index, uint32_t step,
                                                  uint32_t column) {
  const uint64_t base = ptx::load_shared_u64(area + GroupArea::kSource + tensor);
  return reinterpret_cast<const char*>(
      renew(base + static_cast<uint64_t>(static_cast<uint32_t>(index) * kChunk) * step + column));
}

__device__ __forceinline__ void load_rows(RawRows& raw, const Params& p, uint32_t area, int index, int count,
                                          const ProducerLane& me) {
  const uint32_t q_step = 2 * static_cast<uint32_t>(p.q_rows.token);
  const uint32_t k_step = 2 * static_cast<uint32_t>(p.k_rows.token);
  const uint32_t column = 2 * (32 * me.warp + 8 * me.c);
  const char* q = source_row(area, Source::kQ, index, q_step, column);
  const char* k = source_row(area, Source::kK, index, k_step, column);
#pragma unroll
  for (int block = 0; block < 2; ++block) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int token = 16 * block + (side == 0 ? me.token_a : me.token_b);
      const bool valid = token < count;
      raw.q[block][side] = valid ? ptx::load_global_16(q + step_bytes(token, q_step)) : uint4{};
      raw.k[block][side] = valid ? ptx::load_global_16(k + step_bytes(token, k_step)) : uint4{};
    }
  }
}

// Asks the L2 for this warp's columns of a later item of the open work: lane = token.
template <class GateT>
__device__ __forceinline__ void prefetch_rows(const Params& p, uint32_t area, int index, const ProducerLane& me) {
  if (me.lane >= item_count(area, index)) return;
  const uint32_t q_step = 2 * static_cast<uint32_t>(p.q_rows.token);
  const uint32_t k_step = 2 * static_cast<uint32_t>(p.k_rows.token);
  const uint32_t size = static_cast<uint32_t>(sizeof(GateT) / 2);
  const uint32_t gate_step = size * static_cast<uint32_t>(p.gate_rows.token);
  const uint32_t column = 32 * me.warp;
  ptx::prefetch_to_l2(source_row(area, Source::kQ, index, q_step, 2 * column) + step_bytes(me.lane, q_step));
  ptx::prefetch_to_l2(source_row(area, Source::kK, index, k_step, 2 * column) + step_bytes(me.lane, k_step));
  ptx::prefetch_to_l2(source_row(area, Source::kGate, index, gate_step, size * column) +
                      step_bytes(me.lane, gate_step));
}

__device__ __forceinline__ float load_beta_logit(const Params& p, uint32_t area, int index, int lane) {
  const bool is_wide = p.beta_type == Real::kF32;
  const uint64_t base = ptx::load_shared_u64(area + GroupArea::kSource + Source::kBeta);
  const int64_t at = (static_cast<int64_t>(index) * kChunk + lane) * p.beta_rows.token;
  return is_wide ? reinterpret_cast<const float*>(base)[at]
                 : __uint_as_float(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(base)[at]) << 16);
}

template <Gate kGate, class GateT>
__device__ __forceinline__ void load_gates(GateT (&raw)[kGateBatch], const char* gate, uint32_t step, int left) {
#pragma unroll
  for (int t = 0; t < kGateBatch; ++t) {
    raw[t] = padding_gate<kGate>(GateT{});
    if (t < left) raw[t] = ptx::load_global_once(reinterpret_cast<const GateT*>(gate + step_bytes(t, step)));
  }
}

// A lane's gate rows of an item.
struct GateRows {
  const char* at;
  uint32_t step;
  int left;  // valid rows from `at` on
};

template <class GateT>
__device__ __forceinline__ GateRows gate_rows(const Params& p, uint32_t area, int index, const ProducerLane& me) {
  const uint32_t size = static_cast<uint32_t>(sizeof(GateT) / 2);
  const int first = (me.lane >> 4) * 16;
  GateRows rows;
  rows.step = size * static_cast<uint32_t>(p.gate_rows.token);
  rows.at = source_row(area, Source::kGate, index, rows.step, size * (32 * me.warp + 2 * (me.lane & 15))) +
            step_bytes(first, rows.step);
  rows.left = item_count(area, index) - first;
  return rows;
}

// Block-local inclusive prefix sums of log2-decays to this warp's scratch (H-3c). `next` holds the first batch.
template <Gate kGate, class GateT>
__device__ __forceinline__ void write_prefix_sums(const Params& p, uint32_t area, int index, const ProducerLane& me,
                                                  uint32_t scratch, GateT (&next)[kGateBatch]) {
  const int pair = me.lane & 15;
  GateRows rows = gate_rows<GateT>(p, area, index, me);
  const float2 bias = ptx::load_shared_f2(area + GroupArea::kBias + (32 * me.warp + 2 * pair) * 4);
  const float factor = ptx::load_shared_f1(area + GroupArea::kSource + Source::kFactor);
  // prefix_offset(first + t, pair / 2): the swizzle changes every four tokens.
  uint32_t at = scratch + (me.lane >> 4) * 2048 + (pair >> 1) * 16 + (pair & 1) * 8;
  const float bound = p.lower_bound * kLog2e;
  float sum0 = 0.0f, sum1 = 0.0f;
  GateT raw[kGateBatch];
#pragma unroll 1
  for (int batch = 0; batch < 16 / kGateBatch; ++batch) {
#pragma unroll
    for (int t = 0; t < kGateBatch; ++t) raw[t] = next[t];
    rows.at += step_bytes(kGateBatch, rows.step);
    rows.left = batch == 0 ? rows.left - kGateBatch : 0;
    load_gates<kGate>(next, rows.at, rows.step, rows.left);
#pragma unroll
    for (int t = 0; t < kGateBatch; ++t) {
      const float2 x = widen_pair(raw[t]);
      sum0 = add_log_decay<kGate>(sum0, x.x, bias.x, factor, bound);
      sum1 = add_log_decay<kGate>(sum1, x.y, bias.y, factor, bound);
      ptx::store_shared((t < 4 ? at : at ^ 16) + t * 128, float2{sum0, sum1});
    }
    at += kGateBatch * 128;
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
template <int kKinds>
__device__ __forceinline__ void write_sums(const RawRows& raw, const ProducerLane& me, uint32_t area) {
#pragma unroll
  for (int block = 0; block < 2; ++block) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float sums[3];
      add_products(raw.q[block][side], raw.k[block][side], sums[0], sums[1], sums[2]);
#pragma unroll
      for (int kind = 0; kind < kKinds; ++kind) {
        sums[kind] += __shfl_xor_sync(0xffffffffu, sums[kind], 1);
        sums[kind] += __shfl_xor_sync(0xffffffffu, sums[kind], 2);
      }
      const int token = 16 * block + (side == 0 ? me.token_a : me.token_b);
      const float mine = me.c == 0 ? sums[0] : (me.c == 1 || kKinds == 2 ? sums[1] : sums[2]);
      if (me.c < kKinds) ptx::store_shared(area + GroupArea::kSums + (me.c * 32 + token) * 16 + me.warp * 4, mine);
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

// Producer warps, first half of an item: where rows come from and wait, norms, beta (gates: prepare_gates.cuh).
//
// A warp owns 32 of the 128 key channels and all 32 tokens, so the gate never leaves the warp. Fragment layout: lane
// = 4*g + c holds 8 channels (8c..8c+7) of tokens a = tau(g) and b = 15 - a of each block: at every dyadic level one
// of the two is a row and the other a column (H-5a).
#pragma once

#include "cuda/kernels/common/hold.cuh"
#include "cuda/kernels/prefill_fused/gate.cuh"
#include "cuda/kernels/prefill_fused/work.cuh"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/mma.h"

namespace kda::cuda::prefill_fused {

struct ProducerLane {
  int group;  // of the CTA
  int warp;   // of the group, 0..3
  int lane;
  int g, c;     // lane / 4, lane % 4
  int token_a;  // in a block; 16-byte stores of lanes 4g..4g+7 then hit eight different 16-byte columns
  int token_b;
  __device__ ProducerLane(int thread, int group_of_cta) : group(group_of_cta) {
    warp = (thread >> 5) & 3;
    lane = thread & 31;
    g = lane >> 2;
    c = lane & 3;
    token_a = ((g & 1) << 2) | (g >> 1);
    token_b = 15 - token_a;
  }
  __device__ int index() const { return warp * 32 + lane; }  // in the group
  // What a warp has to do besides its channels. In the next group other warps, so that the SM's schedulers, which
  // have a warp of each group, get as much to do.
  __device__ int duty() const { return (warp + 2 * group + 2) & 3; }
};
// The solve's first two block columns and then its last step, the other two, the betas, sending operands.
enum Duty { kSolves = 0, kSolvesLast = 1, kHasBetas = 2, kSends = 3 };

// Hides a value's origin: it stays in its register (reading the thread's index or the shared window anew costs tens
// of cycles), and what is computed from it is not kept across the item loop. Against ptxas: hold.
__device__ __forceinline__ uint32_t renew(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
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
  uint4 q[2][2][1], k[2][2][1];  // [block][token a, token b], 8 channels
};

// Raw gates of a lane's tokens, 8 channels each, as they lie in memory: loaded an item ahead. fp32 gates hold one
// block at a time.
template <class GateT>
struct RawGates;
template <>
struct RawGates<uint32_t> {
  static constexpr int kBlocks = 2;
  uint4 x[2][2][1];  // [block][token a, token b]
};
template <>
struct RawGates<float2> {
  static constexpr int kBlocks = 1;
  uint4 x[1][2][2];
};

// Rows of an item that wait in shared memory, copied an item ahead without registers: q, k and bf16 gates, [32 rows]
// of 256 bytes each. The 64-byte halves of a 128-byte line change places so that neither loads of 8 channels by
// tokens a and b nor those of a channel pair of both blocks meet in a bank.
struct RowsAhead {
  static constexpr uint32_t kTensor = 8192, kQ = 0, kK = kTensor, kGate = 2 * kTensor, kBytes = 3 * kTensor;
  uint32_t rows;
  // Of tokens of block 0, `column` a multiple of 16 bytes. Block 1 lies at (x ^ 64) + 4096.
  static __device__ uint32_t offset(uint32_t token, uint32_t column) {
    return token * 256 + (column ^ ((token >> 2) & 1) * 64);
  }
};

// What a producer group keeps of its open work, in shared memory: byte addresses of the sequence's first token.
struct Source {
  static constexpr uint32_t kQ = 0, kK = kQ + 8, kGate = 16, kBeta = 24, kItems = 32,  // in GroupArea::kSource
      kFactors = 40,   // of the gate: {factor, lower bound * log2(e)}
      kSteps = 56,     // bytes of a token row of q, k
      kGateStep = 80,  // and of the gate
      kBetaStep = 88;  // of beta, 64 bits
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
template <Gate kGate, class GateT>
__device__ __forceinline__ uint32_t padding_gate() {
  if (kGate == Gate::kPlain) return 0u;
  return sizeof(GateT) == 4 ? 0xff80ff80u : 0xff800000u;
}

// One instruction; the launcher's caller keeps 32 rows below 2^32 bytes.
__device__ __forceinline__ uint64_t step_bytes(uint32_t rows, uint32_t bytes) {
  return static_cast<uint64_t>(rows) * bytes;
}

// base + row * step.
__device__ __forceinline__ const char* row_address(const char* base, uint32_t row, uint32_t step) {
  const uint64_t at = ptx::multiply_add_wide(row, step, reinterpret_cast<uint64_t>(base));
  return reinterpret_cast<const char*>(at);
}

// Rows [first_row, first_row + rows) of the initial state into the L2: the consumers will want it some items from
// now.
__device__ __forceinline__ void prefetch_state(const Params& p, const Work& work, uint32_t first_row, uint32_t rows) {
  const StateSource source = work_source(p, work);
  if (source.base == nullptr || work.is_map) return;
  const int size = source.type == Real::kF32 ? 4 : 2;
  const int64_t first = source.offset + first_row * kDim;
  const char* at = static_cast<const char*>(source.base) + first * size;
  if ((reinterpret_cast<uintptr_t>(at) & 15) == 0)
    ptx::prefetch_block_to_l2(at, rows * kDim * static_cast<uint32_t>(size));
}

__device__ __forceinline__ int beta_size(const Params& p) { return p.beta_type == Real::kF32 ? 4 : 2; }

// What a group keeps of a work's rows, to `source`: by one thread.
template <class GateT>
__device__ __forceinline__ void open_rows(const Params& p, const Work& work, uint32_t source) {
  const int query_head = work.head / (p.value_heads / p.heads);
  const auto bytes = [](const void* base, int64_t elements, int size) {
    return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(base)) + static_cast<uint64_t>(elements * size);
  };
  ptx::store_shared(source + Source::kQ, bytes(p.q, row_offset(p.q_rows, work, 0, query_head), 2));
  ptx::store_shared(source + Source::kK, bytes(p.k, row_offset(p.k_rows, work, 0, query_head), 2));
  ptx::store_shared(source + Source::kGate,
                    bytes(p.gate, row_offset(p.gate_rows, work, 0, work.head), sizeof(GateT) / 2));
  ptx::store_shared(source + Source::kBeta, bytes(p.beta, row_offset(p.beta_rows, work, 0, work.head), beta_size(p)));
  const uint32_t last = item_total(work.span.length) - 1;
  ptx::store_shared(source + Source::kItems,
                    uint2{last, static_cast<uint32_t>(work.span.length - int64_t{last} * kChunk)});
}

// Of a head's gate, for the thread of a group that keeps channel `index`: asked for before it is needed.
struct HeadGate {
  float bias, a_log;
};
__device__ __forceinline__ HeadGate load_head(const Params& p, int head, int index) {
  return {p.dt_bias != nullptr ? p.dt_bias[static_cast<int64_t>(head) * kDim + index] : 0.0f,
          p.a_log != nullptr ? p.a_log[head] : 0.0f};
}
// And what a group keeps of a work's head: a channel a thread, the rest by thread 64, since thread 0 opens rows.
template <class GateT>
__device__ __forceinline__ void open_head(const Params& p, const HeadGate& head, uint32_t area, int index) {
  const uint32_t source = area + GroupArea::kSource;
  if (index == 64) {
    const float factor = gate_factor(head.a_log, p.a_log != nullptr);
    ptx::store_shared(source + Source::kFactors, float2{factor, p.lower_bound * kLog2e});
    ptx::store_shared(source + Source::kSteps,
                      uint2{2 * static_cast<uint32_t>(p.q_rows.token), 2 * static_cast<uint32_t>(p.k_rows.token)});
    ptx::store_shared(source + Source::kGateStep,
                      static_cast<uint32_t>(sizeof(GateT) / 2) * static_cast<uint32_t>(p.gate_rows.token));
    ptx::store_shared(source + Source::kBetaStep, static_cast<uint64_t>(p.beta_rows.token * beta_size(p)));
  }
  ptx::store_shared(area + GroupArea::kBias + index * 4, head.bias);
}

// Tokens of item `index` of the open work, at most kChunk; 0 behind its end.
__device__ __forceinline__ int item_count(uint32_t area, int index) {
  const uint2 last = ptx::load_shared_u2(area + GroupArea::kSource + Source::kItems);
  const auto item = static_cast<uint32_t>(index);
  return item < last.x ? kChunk : (item == last.x ? static_cast<int>(last.y) : 0);
}

// Address of byte `column` of the item's first row in a tensor of the open work.
__device__ __forceinline__ const char* source_row(uint32_t area, uint32_t tensor, int index, uint32_t step,
                                                  uint32_t column) {
  const uint64_t base = ptx::load_shared_u64(area + GroupArea::kSource + tensor);
  return row_address(reinterpret_cast<const char*>(base + column), static_cast<uint32_t>(index) * kChunk, step);
}

// f(block, side, address) for this lane's tokens of blocks [first, first + kBlocks) from base + token * step bytes;
// the rows from token `last` + 1 on, which do not exist, are read as row `last`.
template <int kBlocks, class F>
__device__ __forceinline__ void for_tokens(const char* base, uint32_t step, int first, int last,
                                           const ProducerLane& me, const F& f) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int token = 16 * (first + block) + (side == 0 ? me.token_a : me.token_b);
      f(block, side, row_address(base, min(token, last), step));
    }
  }
}
template <int kBlocks, int kParts>
__device__ __forceinline__ void load_tokens(uint4 (&x)[kBlocks][2][kParts], const char* base, uint32_t step,
                                            int first, int last, const ProducerLane& me) {
  for_tokens<kBlocks>(base, step, first, last, me, [&](int block, int side, const char* at) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) x[block][side][part] = ptx::load_global_16(at + 16 * part);
  });
}

// Rows from `count` on become `padding` (H-7). Only the last item of a sequence needs it.
template <int kBlocks, int kParts>
__device__ __forceinline__ void pad_tokens(uint4 (&x)[kBlocks][2][kParts], int first, int count, uint32_t padding,
                                           const ProducerLane& me) {
  if (__builtin_expect(count >= kChunk, 1)) return;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int token = 16 * (first + block) + (side == 0 ? me.token_a : me.token_b);
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        if (token >= count) x[block][side][part] = uint4{padding, padding, padding, padding};
    }
  }
}

// Where the open work's rows of q and k are: read some time before it is needed.
struct RowSource {
  uint4 bases;  // of q and k, 64 bits each
  uint2 steps;
};
__device__ __forceinline__ RowSource load_row_source(uint32_t area) {
  return {ptx::load_shared_u4(area + GroupArea::kSource + Source::kQ),
          ptx::load_shared_u2(area + GroupArea::kSource + Source::kSteps)};
}
__device__ __forceinline__ void load_rows(RawRows& raw, const RowSource& from, int index, int count,
                                          const ProducerLane& me) {
  const uint32_t column = 2 * (32 * me.warp + 8 * me.c);
  const auto row = [&](uint32_t low, uint32_t high, uint32_t step) {
    const uint64_t base = (static_cast<uint64_t>(high) << 32 | low) + column;
    return row_address(reinterpret_cast<const char*>(base), static_cast<uint32_t>(index) * kChunk, step);
  };
  load_tokens(raw.q, row(from.bases.x, from.bases.y, from.steps.x), from.steps.x, 0, count - 1, me);
  load_tokens(raw.k, row(from.bases.z, from.bases.w, from.steps.y), from.steps.y, 0, count - 1, me);
}

// Copies an item's rows to where they wait: whole rows, by all warps.
__device__ __forceinline__ void copy_rows_ahead(uint32_t area, int index, int count, const RowsAhead& to,
                                                const ProducerLane& me) {
  const uint2 steps = ptx::load_shared_u2(area + GroupArea::kSource + Source::kSteps);
  const uint32_t gate_step = ptx::load_shared_u32(area + GroupArea::kSource + Source::kGateStep);
  const int row = 2 * me.warp + (me.lane >> 4);
  const uint32_t column = (me.lane & 15) * 16, target = to.rows + RowsAhead::offset(row, column);
  const auto copy = [&](uint32_t tensor, uint32_t step, uint32_t first) {
    const char* base = source_row(area, tensor, index, step, column);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::copy_async_16((target ^ (i >> 1) * 64) + first + i * 2048,
                         row_address(base, min(row + 8 * i, count - 1), step), 16);
  };
  copy(Source::kGate, gate_step, RowsAhead::kGate);
  copy(Source::kQ, steps.x, RowsAhead::kQ);
  copy(Source::kK, steps.y, RowsAhead::kK);
  ptx::copy_async_commit();
}
// This lane's rows of q and k.
__device__ __forceinline__ void take_rows(RawRows& raw, const RowsAhead& from, const ProducerLane& me) {
  const uint32_t column = 64 * me.warp + 16 * me.c;
  const uint32_t at[2] = {from.rows + RowsAhead::offset(me.token_a, column),
                          from.rows + RowsAhead::offset(me.token_b, column)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t place = i < 2 ? at[i] : (at[i - 2] ^ 64) + 4096;
    raw.q[i / 2][i % 2][0] = ptx::load_shared_u4(place + RowsAhead::kQ);
    raw.k[i / 2][i % 2][0] = ptx::load_shared_u4(place + RowsAhead::kK);
  }
}
// This warp's raw gates that wait, from token `count` on, become `padding` (H-7).
__device__ __forceinline__ void pad_gates_ahead(const RowsAhead& at, int count, uint32_t padding,
                                                const ProducerLane& me) {
  if (__builtin_expect(count >= kChunk, 1)) return;
#pragma unroll 1
  for (int token = me.lane >> 2; token < kChunk; token += 8) {
    if (token < count) continue;
    const uint32_t block = token >> 4, place = RowsAhead::offset(token & 15, 64 * me.warp + 16 * me.c);
    ptx::store_shared(at.rows + RowsAhead::kGate + (place ^ block * 64) + block * 4096,
                      uint4{padding, padding, padding, padding});
  }
}

// Gates of blocks [first, first + kBlocks).
template <Gate kGate, class GateT>
__device__ __forceinline__ void load_gates(RawGates<GateT>& raw, uint32_t area, int index, int first, int count,
                                           const ProducerLane& me) {
  constexpr uint32_t kSize = sizeof(GateT) / 2;
  const uint32_t step = ptx::load_shared_u32(area + GroupArea::kSource + Source::kGateStep);
  const char* base = source_row(area, Source::kGate, index, step, kSize * (32 * me.warp + 8 * me.c));
  load_tokens(raw.x, base, step, first, count - 1, me);
}

// Where beta of token `lane` of an item of the open work lies.
__device__ __forceinline__ const char* beta_address(uint32_t area, int index, int lane) {
  const uint64_t base = ptx::load_shared_u64(area + GroupArea::kSource + Source::kBeta);
  const uint64_t step = ptx::load_shared_u64(area + GroupArea::kSource + Source::kBetaStep);
  return reinterpret_cast<const char*>(base) + static_cast<uint32_t>(index * kChunk + lane) * step;
}

// Asks the L2 for rows of q (tensor 0) or k (1) of a later item of the open work, kBytes of each from `first` on:
// lane = token.
template <int kBytes>
__device__ __forceinline__ void prefetch_rows(uint32_t area, int index, uint32_t tensor, uint32_t first,
                                              const ProducerLane& me) {
  const uint32_t source = area + GroupArea::kSource;
  const uint64_t base = ptx::load_shared_u64(source + Source::kQ + 8 * tensor) + first;
  const uint32_t step = ptx::load_shared_u32(source + Source::kSteps + 4 * tensor);
  if (me.lane >= item_count(area, index)) return;
  const char* at = row_address(reinterpret_cast<const char*>(base), index * kChunk + me.lane, step);
#pragma unroll
  for (int i = 0; i < kBytes; i += 64) ptx::prefetch_to_l2(at + i);
}

// The raw beta of token `lane` of an item, as it lies in memory: widened only when it is needed (raw_beta).
__device__ __forceinline__ uint32_t load_raw_beta(const Params& p, uint32_t area, int index, int lane) {
  const char* at = beta_address(area, index, lane);
  return p.beta_type == Real::kF32 ? *reinterpret_cast<const uint32_t*>(at) : *reinterpret_cast<const uint16_t*>(at);
}
__device__ __forceinline__ float raw_beta(const Params& p, uint32_t raw) {
  return __uint_as_float(p.beta_type == Real::kF32 ? raw : raw << 16);
}

__device__ __forceinline__ float load_prefix(uint32_t scratch, int token, int channel) {
  return ptx::load_shared_f1(scratch + prefix_offset(token, channel >> 2) + (channel & 3) * 4);
}

// This lane's share of x.y for its token, in lanes with c = g / 2: on the tensor cores, exact products of bf16. Of
// the rows (x.x, x.y) of 8 tokens times the columns y.x, then y.y, the diagonals are wanted.
__device__ __forceinline__ float token_product(const uint4& x, const uint4& y, bool odd) {
  float even_words[4] = {}, odd_words[4] = {};
  ptx::mma_m16n8k8_bf16(even_words, x.x, x.y, y.x);
  ptx::mma_m16n8k8_bf16(odd_words, x.x, x.y, y.y);
  ptx::mma_m16n8k8_bf16(even_words, x.z, x.w, y.z);
  ptx::mma_m16n8k8_bf16(odd_words, x.z, x.w, y.w);
  return odd ? even_words[1] + odd_words[3] : even_words[0] + odd_words[2];
}

// A block's raw rows of both tokens.
struct BlockRows {
  uint4 q[2], k[2];
};
__device__ __forceinline__ BlockRows block_rows(const RawRows& raw, int block) {
  return {{raw.q[block][0][0], raw.q[block][1][0]}, {raw.k[block][0][0], raw.k[block][1][0]}};
}

// Writes this warp's share of |q|^2, |k|^2 (and q.k) of every token; a group barrier must follow.
template <int kKinds, int kUnroll>
__device__ __forceinline__ void write_sums(const RawRows& raw, const ProducerLane& me, uint32_t area) {
  const bool odd = (me.g & 1) != 0;
  const bool writes = me.c == me.g >> 1;
  uint32_t at_a = area + GroupArea::kSums + me.warp * 4 + me.token_a * 16;
  uint32_t at_b = area + GroupArea::kSums + me.warp * 4 + me.token_b * 16;
  BlockRows rows = block_rows(raw, 0);
#pragma unroll kUnroll
  for (int block = 0; block < 2; ++block) {  // kUnroll 1: all products at once would take too many registers
    float sums[2][kKinds];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      sums[side][0] = token_product(rows.q[side], rows.q[side], odd);
      sums[side][1] = token_product(rows.k[side], rows.k[side], odd);
      if constexpr (kKinds == 3) sums[side][2] = token_product(rows.q[side], rows.k[side], odd);
    }
    if (writes) {
#pragma unroll
      for (int kind = 0; kind < kKinds; ++kind) {
        ptx::store_shared(at_a + kind * 512, sums[0][kind]);
        ptx::store_shared(at_b + kind * 512, sums[1][kind]);
      }
    }
    at_a += 256, at_b += 256;
    rows = block_rows(raw, 1);
  }
}

enum SumKind { kSumQ = 0, kSumK = 1, kSumQK = 2 };

__device__ __forceinline__ float load_sum(uint32_t area, int kind, int token) {
  const float4 x = ptx::load_shared_f4(area + GroupArea::kSums + (kind * 32 + token) * 16);
  return (x.x + x.y) + (x.z + x.w);
}

// Factor that normalises a row with this sum of squares (E-4).
__device__ __forceinline__ float norm_factor(bool normalize, float sum) {
  return normalize ? ptx::rsqrt_approx(sum + 1e-6f) : 1.0f;
}
__device__ __forceinline__ float norm_factor(const Params& p, float sum) {
  return norm_factor(p.normalize != 0, sum);
}

}  // namespace kda::cuda::prefill_fused

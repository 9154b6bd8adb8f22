// Segment maps of any shape (spec S-9): what a run of tokens does to a state, St_out = St_in M + B, and maps applied
// in order.
//
// summarize_segment_kernel
// Equations  E-1, E-4, E-5, E-7 per token on V + K state rows (S-3): the first V take v and start from zero, which
//            gives B; the others take zeros and start from the identity, which gives M. No outputs, no q.
// Grid       x = (value head, slice of the V + K rows), y and z = sequence.
// Block      as prefill_portable_kernel: warps own rows in registers, all prepare tokens in shared memory.
// Waiting    two block barriers a chunk of tokens. No block waits for a block (F28).
// Precision  fp32 throughout, decays in two terms (S-7).
// Limits     K, V <= 256. Serial in the tokens.
//
// merge_summaries_kernel
// Equations  S-4 in token order: St := St M_p + B_p; an absent segment is the identity and is not read.
// Grid       x = (value head, kMergeRows of its value rows), which never meet.
// Block      a thread a column: its rows of St in registers, all columns of them in shared memory for the product.
// Waiting    two block barriers a segment.
// Precision  fp32, one chain of fused multiply-adds from B_p in the order of the channels: the same bits everywhere.
//
// merge_maps_kernel: the same equations and bits, faster
// Grid       x = (value head, kMapRows of its value rows), which never meet.
// Block      a thread two columns of four rows; maps come by bulk copies, up to three ahead (map_ring.cuh).
// Waiting    two block barriers a segment, and a map's own mbarrier.
// Limits     K = 128, whole kMapRows rows, maps at multiples of 16 bytes.
#pragma once

#include "cuda/kernels/prefill_portable/kernel.cuh"
#include "cuda/kernels/segments/map_ring.cuh"
#include "cuda/kernels/segments/params.h"
#include "cuda/ptx/signal.h"

namespace kda::cuda {

// Tokens without q; rows of the map behind V have no values.
template <class Slot_>
struct SummarySource {
  using Slot = Slot_;
  using Input = PartInput<Slot>;
  const SummaryParams& p;
  const HeadPlace& at;

  __device__ __forceinline__ VectorRef row_of(const TokenRef& x, int t, int32_t head, int32_t first,
                                              int32_t n) const {
    return {x.data, x.offset(at.span.batch, at.span.begin + t, head) + first, n, x.dtype, x.vectors != 0};
  }

  __device__ __forceinline__ void gather(Input& in, Part part, int t) const {
    if (part == Part::kScalar) {
      in.beta = load_bits(p.beta.data, p.beta.offset(at.span.batch, at.span.begin + t, at.head), p.beta.dtype);
    } else if (part == Part::kKey) {
      in.bits.gather(row_of(p.k, t, at.query_head, 0, p.form.keys));
    } else if (part == Part::kValue) {
      const int32_t rows = max(0, min(at.rows, p.values - at.first_row));
      in.bits.gather(row_of(p.v, t, at.head, rows > 0 ? at.first_row : 0, rows));
    }
    in.decay.gather(p.gate_rule, row_of(p.gate, t, at.head, 0, p.form.keys), part, at.head);
  }

  __device__ __forceinline__ void finish(const Input& in, Part part, int, Slot& s) const {
    in.decay.finish(p.gate_rule, p.gate.dtype, p.form.keys, part, s.decay);
    in.decay.finish_low(p.gate_rule, p.gate.dtype, p.form.keys, part, s.decay, s.decay_low);
    if (part == Part::kScalar) {
      if (lane_id() == 0)
        s.beta = beta_value(float_of_bits(in.beta, p.beta.dtype), p.form.beta_logits != 0, p.form.beta_doubled != 0);
    } else if (part != Part::kQuery) {
      float x[Input::kLanes];
      in.bits.convert(x, p.form.io, (part == Part::kKey ? p.k : p.v).vectors != 0);
      if (part == Part::kValue) finish_values(x, Slot::kValues, s.v);
      else finish_normalised(x, p.form.qk_norm != 0, s.k);
    }
  }
};

// The map of no tokens: zero above row V, the identity from there on.
template <class Tile>
__device__ __forceinline__ void load_identity(Tile& tile, int first, int32_t values) {
#pragma unroll
  for (int slot = 0; slot < Tile::kSlots; ++slot) {
#pragma unroll
    for (int e = 0; e < Tile::kElements; ++e)
      tile.s[slot][e] = first + Tile::row_of(slot) - values == Tile::key_of(e) ? 1.0f : 0.0f;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    summarize_segment_kernel(const __grid_constant__ SummaryParams p) {
  using Tile = typename C::Tile;
  using Slot = typename C::Slot;
  Slot* const s = token_slots<Slot>();
  HeadPlace at = place_of_block(p.form, p.split);
  wait_for_previous_grid();
  if (at.n >= active_sequences(p.sequences)) return;
  at.span = sequence_span(p.sequences, at.n);
  const WarpRows<Tile> rows(at, p.split, p.form);
  Tile tile;
  load_identity(tile, rows.first, p.values);
  const SummarySource<Slot> source{p, at};
  walk_tokens(source, length_of(at), p.split.chunk, s, rows.any, [&](int, const Slot& slot) {
    tile.decay(slot.decay, slot.decay_low);
    const float v = row_exists<Tile>(rows.mine, at) ? slot.v[rows.mine] : 0.0f;
    (void)tile.token(slot.k, slot.k, slot.beta, v, 0.0f);
  });
  if (!rows.any) return;
  store_rows(tile, p.summary, Dtype::kFp32, at.n * p.stride + head_offset(p.form, at.head), rows.first, p.form);
}

template <int kColumns>
__global__ void __launch_bounds__(kColumns) merge_summaries_kernel(const __grid_constant__ MergeParams p) {
  __shared__ float s_rows[kColumns][kMergeRows];  // [input channel][row]
  wait_for_previous_grid();
  const int parts = (p.values + kMergeRows - 1) / kMergeRows;
  const int head = static_cast<int>(blockIdx.x) / parts;
  const int first = (static_cast<int>(blockIdx.x) - head * parts) * kMergeRows;
  const int column = static_cast<int>(threadIdx.x);
  const int rows = column < p.keys ? min(kMergeRows, p.values - first) : 0;  // that this thread has
  const int64_t state_at = (static_cast<int64_t>(head) * p.values + first) * p.keys + column;
  const int64_t map_at = static_cast<int64_t>(head) * (p.values + p.keys) * p.keys + min(column, p.keys - 1);
  const auto store = [&](float* to, const float(&row)[kMergeRows]) {
#pragma unroll
    for (int r = 0; r < kMergeRows; ++r)
      if (r < rows) to[state_at + static_cast<int64_t>(r) * p.keys] = row[r];
  };
  float row[kMergeRows];
#pragma unroll
  for (int r = 0; r < kMergeRows; ++r)
    row[r] = p.initial != nullptr && r < rows ? p.initial[state_at + static_cast<int64_t>(r) * p.keys] : 0.0f;
#pragma unroll 1
  for (int64_t segment = 0; segment < p.segments; ++segment) {
    if (p.starts != nullptr) store(p.starts + segment * p.start_stride, row);
    if (p.present != nullptr && p.present[segment * p.present_stride] == 0) continue;
    const float* B = p.summaries + segment * p.summary_stride + map_at + static_cast<int64_t>(first) * p.keys;
    const float* M = p.summaries + segment * p.summary_stride + map_at + static_cast<int64_t>(p.values) * p.keys;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kMergeRows; ++r) s_rows[column][r] = row[r];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kMergeRows; ++r) row[r] = r < rows ? B[static_cast<int64_t>(r) * p.keys] : 0.0f;
#pragma unroll 8
    for (int k = 0; k < p.keys; ++k) {
      const float m = M[static_cast<int64_t>(k) * p.keys];
#pragma unroll
      for (int r = 0; r < kMergeRows; ++r) row[r] = __fmaf_rn(s_rows[k][r], m, row[r]);
    }
  }
  if (p.final != nullptr) store(p.final, row);
}

inline __global__ void __launch_bounds__(kMapThreads) merge_maps_kernel(const __grid_constant__ MergeParams p) {
  extern __shared__ __align__(16) unsigned char s_dynamic[];
  MapRing ring(ptx::shared_address(s_dynamic));
  ring.init();
  __syncthreads();
  wait_for_previous_grid();
  const int parts = p.values / kMapRows;
  const int64_t head = static_cast<int>(blockIdx.x) / parts, part = static_cast<int>(blockIdx.x) % parts;
  const int64_t in_rows = (part * kMapRows + ring.row) * kMapDim + ring.column;
  const int64_t state_at = head * p.values * kMapDim + in_rows;
  const float* maps = p.summaries + head * (p.values + kMapDim) * kMapDim;
  const auto is_present = [&](int64_t segment) {
    return p.present == nullptr || p.present[segment * p.present_stride] != 0;
  };
  int64_t next = 0;  // segment that is fetched next, and its number among those that are present
  uint32_t fetched = 0;
  const auto fetch = [&] {
    while (next < p.segments && !is_present(next)) ++next;
    if (next < p.segments) ring.fetch(fetched++, maps + next++ * p.summary_stride + p.values * kMapDim);
  };
  if (threadIdx.x == 0) {
    ptx::fence_async_proxy_global();  // the maps were stored by ordinary stores
    for (uint32_t i = 0; i < MapShared::kRing; ++i) fetch();
  }
  MapTile tile = {};
  if (p.initial != nullptr) tile = load_tile(p.initial + state_at);
  for (int64_t segment = 0; segment < p.segments; ++segment) {
    if (p.starts != nullptr) store_tile(tile, p.starts + segment * p.start_stride + state_at);
    if (!is_present(segment)) continue;
    MapTile sum = load_tile(maps + segment * p.summary_stride + in_rows);
    ring.merge(sum, tile);
    if (threadIdx.x == 0) fetch();
    tile = sum;
  }
  if (p.final != nullptr) store_tile(tile, p.final + state_at);
}

}  // namespace kda::cuda

// What a block of the recurrent kernels works on: rows of a head's state, given to warps; and what it does to them.
#pragma once

#include "cuda/kernels/decode/params.h"
#include "cuda/kernels/recurrence/token.cuh"

namespace kda::cuda {

template <class Pool, class P>
__device__ __forceinline__ HeadState head_state(const P& p, int64_t slot, int32_t head) {
  const int64_t payload = static_cast<int64_t>(p.form.values) * p.form.keys;
  return {static_cast<Pool*>(p.pool.data) + slot * p.pool.slot_stride + head * payload, p.form.keys, p.form.values,
          p.vectors != 0};
}

// Output rows of an inactive sequence (P-5): this block's value rows of one head.
template <class P>
__device__ __forceinline__ void zero_outputs(const P& p, const HeadPlace& at, int32_t head) {
  for (int64_t t = 0; t < at.span.length; ++t) {
    const int64_t row = p.out.row(at.span.begin + t);
    if (row < 0) continue;
    const int64_t to = p.out.offset(at.span.batch, row, head) + at.first_row;
    for (int r = static_cast<int>(threadIdx.x); r < at.rows; r += static_cast<int>(blockDim.x)) {
      store_element(p.out.data, to + r, p.out.dtype, 0.0f);
    }
  }
}

__device__ __forceinline__ int32_t query_head_of(const AttentionForm& form, int32_t head) {
  return form.heads == form.value_heads ? head : head / (form.value_heads / form.heads);
}

// Grid: x = slices of the value heads of a sequence, so that neighbours read neighbouring states; y, z = sequence.
__device__ __forceinline__ HeadPlace place_of_block(const AttentionForm& form, const HeadSplit& split, int32_t x) {
  HeadPlace at;
  at.n = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const int32_t part = split.slices == 1 ? x : x / split.slices;
  at.head = part * split.heads;
  at.query_head = query_head_of(form, at.head);
  at.first_row = (x - part * split.slices) * split.rows_per_block;
  at.rows = min(split.rows_per_block, form.values - at.first_row);
  return at;
}

__device__ __forceinline__ HeadPlace place_of_block(const AttentionForm& form, const HeadSplit& split) {
  return place_of_block(form, split, static_cast<int32_t>(blockIdx.x));
}

// Tokens of a sequence; plans bound them below 2^31.
__device__ __forceinline__ int length_of(const HeadPlace& at) { return static_cast<int>(at.span.length); }

// Each warp's copy in shared memory: what a block knows of its row would cost two dozen registers.
struct RowPlace {
  HeadPlace at;
  DecodeRow row;
};

// V; known where the shape is exact, and then one pass of a block holds all of a head.
template <class Tile>
__device__ __forceinline__ int values_of(const AttentionForm& form) {
  return Tile::kExact ? 128 : form.values;
}

// `row` of the block is one of the head's; the warps of an exact shape that have rows have all of them.
template <class Tile>
__device__ __forceinline__ bool row_exists(int row, const HeadPlace& at) {
  return Tile::kExact || row < at.rows;
}

// A warp's rows of a head: which it has, and the row of the lane's results.
template <class Tile>
struct WarpRows {
  int first = 0;  // row of the head
  int mine = 0;   // row of the block that this lane's slot_of_lane() is
  bool any = false;

  __device__ __forceinline__ WarpRows(const HeadPlace& at, const HeadSplit& split, const AttentionForm& form) {
    first = at.first_row + warp_id() * Tile::kRows;
    mine = warp_id() * Tile::kRows + Tile::row_of(Tile::slot_of_lane());
    any = warp_id() < split.row_warps && first < values_of<Tile>(form);
  }
};

// Applies one prepared token to the decayed state and stores its output; gives u.
template <class Tile, class P, class Slot>
__device__ __forceinline__ float apply_token(Tile& tile, const P& p, const HeadPlace& at, int32_t head,
                                             const WarpRows<Tile>& rows, const Slot& s) {
  const float v = row_exists<Tile>(rows.mine, at) ? s.v[rows.mine] : 0.0f;
  const auto r = tile.token(s.k, s.q, s.beta, v, p.form.scale);
  if (Tile::owns_row() && row_exists<Tile>(rows.mine, at) && s.out_row >= 0) {
    store_element(p.out.data, p.out.offset(at.span.batch, s.out_row, head) + at.first_row + rows.mine, p.out.dtype,
                  r.o);
  }
  return r.u;
}

}  // namespace kda::cuda

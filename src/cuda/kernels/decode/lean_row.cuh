// Which rows a lean kernel's block works on: P-5, P-7, P-13, V-2, V-6 for the common call, in 32-bit arithmetic.
#pragma once

#include "cuda/kernels/decode/lean_params.h"
#include "cuda/kernels/recurrence/token.cuh"

namespace kda::cuda {

// All index values of a row by one load of the warp: lane c has slots[n, c], lanes from 16 on the others. Loads of
// uniform addresses would be waited for one by one, and an accepted count before the slot that it points at.
struct LeanIndex {
  static constexpr int kBegin = 16, kEnd = 17, kAccepted = 18, kActive = 19;
  int32_t value = -1;

  __device__ __forceinline__ void load(const LeanParams& p, int32_t n) {
    const int lane = lane_id();
    const int32_t* from = p.slots + static_cast<int64_t>(n) * p.slots_row + lane * p.slots_column;
    bool any = lane < p.columns;
    value = -1;
    if (lane == kBegin || lane == kEnd) {
      value = n + (lane - kBegin);
      from = p.cu + static_cast<int64_t>(value) * p.cu_stride, any = p.cu != nullptr;
    }
    if (lane == kAccepted) {
      value = 1;
      from = p.accepted + static_cast<int64_t>(n) * p.accepted_stride, any = p.accepted != nullptr;
    }
    if (lane == kActive) value = p.sequences, from = p.active, any = from != nullptr;
    if (any) value = load_index(from, true);
  }
  __device__ __forceinline__ int32_t get(int lane) const { return __shfl_sync(kFullMask, value, lane, 32); }
};

struct LeanRow {
  int32_t begin, length;
  int32_t accepted;
  int32_t first_slot, slot;  // of column 0; of the start column, in columns mode
  bool looked_at;
  bool active;  // in columns mode

  __device__ __forceinline__ LeanRow(const LeanParams& p, const LeanIndex& index, int32_t n) {
    begin = min(max(index.get(LeanIndex::kBegin), 0), p.tokens);
    length = max(min(max(index.get(LeanIndex::kEnd), 0), p.tokens) - begin, 0);
    accepted = index.get(LeanIndex::kAccepted);
    looked_at = n < index.get(LeanIndex::kActive);
    first_slot = index.get(0);
    slot = index.get((accepted - 1) & 15);
    active = static_cast<uint32_t>(accepted - 1) < static_cast<uint32_t>(p.columns) && is_live(p, slot) &&
             length <= p.columns;
  }

  static __device__ __forceinline__ bool is_live(const LeanParams& p, int32_t slot) {
    return static_cast<uint32_t>(slot) < static_cast<uint32_t>(p.pool_slots) && slot != p.null_slot;
  }
};

// committed_tokens() in 32 bits: a count widened beside its load would be waited for there.
__device__ __forceinline__ int32_t lean_committed(int32_t count, int32_t accepted, int32_t width) {
  if (static_cast<uint32_t>(count) > static_cast<uint32_t>(width)) return -1;
  if (count == 0) return 0;
  return static_cast<uint32_t>(accepted) <= static_cast<uint32_t>(count) ? accepted : -1;
}

// Sequence of a block, and whether it may start before the grid ahead has ended (recurrence/early.cuh).
__device__ __forceinline__ int32_t lean_sequence() {
  return static_cast<int32_t>(blockIdx.z * gridDim.y + blockIdx.y);
}
__device__ __forceinline__ bool lean_early(const LeanParams& p, int32_t n) {
  return static_cast<uint32_t>(n) * gridDim.x + blockIdx.x < static_cast<uint32_t>(p.wave);
}

// Output rows of an inactive sequence (P-5): value rows [first, first + rows) of one head. One thread a row.
__device__ __forceinline__ void lean_zero(const LeanParams& p, const LeanRow& row, int32_t head, int first, int rows,
                                          int thread) {
#pragma unroll 1
  for (int32_t t = 0; t < row.length && thread < rows; ++t)
    store_element(p.out.at(row.begin + t, head), first + thread, p.out_dtype, 0.0f);
}

}  // namespace kda::cuda

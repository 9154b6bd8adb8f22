// Sequences cut into segments (S-6), for few heads: three kernels.
//   1  prefill_fused_kernel, Pass::kSummaries  the end state of segment 0; B (from S := 0) and M (from S := I,
//                                              V := 0) of every later segment but the last, each a work of its own
//   2  merge_segments_kernel                   S_{p+1} = S_p M_p + B_p in order (S-4), fp32
//   3  prefill_fused_kernel, Pass::kSegments   all segments from S_p: outputs, final state
//
// merge: grid (sequences x heads) x 8 parts of 16 value rows, which never meet; a thread has two columns of four
// rows. Maps come ahead, by bulk copies into a ring: they do not depend on what is merged, so a step costs its
// arithmetic alone. The initial state goes to matrix 0 of the segment space, since the last segment may overwrite it
// in the pool before segment 0 is read. Precision: fp32 throughout (S-7 asks for two terms).
#pragma once

#include "cuda/kernels/prefill_fused/consume.cuh"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/signal.h"

namespace kda::cuda::prefill_fused {

constexpr int kMergeRows = 16;
constexpr int kMergeParts = kDim / kMergeRows;
constexpr int kMergeThreads = kMergeRows / 4 * kDim / 2;

struct MergeShared {
  static constexpr uint32_t kMapBytes = kMatrix * 4;
  static constexpr uint32_t kRing = 3;
  static constexpr uint32_t kMaps = 0;
  static constexpr uint32_t kRows = kMaps + kRing * kMapBytes;          // [input column][row] fp32
  static constexpr uint32_t kBarriers = kRows + kDim * kMergeRows * 4;  // full[ring]
  static constexpr uint32_t kBytes = kBarriers + 8 * kRing;
};

__device__ __forceinline__ float load_state_element(const StateSource& source, int64_t at) {
  if (source.base == nullptr) return 0.0f;
  if (source.type == Real::kF32) return static_cast<const float*>(source.base)[source.offset + at];
  const uint32_t x = static_cast<const uint16_t*>(source.base)[source.offset + at];
  return source.type == Real::kBf16 ? ptx::bf16_low(x) : ptx::unpack_f16(x).x;
}

// This thread's two columns of four rows.
struct MergeTile {
  float2 row[4];
};
__device__ __forceinline__ MergeTile load_tile(const float* from) {
  MergeTile tile;
#pragma unroll
  for (int r = 0; r < 4; ++r) tile.row[r] = *reinterpret_cast<const float2*>(from + r * kDim);
  return tile;
}
__device__ __forceinline__ void store_tile(const MergeTile& tile, float* to) {
#pragma unroll
  for (int r = 0; r < 4; ++r) *reinterpret_cast<float2*>(to + r * kDim) = tile.row[r];
}

// sum += rows * map; `rows` and `map`: this thread's four rows and two columns in shared memory. Operands are read a
// batch ahead of their products.
constexpr int kMergeBatch = 8;
struct MergeOperands {
  float2 map[kMergeBatch];
  float4 rows[kMergeBatch];
};
__device__ __forceinline__ void load_operands(MergeOperands& x, uint32_t rows, uint32_t map) {
#pragma unroll
  for (int k = 0; k < kMergeBatch; ++k) {
    x.map[k] = ptx::load_shared_f2(map + k * kDim * 4);
    x.rows[k] = ptx::load_shared_f4(rows + k * kMergeRows * 4);
  }
}
__device__ __forceinline__ void add_products(MergeTile& sum, const MergeOperands& x) {
#pragma unroll
  for (int k = 0; k < kMergeBatch; ++k) {
    const float a[4] = {x.rows[k].x, x.rows[k].y, x.rows[k].z, x.rows[k].w};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      sum.row[r].x = fmaf(a[r], x.map[k].x, sum.row[r].x);
      sum.row[r].y = fmaf(a[r], x.map[k].y, sum.row[r].y);
    }
  }
}
__device__ __forceinline__ void add_product(MergeTile& sum, uint32_t rows, uint32_t map) {
  constexpr uint32_t kRowStep = kMergeBatch * kMergeRows * 4, kMapStep = kMergeBatch * kDim * 4;
  MergeOperands now, next;
  load_operands(now, rows, map);
#pragma unroll 2
  for (int batch = 0; batch < kDim / kMergeBatch - 2; batch += 2) {
    load_operands(next, rows += kRowStep, map += kMapStep);
    add_products(sum, now);
    load_operands(now, rows += kRowStep, map += kMapStep);
    add_products(sum, next);
  }
  load_operands(next, rows + kRowStep, map + kMapStep);
  add_products(sum, now);
  add_products(sum, next);
}

// Brings the map of segment `segment` to its place of the ring. One thread.
__device__ __forceinline__ void fetch_map(const Params& p, int64_t sequence, int head, int segment, uint32_t shared) {
  const uint32_t slot = static_cast<uint32_t>(segment - 1) % MergeShared::kRing;
  const uint32_t full = shared + MergeShared::kBarriers + slot * 8;
  ptx::mbarrier_arrive_expect(full, MergeShared::kMapBytes);
  ptx::bulk_load(shared + MergeShared::kMaps + slot * MergeShared::kMapBytes,
                 segment_matrix(p, sequence, head, p.segments - 1 + segment), MergeShared::kMapBytes, full);
}

__global__ void __launch_bounds__(kMergeThreads) merge_segments_kernel(const __grid_constant__ Params p) {
  const uint32_t shared = ptx::shared_address(s_memory);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < MergeShared::kRing; ++i) ptx::mbarrier_init(shared + MergeShared::kBarriers + i * 8, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::wait_for_prerequisites();
  const int64_t unit = blockIdx.x / kMergeParts;
  const int64_t sequence = unit / p.value_heads;
  const int head = static_cast<int>(unit - sequence * p.value_heads);
  if (sequence >= active_sequences(p)) return;
  const int64_t length = sequence_span(p, sequence).length;
  const int64_t tokens = segment_length(p, length);
  const Slots slots = sequence_slots(p, sequence);
  if (length <= tokens || !slots.is_active) return;
  const int segments = static_cast<int>((length + tokens - 1) / tokens);
  if (threadIdx.x == 0) {
    ptx::fence_async_proxy_global();  // the maps were stored by ordinary stores
    for (int s = 1; s + 1 < segments && s <= static_cast<int>(MergeShared::kRing); ++s)
      fetch_map(p, sequence, head, s, shared);
  }
  const int column = 2 * (threadIdx.x % (kDim / 2)), group = threadIdx.x / (kDim / 2);
  const int64_t first = (static_cast<int64_t>(blockIdx.x % kMergeParts) * kMergeRows + 4 * group) * kDim + column;
  const StateSource initial = pool_source(p, slots, head);
  MergeTile tile;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    tile.row[r].x = load_state_element(initial, first + r * kDim);
    tile.row[r].y = load_state_element(initial, first + r * kDim + 1);
  }
  store_tile(tile, segment_matrix(p, sequence, head, 0) + first);
  tile = load_tile(segment_matrix(p, sequence, head, 1) + first);
  const uint32_t rows = shared + MergeShared::kRows + group * 16;
  uint32_t slot = 0, parity = 0;
  for (int segment = 1; segment + 1 < segments; ++segment) {
    float* next = segment_matrix(p, sequence, head, segment + 1) + first;
    MergeTile sum = load_tile(next);
    ptx::store_shared(rows + column * kMergeRows * 4,
                      float4{tile.row[0].x, tile.row[1].x, tile.row[2].x, tile.row[3].x});
    ptx::store_shared(rows + (column + 1) * kMergeRows * 4,
                      float4{tile.row[0].y, tile.row[1].y, tile.row[2].y, tile.row[3].y});
    __syncthreads();
    ptx::mbarrier_wait(shared + MergeShared::kBarriers + slot * 8, parity);
    add_product(sum, rows, shared + MergeShared::kMaps + slot * MergeShared::kMapBytes + column * 4);
    __syncthreads();  // rows and map are read no more
    const int ahead = segment + static_cast<int>(MergeShared::kRing);
    if (threadIdx.x == 0 && ahead + 1 < segments) fetch_map(p, sequence, head, ahead, shared);
    store_tile(sum, next);
    tile = sum;
    slot = slot + 1 == MergeShared::kRing ? 0 : slot + 1;
    parity ^= slot == 0 ? 1 : 0;
  }
}

}  // namespace kda::cuda::prefill_fused

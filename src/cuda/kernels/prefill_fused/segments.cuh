// Sequences cut into segments (S-6), for few heads: three kernels.
//   1  prefill_fused_kernel, Pass::kSummaries  the end state of segment 0; B (from S := 0) and M (from S := I,
//                                              V := 0) of every later segment but the last, each a work of its own
//   2  merge_segments_kernel                   S_{p+1} = S_p M_p + B_p in order (S-4), fp32
//   3  prefill_fused_kernel, Pass::kSegments   all segments from S_p: outputs, final state
//
// merge: grid (sequences x heads) x 8 parts of 16 value rows, which never meet (map_ring.cuh). The initial
// state goes to matrix 0 of the segment space, since the last segment may overwrite it in the pool before segment 0
// is read. Precision: fp32 throughout (S-7 asks for two terms).
#pragma once

#include "cuda/kernels/prefill_fused/consume.cuh"
#include "cuda/kernels/segments/map_ring.cuh"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/signal.h"

namespace kda::cuda::prefill_fused {

constexpr int kMergeParts = kDim / kMapRows;

__device__ __forceinline__ float load_state_element(const StateSource& source, int64_t at) {
  if (source.base == nullptr) return 0.0f;
  if (source.type == Real::kF32) return static_cast<const float*>(source.base)[source.offset + at];
  const uint32_t x = static_cast<const uint16_t*>(source.base)[source.offset + at];
  return source.type == Real::kBf16 ? ptx::bf16_low(x) : ptx::unpack_f16(x).x;
}

__global__ void __launch_bounds__(kMapThreads) merge_segments_kernel(const __grid_constant__ Params p) {
  MapRing ring(ptx::shared_address(s_memory));
  ptx::launch_dependents();
  ring.init();
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
  const auto fetch = [&](int segment) {
    if (segment + 1 < segments)
      ring.fetch(static_cast<uint32_t>(segment - 1), segment_matrix(p, sequence, head, p.segments - 1 + segment));
  };
  if (threadIdx.x == 0) {
    ptx::fence_async_proxy_global();  // the maps were stored by ordinary stores
    for (int s = 1; s <= static_cast<int>(MapShared::kRing); ++s) fetch(s);
  }
  const int64_t first = (static_cast<int64_t>(blockIdx.x % kMergeParts) * kMapRows + ring.row) * kDim + ring.column;
  const StateSource initial = pool_source(p, slots, head);
  MapTile tile;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    tile.row[r].x = load_state_element(initial, first + r * kDim);
    tile.row[r].y = load_state_element(initial, first + r * kDim + 1);
  }
  store_tile(tile, segment_matrix(p, sequence, head, 0) + first);
  tile = load_tile(segment_matrix(p, sequence, head, 1) + first);
  for (int segment = 1; segment + 1 < segments; ++segment) {
    float* next = segment_matrix(p, sequence, head, segment + 1) + first;
    MapTile sum = load_tile(next);
    ring.merge(sum, tile);
    if (threadIdx.x == 0) fetch(segment + static_cast<int>(MapShared::kRing));
    store_tile(sum, next);
    tile = sum;
  }
}

}  // namespace kda::cuda::prefill_fused

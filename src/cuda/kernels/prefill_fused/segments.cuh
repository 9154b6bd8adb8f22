// Sequences cut into segments (S-6), for few heads: three kernels.
//   1  prefill_fused_kernel, Pass::kSummaries  the end state of segment 0; B (from S := 0) and M (from S := I, V :=
//   0)
//                                              of every later segment but the last, each a work of its own
//   2  merge_segments_kernel                   S_{p+1} = S_p M_p + B_p in order (S-4), fp32
//   3  prefill_fused_kernel, Pass::kSegments   all segments from S_p: outputs, final state
//
// merge: grid (sequences x heads) x 16 parts of 8 value rows, which never meet; thread = column. The initial state
// goes to matrix 0 of the segment space, since the last segment may overwrite it in the pool before segment 0 is
// read. Precision: fp32 throughout (S-7 asks for two terms).
#pragma once

#include "cuda/kernels/prefill_fused/consume.cuh"
#include "cuda/ptx/grid.h"

namespace kda::cuda::prefill_fused {

constexpr int kMergeRows = 8;
constexpr int kMergeParts = kDim / kMergeRows;

__device__ __forceinline__ float load_state_element(const StateSource& source, int64_t at) {
  if (source.base == nullptr) return 0.0f;
  if (source.type == Real::kF32) return static_cast<const float*>(source.base)[source.offset + at];
  const uint32_t x = static_cast<const uint16_t*>(source.base)[source.offset + at];
  return source.type == Real::kBf16 ? ptx::bf16_low(x) : ptx::unpack_f16(x).x;
}

__global__ void __launch_bounds__(kDim) merge_segments_kernel(const __grid_constant__ Params p) {
  __shared__ float4 s_rows[kDim][kMergeRows / 4];  // [input column][row]
  ptx::launch_dependents();
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
  const int column = threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x % kMergeParts) * kMergeRows * kDim + column;
  const StateSource initial = pool_source(p, slots, head);
  float row[kMergeRows];
#pragma unroll
  for (int r = 0; r < kMergeRows; ++r)
    segment_matrix(p, sequence, head, 0)[first + r * kDim] = load_state_element(initial, first + r * kDim);
#pragma unroll
  for (int r = 0; r < kMergeRows; ++r) row[r] = segment_matrix(p, sequence, head, 1)[first + r * kDim];
  for (int segment = 1; segment + 1 < segments; ++segment) {
    const float* map = segment_matrix(p, sequence, head, p.segments - 1 + segment) + column;
    float* next = segment_matrix(p, sequence, head, segment + 1) + first;
    __syncthreads();
    s_rows[column][0] = float4{row[0], row[1], row[2], row[3]};
    s_rows[column][1] = float4{row[4], row[5], row[6], row[7]};
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kMergeRows; ++r) row[r] = next[r * kDim];
#pragma unroll 64
    for (int k = 0; k < kDim; ++k) {
      const float m = map[k * kDim];
      const float4 a = s_rows[k][0], b = s_rows[k][1];
      row[0] = fmaf(a.x, m, row[0]), row[1] = fmaf(a.y, m, row[1]);
      row[2] = fmaf(a.z, m, row[2]), row[3] = fmaf(a.w, m, row[3]);
      row[4] = fmaf(b.x, m, row[4]), row[5] = fmaf(b.y, m, row[5]);
      row[6] = fmaf(b.z, m, row[6]), row[7] = fmaf(b.w, m, row[7]);
    }
#pragma unroll
    for (int r = 0; r < kMergeRows; ++r) next[r * kDim] = row[r];
  }
}

}  // namespace kda::cuda::prefill_fused

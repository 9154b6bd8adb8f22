// Sums and running sums over the threads of one block of kMetadataThreads.
#pragma once

#include "cuda/kernels/common/math.cuh"
#include "cuda/kernels/metadata/params.h"

namespace kda::cuda {

constexpr int kMetadataWarps = kMetadataThreads / 32;

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x / 32); }

__device__ __forceinline__ uint32_t warp_sum(uint32_t x) { return __reduce_add_sync(kFullMask, x); }
__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(kFullMask, x, mask);
  return x;
}

template <class T>
__device__ __forceinline__ T warp_running_sum(T x, int lane = lane_id()) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T y = __shfl_up_sync(kFullMask, x, step);
    if (lane >= step) x += y;
  }
  return x;
}

// kCount sums over the block; every thread gets them. Two barriers; `s` may be used again after the next one.
template <int kCount, class T>
__device__ __forceinline__ void block_sums(T (&x)[kCount], T (&s)[kMetadataWarps][kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const T sum = warp_sum(x[i]);
    if (lane_id() == 0) s[warp_id()][i] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = warp_sum(lane_id() < kMetadataWarps ? s[lane_id()][i] : T{0});
  __syncthreads();
}

// Running sums before this thread, and of the whole block.
template <int kCount, class T>
__device__ __forceinline__ void block_running_sums(const T (&x)[kCount], T (&before)[kCount], T (&all)[kCount],
                                                   T (&s)[kMetadataWarps][kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const T sum = warp_running_sum(x[i]);
    before[i] = sum - x[i];
    if (lane_id() == 31) s[warp_id()][i] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const T other = lane_id() < kMetadataWarps ? s[lane_id()][i] : T{0};
    all[i] = warp_sum(other);
    before[i] += warp_sum(lane_id() < warp_id() ? other : T{0});
  }
  __syncthreads();
}

// Last position of s[0..count) whose value is at most x; s does not decrease and s[0] <= x.
template <class T>
__device__ __forceinline__ int32_t owner_of(const T* s, int32_t count, T x) {
  int32_t low = 0, high = count;
#pragma unroll 1
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (s[middle] <= x) low = middle;
    else high = middle;
  }
  return low;
}

__device__ __forceinline__ void put(void* table, int64_t i, int64_t value, int32_t wide) {
  if (wide) static_cast<int64_t*>(table)[i] = value;
  else static_cast<int32_t*>(table)[i] = static_cast<int32_t>(value);
}
// Two stores: the table is aligned to its elements, not to pairs.
__device__ __forceinline__ void put_pair(void* table, int64_t row, int64_t a, int64_t b, int32_t wide) {
  put(table, 2 * row, a, wide);
  put(table, 2 * row + 1, b, wide);
}

}  // namespace kda::cuda

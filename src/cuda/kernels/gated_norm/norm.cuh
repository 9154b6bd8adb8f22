// The arithmetic of the gated norm, shared with decode_step so that both give the same bits (L-8).
//
// The sum of squares is a binary tree over the element's number, padded with zeros: pairs, pairs of pairs, and so on.
// Whoever holds which elements can follow it, and a longer padding changes nothing.
#pragma once

#include "cuda/kernels/common/math.cuh"

namespace kda::cuda {

// The tree over kCount consecutive squares; kCount a power of two.
template <int kCount>
__device__ __forceinline__ float tree_of_squares(const float* x) {
  if constexpr (kCount == 1) return __fmul_rn(x[0], x[0]);
  else return __fadd_rn(tree_of_squares<kCount / 2>(x), tree_of_squares<kCount / 2>(x + kCount / 2));
}

// The tree's upper levels over kLanes neighbouring lanes, lowest bit first.
template <int kLanes>
__device__ __forceinline__ float tree_of_lanes(float x) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) x = __fadd_rn(x, __shfl_xor_sync(kFullMask, x, mask));
  return x;
}

__device__ __forceinline__ float norm_factor(float sum_of_squares, int32_t values, float eps) {
  return __frsqrt_rn(__fadd_rn(__fdiv_rn(sum_of_squares, static_cast<float>(values)), eps));
}

// The same bits where the number of values is a power of two: their mean is a product.
template <int kValues>
__device__ __forceinline__ float norm_factor_of(float sum_of_squares, float eps) {
  static_assert((kValues & (kValues - 1)) == 0);
  return __frsqrt_rn(__fadd_rn(__fmul_rn(sum_of_squares, 1.0f / kValues), eps));
}

// `sigmoid`: of z.
__device__ __forceinline__ float gated_by(float o, float factor, float weight, float sigmoid) {
  return __fmul_rn(__fmul_rn(__fmul_rn(o, factor), weight), sigmoid);
}

__device__ __forceinline__ float gated_value(float o, float factor, float weight, float z) {
  return gated_by(o, factor, weight, sigmoid_fast(z));
}

}  // namespace kda::cuda

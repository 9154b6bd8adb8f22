// h = round(h + add);   out = round(h * rsqrt(mean_d(h^2) + eps) * weight_d)
//
// Grid       one block a token row.
// Block      128 threads. Held: a thread has the octets tid, tid + 128, ... of the row, all of them in registers
//            from the one time that they are read. General: the elements tid, tid + 128, ..., read again for the
//            second half.
// Shared     four sums. One barrier, between the sum of squares and the row's factor.
// Precision  fp32 between the loads and the two roundings; the norm is of the rounded h. Squares are summed in a
//            tree of eight, then octet by octet, then over lanes and warps: an order that depends on D alone.
// Limits     held: D <= 8192, D a multiple of eight, aligned rows.
#pragma once

#include "cuda/kernels/common/octets.cuh"
#include "cuda/kernels/gated_norm/norm.cuh"
#include "cuda/kernels/residual_norm/params.h"

namespace kda::cuda {

template <class Io_>
struct ResidualNormConfig {
  using Io = Io_;
  static constexpr int kOctets = kMostHeldColumns / 8 / kResidualNormThreads;  // of a thread
};

// The sum of every thread's x, the same bits in all of them.
__device__ __forceinline__ float sum_of_block(float x, float* s_sums) {
  constexpr int kWarps = kResidualNormThreads / 32;
  x = tree_of_lanes<32>(x);
  if (threadIdx.x % 32 == 0) s_sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = s_sums[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) total = __fadd_rn(total, s_sums[w]);
  return total;
}

template <class C>
__global__ void __launch_bounds__(kResidualNormThreads)
    residual_norm_held_kernel(const __grid_constant__ ResidualNormParams p) {
  using Io = typename C::Io;
  __shared__ float s_sums[kResidualNormThreads / 32];
  touch_parameters(p);
  const int64_t row = static_cast<int64_t>(blockIdx.x);
  Io* const h = static_cast<Io*>(p.residual) + row * p.residual_row;
  const Io* const add = static_cast<const Io*>(p.add) + row * p.add_row;
  Io* const out = static_cast<Io*>(p.out) + row * p.out_row;
  const int32_t first = static_cast<int32_t>(threadIdx.x) * 8;
  wait_for_previous_grid();
  Octet<Io> kept[C::kOctets];
#pragma unroll
  for (int i = 0; i < C::kOctets; ++i) {
    const int32_t column = first + i * kResidualNormThreads * 8;
    if (column < p.cols) kept[i].load(h + column);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < C::kOctets; ++i) {
    const int32_t column = first + i * kResidualNormThreads * 8;
    if (column >= p.cols) break;
    float x[8];
    kept[i].widen(x);
    if (p.add != nullptr) {
      Octet<Io> more;
      more.load(add + column);
      float y[8];
      more.widen(y);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = __fadd_rn(x[e], y[e]);
      kept[i].store(x, h + column);
      kept[i].widen(x);
    }
    sum = __fadd_rn(sum, tree_of_squares<8>(x));
  }
  const float factor = norm_factor(sum_of_block(sum, s_sums), p.cols, p.eps);
#pragma unroll
  for (int i = 0; i < C::kOctets; ++i) {
    const int32_t column = first + i * kResidualNormThreads * 8;
    if (column >= p.cols) break;
    float x[8];
    kept[i].widen(x);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      x[e] = __fmul_rn(x[e], factor);
      if (p.weight != nullptr) x[e] = __fmul_rn(x[e], p.weight[column + e]);
    }
    kept[i].store(x, out + column);
  }
}

template <class C>
__global__ void __launch_bounds__(kResidualNormThreads)
    residual_norm_kernel(const __grid_constant__ ResidualNormParams p) {
  using Io = typename C::Io;
  __shared__ float s_sums[kResidualNormThreads / 32];
  touch_parameters(p);
  const int64_t row = static_cast<int64_t>(blockIdx.x);
  Io* const h = static_cast<Io*>(p.residual) + row * p.residual_row;
  const Io* const add = static_cast<const Io*>(p.add) + row * p.add_row;
  Io* const out = static_cast<Io*>(p.out) + row * p.out_row;
  const int32_t first = static_cast<int32_t>(threadIdx.x);
  wait_for_previous_grid();
  float sum = 0.0f;
  for (int32_t column = first; column < p.cols; column += kResidualNormThreads) {
    float x = to_fp32(h[column]);
    if (p.add != nullptr) {
      from_fp32(__fadd_rn(x, to_fp32(add[column])), h[column]);
      x = to_fp32(h[column]);
    }
    sum = __fadd_rn(sum, __fmul_rn(x, x));
  }
  const float factor = norm_factor(sum_of_block(sum, s_sums), p.cols, p.eps);
  for (int32_t column = first; column < p.cols; column += kResidualNormThreads) {
    float x = __fmul_rn(to_fp32(h[column]), factor);
    if (p.weight != nullptr) x = __fmul_rn(x, p.weight[column]);
    from_fp32(x, out[column]);
  }
}

}  // namespace kda::cuda

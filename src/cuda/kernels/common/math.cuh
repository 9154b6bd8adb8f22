// Scalar arithmetic of the kernels: conversions, activations, the gate (spec E-1, E-2, E-5, W-1). Compiled without
// contraction: a fused multiply-add stands where it is meant, so that the same function gives the same bits wherever
// it is used (L-8, V-9, V-10).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/kernels/common/views.h"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/math.h"

namespace kda::cuda {

constexpr unsigned kFullMask = 0xffffffffu;

// One element of a tensor whose dtype is known at run time; uniform branches.
__device__ __forceinline__ float load_element(const void* p, int64_t i, Dtype dtype) {
  if (dtype == Dtype::kBf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  if (dtype == Dtype::kFp16) return __half2float(static_cast<const __half*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

// Rounded once, to nearest even (G-2).
__device__ __forceinline__ void store_element(void* p, int64_t i, Dtype dtype, float x) {
  if (dtype == Dtype::kBf16) static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(x);
  else if (dtype == Dtype::kFp16) static_cast<__half*>(p)[i] = __float2half_rn(x);
  else static_cast<float*>(p)[i] = x;
}

// Elements of an io dtype, rounded to nearest even where they are stored.
__device__ __forceinline__ float to_fp32(float x) { return x; }
__device__ __forceinline__ float to_fp32(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_fp32(__half x) { return __half2float(x); }
__device__ __forceinline__ void from_fp32(float x, float& to) { to = x; }
__device__ __forceinline__ void from_fp32(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void from_fp32(float x, __half& to) { to = __float2half_rn(x); }

// io(x): what storing and reading back gives.
__device__ __forceinline__ float round_element(float x, Dtype dtype) {
  if (dtype == Dtype::kBf16) return __bfloat162float(__float2bfloat16_rn(x));
  if (dtype == Dtype::kFp16) return __half2float(__float2half_rn(x));
  return x;
}

// 1 / x correctly rounded for x in [1, 2], and NaN for NaN: without the branch of a division that serves any operand,
// so that the chains of several run side by side.
__device__ __forceinline__ float reciprocal_of_1_to_2(float x) {
  const float r = ptx::reciprocal_approx(x);
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

// 1 / sqrt(x) correctly rounded, for x that is positive and normal, infinite or NaN: __frsqrt_rn() without its
// branch.
__device__ __forceinline__ float inverse_root(float x) {
#ifdef __CUDA_ARCH__
  const unsigned bits = __float_as_uint(x), m = (bits & 0x00ffffffu) | 0x3f000000u;  // x * 4^n in [0.5, 2)
  const float f = __uint_as_float(m), y = ptx::rsqrt_approx(f);
  const float square = __fmul_rn(y, y), low = __fmaf_rn(y, y, -square);
  const float rest = __fmaf_rn(-f, low, __fmaf_rn(-f, square, 1.0f));
  const float root = __fmaf_rn(__fmaf_rn(rest, 0.375f, 0.5f), __fmul_rn(y, rest), y);
  const float scaled = __int_as_float(__float_as_int(root) + (static_cast<int>(m - bits) >> 1));
  return bits < 0x7f800000u ? scaled : bits == 0x7f800000u ? 0.0f : x;
#else
  return __frsqrt_rn(x);
#endif
}

// Logistic function to about 2e-7 relative, both signs: no difference of near-equal numbers, no overflow.
__device__ __forceinline__ float sigmoid_exact(float x) {
  const float e = expf(-fabsf(x));
  const float r = reciprocal_of_1_to_2(__fadd_rn(1.0f, e));
  return x >= 0.0f ? r : __fmul_rn(e, r);
}

// The same for values that are rounded to an io dtype next: one exponential and one reciprocal of the
// special-function unit, relative error below (1 + |x|) * 2e-7.
__device__ __forceinline__ float sigmoid_fast(float x) {
  const float e = ptx::exp2_approx(__fmul_rn(x, -1.44269504f));
  return ptx::reciprocal_approx(__fadd_rn(1.0f, e));
}

// W-1. At -inf this is NaN, as x / (1 + e^-x) is.
__device__ __forceinline__ float silu(float x) { return __fmul_rn(x, sigmoid_fast(x)); }

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Log decay g of one channel (E-1): bias before the scale, a = exp(A_log).
__device__ __forceinline__ float log_decay(const GateRef& gate, float raw, float bias, float a) {
  if (gate.family == GateFamily::kPlain) return raw;
  const float x = __fadd_rn(raw, bias);
  if (gate.family == GateFamily::kBounded) return __fmul_rn(gate.lower_bound, sigmoid_exact(__fmul_rn(a, x)));
  return -__fmul_rn(a, softplus(x));
}

// a = exp(A_log), kept finite: where it passes fp32's range, an infinity would make 0 * inf of a gate of zero. A NaN
// stays one.
__device__ __forceinline__ float gate_scale(float A_log) {
  constexpr float kMost = 3.402823466e38f;
  const float a = expf(A_log);
  return a > kMost ? kMost : a;
}

// beta (E-5).
__device__ __forceinline__ float beta_value(float given, bool logits, bool doubled) {
  if (!logits) return given;
  const float s = sigmoid_exact(given);
  return doubled ? __fmul_rn(2.0f, s) : s;
}

// Sum over the lanes whose ids differ in the bits of `Lanes - 1`, the same tree in every lane.
template <int Lanes>
__device__ __forceinline__ float lane_sum(float x) {
#pragma unroll
  for (int mask = Lanes / 2; mask > 0; mask /= 2) x = __fadd_rn(x, __shfl_xor_sync(kFullMask, x, mask));
  return x;
}

// Reads a word of every 64 bytes of a kernel's parameters. They come from memory that no cache holds yet; called
// before the wait below, their way here is spent while the grid before this one still runs.
template <class Params>
__device__ __forceinline__ void touch_parameters(const Params& p) {
  const auto* words = reinterpret_cast<const int*>(&p);
#pragma unroll
  for (unsigned i = 0; i < sizeof(Params) / 4; i += 16) asm volatile("" ::"r"(words[i]));
}

// Waits until the grid before this one on the stream has finished and its writes are visible; lets the next one start
// its blocks early, where they wait in turn. Every thread of every kernel calls it before it relies on memory, so
// that each grid ends after all before it.
__device__ __forceinline__ void wait_for_previous_grid() {
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();
}

}  // namespace kda::cuda

// Gate, beta and decay arithmetic (E-1, E-2, E-5, H-3, H-6). Log decays are kept in units of log2, times log2(e).
#pragma once

#include "cuda/kernels/prefill_fused/params.h"
#include "cuda/ptx/math.h"

namespace kda::cuda::prefill_fused {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kClampLog2 = -150.04028f;  // -104 * log2(e), H-6

// -exp(A_log) * log2(e), kept finite where that passes fp32's range: an infinity would make 0 * inf of a gate of
// zero.
__device__ __forceinline__ float gate_factor(float a_log, bool has_a_log) {
  constexpr float kLeast = -3.402823466e38f;
  return ptx::max_nan(-(has_a_log ? expf(a_log) : 1.0f) * kLog2e, kLeast);
}

// sum + log2(e) * g for the raw value x. The clamp is not needed where the bound is above it (kMinBound).
template <Gate kGate>
__device__ __forceinline__ float add_log_decay(float sum, float x, float bias, float factor, float lower_bound_log2) {
  if constexpr (kGate == Gate::kBounded) {
    const float e = ptx::exp2_approx((x + bias) * factor);
    return fmaf(lower_bound_log2, ptx::reciprocal_approx(1.0f + e), sum);
  } else if constexpr (kGate == Gate::kSoftplus) {
    // softplus(y) = max(y, 0) + log1p(u), u = e^-|y| <= 1; log1p(u) = 2 atanh(z), z = u / (2 + u) <= 1/3.
    // 2 atanh(z) / z by a polynomial in z^2 fitted there, 2 at zero: within 4.5e-9.
    const float y = x + bias;
    const float u = ptx::exp2_approx(fabsf(y) * -kLog2e);
    const float z = u * ptx::reciprocal_approx(2.0f + u);
    const float z2 = z * z;
    float p = 0.2801198661f;
    p = fmaf(p, z2, 0.2800180614f);
    p = fmaf(p, z2, 0.4002152681f);
    p = fmaf(p, z2, 0.6666641831f);
    p = fmaf(p, z2, 2.0f);
    return sum + ptx::max_nan(fmaf(p, z, ptx::max_nan(y, 0.0f)) * factor, kClampLog2);
  } else {
    return sum + ptx::max_nan(x * kLog2e, kClampLog2);
  }
}

// 2^x for x <= 0, 1 ulp; 0 below the normal range. For the state decay (H-3).
__device__ __forceinline__ float exp2_exact(float x) {
  const float n = rintf(x);
  const float f = x - n;
  float p = 1.5403530393381609e-4f;
  p = fmaf(p, f, 1.3333558146428443e-3f);
  p = fmaf(p, f, 9.6181291076284772e-3f);
  p = fmaf(p, f, 5.5504108664821580e-2f);
  p = fmaf(p, f, 2.4022650695910072e-1f);
  p = fmaf(p, f, 6.9314718055994531e-1f);
  p = fmaf(p, f, 1.0f);
  const float power = __int_as_float((static_cast<int>(n) + 127) << 23);
  return x < -126.0f ? 0.0f : p * power;  // NaN passes through
}

__device__ __forceinline__ float beta_value(const Params& p, float x) {
  return p.beta_is_logit ? p.beta_factor * ptx::reciprocal_approx(1.0f + expf(-x)) : x;
}

}  // namespace kda::cuda::prefill_fused

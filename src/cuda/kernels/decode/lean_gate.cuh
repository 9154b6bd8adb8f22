// Loads and decays of four neighbouring channels, for the lean kernels.
#pragma once

#include "cuda/kernels/recurrence/token.cuh"

namespace kda::cuda {

// Four raw gates as loaded: 16-bit ones in x and y.
__device__ __forceinline__ uint4 load_gates(const char* row, int key, Dtype dtype) {
  if (dtype == Dtype::kFp32) return *reinterpret_cast<const uint4*>(row + key * 4);
  const auto x = *reinterpret_cast<const uint2*>(row + key * 2);
  return make_uint4(x.x, x.y, 0, 0);
}

template <class T>
__device__ __forceinline__ void widen_four(float* x, uint2 bits) {
  const float2 a = widen_pair(bits.x, T()), b = widen_pair(bits.y, T());
  x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
}
// Four 16-bit elements.
__device__ __forceinline__ void widen_four(float* x, uint2 bits, Dtype dtype) {
  if (dtype == Dtype::kBf16) widen_four<__nv_bfloat16>(x, bits);
  else widen_four<__half>(x, bits);
}

template <GateFamily kFamily>
__device__ __forceinline__ void decays_of_family(const GateRef& given, float (&d)[4], float4 bias, float A_log) {
  GateRef rule = given;
  rule.family = kFamily;
  const float a = gate_scale(A_log);
  const float offset[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = expf(log_decay(rule, d[i], offset[i], a));
}

// e^g of four channels (E-1). The family is asked for once, not for each channel.
__device__ __forceinline__ void decays_of(const GateRef& rule, uint4 bits, Dtype dtype, float4 bias, float A_log,
                                          float (&d)[4]) {
  if (dtype == Dtype::kFp32) {
    d[0] = __uint_as_float(bits.x), d[1] = __uint_as_float(bits.y);
    d[2] = __uint_as_float(bits.z), d[3] = __uint_as_float(bits.w);
  } else {
    widen_four(d, make_uint2(bits.x, bits.y), dtype);
  }
  if (rule.family == GateFamily::kBounded) decays_of_family<GateFamily::kBounded>(rule, d, bias, A_log);
  else if (rule.family == GateFamily::kSoftplus) decays_of_family<GateFamily::kSoftplus>(rule, d, bias, A_log);
  else decays_of_family<GateFamily::kPlain>(rule, d, bias, A_log);
}

// dt_bias of four channels, A_log of a head; 0 where absent.
__device__ __forceinline__ float4 load_bias(const GateRef& rule, int32_t head, int key) {
  if (rule.dt_bias == nullptr) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  return *reinterpret_cast<const float4*>(rule.dt_bias + head * 128 + key);
}
__device__ __forceinline__ float load_A_log(const GateRef& rule, int32_t head) {
  return rule.A_log != nullptr ? rule.A_log[head] : 0.0f;
}

}  // namespace kda::cuda

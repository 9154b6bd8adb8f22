// The conversions that kernels name.
#pragma once

#include "cuda/ptx/instructions.h"

struct __half {
  uint16_t bits;
};
inline __half __float2half_rn(float x) { return {static_cast<uint16_t>(kda::cuda::ptx::to_f16(x))}; }
inline float __half2float(__half x) { return kda::cuda::ptx::from_f16(x.bits); }
inline __half __ushort_as_half(uint16_t x) { return {x}; }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }

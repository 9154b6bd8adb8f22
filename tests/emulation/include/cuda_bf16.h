// The conversions that kernels name.
#pragma once

#include "cuda/ptx/instructions.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  return {static_cast<uint16_t>(kda::cuda::ptx::to_bf16(x))};
}
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }

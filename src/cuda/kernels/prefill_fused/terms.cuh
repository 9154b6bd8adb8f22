// Operands of class b16 for tf32 products (N-6).
#pragma once

#include "cuda/ptx/math.h"
#include "cuda/ptx/mma.h"

namespace kda::cuda::prefill_fused {

// fp32 in two tf32 terms: the first cut, the second rounded.
struct Terms {
  uint32_t high, low;
  __device__ explicit Terms(float x) {
    high = __float_as_uint(x) & 0xffffe000u;
    low = ptx::round_tf32(x - __uint_as_float(high));
  }
};

}  // namespace kda::cuda::prefill_fused

// A value that stays in its register.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kda::cuda {

// Hides a value's origin from ptxas, which would rather read the thread's index or the shared window again (tens of
// cycles) than keep a register: a shuffle that leaves every lane its own. All lanes.
__device__ __forceinline__ uint32_t hold(uint32_t x) { return __shfl_sync(0xffffffffu, x, threadIdx.x & 31); }

}  // namespace kda::cuda

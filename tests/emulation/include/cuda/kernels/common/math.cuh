// Stands in for the kernels' own: what concerns waiting for the grid before. Here a grid runs alone.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/common/views.h"

namespace kda::cuda {

constexpr unsigned kFullMask = 0xffffffffu;
template <class Params>
void touch_parameters(const Params&) {}
inline void wait_for_previous_grid() {}
inline void cluster_arrive() {}
inline void cluster_wait() { emulation::cluster_barrier(); }

}  // namespace kda::cuda

// Stands in for cuda/host/launch.h: a launch runs the kernel, block by block, before it returns.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "cuda/kernels/common/kernel_info.h"

namespace kda::cuda {

struct LaunchShape {
  int64_t x = 1;
  int64_t rest = 1;
  int32_t cluster = 1;
  int32_t threads = 0;
  int32_t shared_bytes = 0;
};

inline int32_t blocks_at_once(const KernelInfo& kernel, int32_t) { return kernel.blocks; }
inline Status prepare_kernel(const void*, const char*, int32_t = 0) { return {}; }

unsigned char* dynamic_memory();

// Kernels that were launched, in order.
inline std::vector<std::string>& launched() {
  static std::vector<std::string> names;
  return names;
}

template <class Params>
Status launch(const KernelInfo& kernel, const LaunchShape& shape, const Params& params, void*) {
  launched().push_back(kernel.name);
  const auto function = reinterpret_cast<void (*)(Params)>(const_cast<void*>(kernel.function));
  for (int64_t y = 0; y < shape.rest; ++y) {
    for (int64_t x = 0; x < shape.x; x += shape.cluster) {
      emulation::run_cluster(
          shape.cluster, kernel.threads, static_cast<unsigned>(x), static_cast<unsigned>(shape.x),
          [&] {
            blockIdx.y = static_cast<unsigned>(y), blockIdx.z = 0;
            gridDim.y = static_cast<unsigned>(shape.rest), gridDim.z = 1;
            blockDim.x = static_cast<unsigned>(kernel.threads);
            function(params);
          },
          dynamic_memory);
    }
  }
  return {};
}

}  // namespace kda::cuda

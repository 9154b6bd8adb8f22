// One built kernel as the host's launcher needs it.
#pragma once

#include <cstdint>

namespace kda::cuda {

struct KernelInfo {
  const void* function = nullptr;
  const char* name = "";
  int32_t threads = 0;
  int32_t warp_rows = 0;    // recurrent kernels: state rows of one warp
  int32_t token_bytes = 0;  // of dynamic shared memory, for each token prepared at once
  int32_t blocks = 0;       // of one multiprocessor, at least
  int32_t block_bytes = 0;  // of dynamic shared memory besides
};

}  // namespace kda::cuda

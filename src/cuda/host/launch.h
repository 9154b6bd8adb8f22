// Kernels as the host handles them: loaded and checked at plan creation (spec Y-20, Y-21), launched with an error
// check each time, under capture too (Y-22).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/host/error.h"

namespace kda::cuda {

struct LaunchShape {
  int64_t blocks = 1;
  int32_t threads = 128;
  int32_t shared_bytes = 0;  // dynamic
  int32_t cluster = 1;       // blocks of one cluster along the grid
};

// Loads a kernel, checks that it is this build's machine code and allows it its dynamic shared memory. The calling
// thread's device is the plan's.
Status prepare_kernel(const void* kernel, const char* name, int32_t shared_bytes = 0);

// `arguments` are the addresses of the kernel's parameters. Launches with programmatic serialisation: every kernel of
// this library waits for the grid before it (griddepcontrol.wait) before it touches memory.
Status launch_kernel(const void* kernel, const char* name, const LaunchShape& shape, void** arguments, void* stream);

template <class Params>
Status launch(void (*kernel)(Params), const char* name, const LaunchShape& shape, const Params& params,
              void* stream) {
  void* arguments[] = {const_cast<Params*>(&params)};
  return launch_kernel(reinterpret_cast<const void*>(kernel), name, shape, arguments, stream);
}

}  // namespace kda::cuda

// Kernels as the host handles them: loaded and checked at plan creation (spec Y-20, Y-21), launched with an error
// check each time, under capture too (Y-22).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/host/error.h"
#include "cuda/kernels/common/kernel_info.h"

namespace kda::cuda {

struct LaunchShape {
  int64_t x = 1;        // blocks along x
  int64_t rest = 1;     // spread over y and z; a kernel takes z * gridDim.y + y and passes over what is too much
  int32_t cluster = 1;  // blocks of one cluster along x
  int32_t threads = 0;
  int32_t shared_bytes = 0;  // dynamic
};

// Blocks of a kernel with that much dynamic shared memory on one multiprocessor, at least. A block takes 1 KB
// besides.
inline int32_t blocks_at_once(const KernelInfo& kernel, int32_t shared_bytes) {
  constexpr int32_t kSharedOfMultiprocessor = 227 * 1024, kReserved = 2048;
  const int32_t room = kSharedOfMultiprocessor / (shared_bytes + kReserved);
  return room < 1 ? 1 : room < kernel.blocks ? room : kernel.blocks;
}

// Loads a kernel, checks that it is this build's machine code and allows it its dynamic shared memory. The calling
// thread's device is the plan's.
Status prepare_kernel(const void* kernel, const char* name, int32_t shared_bytes = 0);

// `arguments` are the addresses of the kernel's parameters. Launches with programmatic serialisation: every kernel of
// this library waits for the grid before it (griddepcontrol.wait) before it touches memory.
Status launch_kernel(const void* kernel, const char* name, const LaunchShape& shape, void** arguments, void* stream);

template <class Params>
Status launch(const KernelInfo& kernel, LaunchShape shape, const Params& params, void* stream) {
  shape.threads = kernel.threads;
  void* arguments[] = {const_cast<Params*>(&params)};
  return launch_kernel(kernel.function, kernel.name, shape, arguments, stream);
}

}  // namespace kda::cuda

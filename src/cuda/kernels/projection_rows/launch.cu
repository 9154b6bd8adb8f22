#include "cuda/kernels/projection_rows/kernel.cuh"

namespace kda::cuda {

KernelInfo projection_rows_kernel_info() {
  return {reinterpret_cast<const void*>(projection_rows_kernel), "projection_rows_kernel", 128};
}

}  // namespace kda::cuda

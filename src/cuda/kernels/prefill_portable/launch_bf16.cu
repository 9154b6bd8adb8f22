#include "cuda/kernels/prefill_portable/kernel.cuh"

namespace kda::cuda {

KernelInfo prefill_portable_kernel_bf16(Shape shape) { return prefill_portable_kernel_of<__nv_bfloat16>(shape); }

}  // namespace kda::cuda

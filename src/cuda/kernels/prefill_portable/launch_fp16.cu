#include "cuda/kernels/prefill_portable/kernel.cuh"

namespace kda::cuda {

KernelInfo prefill_portable_kernel_fp16(Shape shape) { return prefill_portable_kernel_of<__half>(shape); }

}  // namespace kda::cuda

#include "cuda/kernels/prefill_portable/kernel.cuh"

namespace kda::cuda {

KernelInfo prefill_portable_kernel_info(Dtype pool, Shape shape) {
  if (pool == Dtype::kBf16) return prefill_portable_kernel_bf16(shape);
  if (pool == Dtype::kFp16) return prefill_portable_kernel_fp16(shape);
  return prefill_portable_kernel_fp32(shape);
}

KernelInfo prefill_portable_kernel_fp32(Shape shape) { return prefill_portable_kernel_of<float>(shape); }

}  // namespace kda::cuda

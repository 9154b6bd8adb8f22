#include "cuda/kernels/prefill_portable/kernel.cuh"

namespace kda::cuda {

KernelInfo prefill_portable_kernel_info(Shape shape) {
  using Narrow = PrefillConfig<Shape::kMasked128>;
  using Wide = PrefillConfig<Shape::kMasked256>;
  if (shape == Shape::kMasked256) {
    return kernel_info<Wide>(reinterpret_cast<const void*>(prefill_portable_kernel<Wide>), "prefill_portable_kernel");
  }
  return kernel_info<Narrow>(reinterpret_cast<const void*>(prefill_portable_kernel<Narrow>),
                             "prefill_portable_kernel");
}

}  // namespace kda::cuda

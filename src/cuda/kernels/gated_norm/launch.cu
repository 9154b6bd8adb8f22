#include "cuda/kernels/gated_norm/kernel.cuh"

namespace kda::cuda {
namespace {

template <class C>
KernelInfo info() {
  return {reinterpret_cast<const void*>(gated_norm_kernel<C>), "gated_norm_kernel", 128};
}

template <class Io>
KernelInfo info(int32_t values, bool exact) {
  if (exact) return info<GatedNormConfig<Io, true, 8>>();
  return values <= 256 ? info<GatedNormConfig<Io, false, 16>>() : info<GatedNormConfig<Io, false, 64>>();
}

}  // namespace

KernelInfo gated_norm_kernel_info(Dtype io, int32_t values, bool exact) {
  if (io == Dtype::kBf16) return info<__nv_bfloat16>(values, exact);
  if (io == Dtype::kFp16) return info<__half>(values, exact);
  return info<float>(values, exact);
}

}  // namespace kda::cuda

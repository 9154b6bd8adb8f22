#include "cuda/kernels/residual_norm/kernel.cuh"

namespace kda::cuda {
namespace {

template <class Io>
KernelInfo info(bool held) {
  using Config = ResidualNormConfig<Io>;
  if (held) {
    return {reinterpret_cast<const void*>(residual_norm_held_kernel<Config>), "residual_norm_held_kernel",
            kResidualNormThreads};
  }
  return {reinterpret_cast<const void*>(residual_norm_kernel<Config>), "residual_norm_kernel", kResidualNormThreads};
}

}  // namespace

KernelInfo residual_norm_kernel_info(Dtype io, bool held) {
  if (io == Dtype::kBf16) return info<__nv_bfloat16>(held);
  if (io == Dtype::kFp16) return info<__half>(held);
  return info<float>(held);
}

}  // namespace kda::cuda

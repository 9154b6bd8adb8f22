#include "cuda/kernels/conv/step.cuh"

namespace kda::cuda {
namespace {

template <class C>
KernelInfo prefill_info() {
  KernelInfo info{reinterpret_cast<const void*>(conv_prefill_kernel<C>), "conv_prefill_kernel", 128, C::kChannels};
  info.blocks = C::kBlocks;
  return info;
}

template <class Io>
KernelInfo prefill_info(bool vectors) {
  return vectors ? prefill_info<ConvConfig<Io, true>>() : prefill_info<ConvConfig<Io, false>>();
}

template <class Io>
KernelInfo step_info() {
  using C = ConvConfig<Io, true>;
  return {reinterpret_cast<const void*>(conv_step_kernel<C>), "conv_step_kernel", 128, C::kChannels};
}

}  // namespace

KernelInfo conv_prefill_kernel_info(Dtype io, bool vectors) {
  if (io == Dtype::kBf16) return prefill_info<__nv_bfloat16>(vectors);
  if (io == Dtype::kFp16) return prefill_info<__half>(vectors);
  return prefill_info<float>(vectors);
}
KernelInfo conv_step_kernel_info(Dtype io, bool vectors) {
  if (!vectors) return {reinterpret_cast<const void*>(conv_step_scalars_kernel), "conv_step_scalars_kernel", 128, 1};
  if (io == Dtype::kBf16) return step_info<__nv_bfloat16>();
  return io == Dtype::kFp16 ? step_info<__half>() : step_info<float>();
}

}  // namespace kda::cuda

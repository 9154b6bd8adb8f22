// The built kernels of the common call, for one dtype of states.
#pragma once

#include "cuda/kernels/decode_step/ring.cuh"
#include "cuda/kernels/decode_step/slices.cuh"

namespace kda::cuda {

template <class C>
KernelInfo ring_info() {
  KernelInfo info{reinterpret_cast<const void*>(step_ring_kernel<C>), "step_ring_kernel", C::kThreads};
  info.blocks = C::kBlocks;
  info.block_bytes = static_cast<int32_t>(sizeof(typename C::Shared));
  return info;
}
template <class C>
KernelInfo slices_info() {
  KernelInfo info{reinterpret_cast<const void*>(step_slices_kernel<C>), "step_slices_kernel", C::kThreads};
  info.blocks = C::kBlocks;
  info.block_bytes = static_cast<int32_t>(sizeof(typename C::Shared));
  return info;
}

template <class Pool, class Io>
KernelInfo lean_step_info(LeanStepForm form) {
  if (form == LeanStepForm::kFourSlices) return slices_info<SliceConfig<Pool, Io, 1, 16>>();
  if constexpr (sizeof(Pool) == 4) {
    if (form == LeanStepForm::kRing) return ring_info<RingConfig<Pool, Io, 1>>();
  } else {
    if (form == LeanStepForm::kManySlices) return slices_info<SliceConfig<Pool, Io, 4, 8>>();
  }
  if (form == LeanStepForm::kTwoSlices || form == LeanStepForm::kManySlices)
    return slices_info<SliceConfig<Pool, Io, 2, 16>>();
  return ring_info<RingConfig<Pool, Io, 2>>();
}

template <class Pool>
KernelInfo lean_step_kernel(Dtype io, LeanStepForm form) {
  return io == Dtype::kFp16 ? lean_step_info<Pool, __half>(form) : lean_step_info<Pool, __nv_bfloat16>(form);
}

}  // namespace kda::cuda

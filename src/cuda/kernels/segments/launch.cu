#include "cuda/kernels/segments/kernel.cuh"

namespace kda::cuda {

KernelInfo summarize_segment_kernel_info(Shape shape) {
  using Narrow = PrefillConfig<Shape::kMasked128>;
  using Wide = PrefillConfig<Shape::kMasked256>;
  if (shape == Shape::kMasked256) {
    return kernel_info<Wide>(reinterpret_cast<const void*>(summarize_segment_kernel<Wide>),
                             "summarize_segment_kernel");
  }
  return kernel_info<Narrow>(reinterpret_cast<const void*>(summarize_segment_kernel<Narrow>),
                             "summarize_segment_kernel");
}

KernelInfo merge_summaries_kernel_info(Shape shape) {
  KernelInfo info;
  info.name = "merge_summaries_kernel";
  info.threads = shape == Shape::kMasked256 ? 256 : 128;
  info.function =
      reinterpret_cast<const void*>(info.threads == 256 ? merge_summaries_kernel<256> : merge_summaries_kernel<128>);
  return info;
}

KernelInfo merge_maps_kernel_info() {
  KernelInfo info{reinterpret_cast<const void*>(merge_maps_kernel), "merge_maps_kernel", kMapThreads};
  info.block_bytes = MapShared::kBytes;
  return info;
}

}  // namespace kda::cuda

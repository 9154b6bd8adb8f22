#include "cuda/kernels/metadata/kernel.cuh"

namespace kda::cuda {

KernelInfo metadata_kernel_info(bool wide) {
  const void* function = wide ? reinterpret_cast<const void*>(build_metadata_kernel<int64_t>)
                              : reinterpret_cast<const void*>(build_metadata_kernel<int32_t>);
  return {function, "build_metadata_kernel", kMetadataThreads};
}
KernelInfo chunk_kernel_info() {
  return {reinterpret_cast<const void*>(build_chunks_kernel), "build_chunks_kernel", kMetadataThreads};
}
KernelInfo chunk_piece_kernel_info() {
  return {reinterpret_cast<const void*>(write_chunk_piece_kernel), "write_chunk_piece_kernel", kMetadataThreads};
}

}  // namespace kda::cuda

#include "cuda/kernels/decode_step/lean_launch.cuh"

namespace kda::cuda {

KernelInfo lean_step_kernel_fp16(Dtype io, int32_t slices) { return lean_step_kernel<__half>(io, slices); }

}  // namespace kda::cuda

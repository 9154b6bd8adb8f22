#include "cuda/kernels/decode_step/lean_launch.cuh"

namespace kda::cuda {

KernelInfo lean_step_kernel_fp32(Dtype io, int32_t slices) { return lean_step_kernel<float>(io, slices); }

}  // namespace kda::cuda

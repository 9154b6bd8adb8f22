#include "cuda/kernels/decode_step/kernel.cuh"

namespace kda::cuda {

KernelInfo decode_step_kernel_bf16(bool records) { return decode_step_kernel_of<__nv_bfloat16>(records); }

}  // namespace kda::cuda

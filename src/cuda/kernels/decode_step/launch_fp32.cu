#include "cuda/kernels/decode_step/kernel.cuh"

namespace kda::cuda {

KernelInfo decode_step_kernel_fp32(bool records) { return decode_step_kernel_of<float>(records); }

}  // namespace kda::cuda

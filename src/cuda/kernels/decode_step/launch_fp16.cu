#include "cuda/kernels/decode_step/kernel.cuh"

namespace kda::cuda {

KernelInfo decode_step_kernel_fp16(bool records) { return decode_step_kernel_of<__half>(records); }

}  // namespace kda::cuda

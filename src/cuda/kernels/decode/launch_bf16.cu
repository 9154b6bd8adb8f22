#include "cuda/kernels/decode/kernel.cuh"

namespace kda::cuda {

KernelInfo decode_kernel_bf16(Shape shape, Flow flow) { return decode_kernel_of<__nv_bfloat16>(shape, flow); }

}  // namespace kda::cuda

#include "cuda/kernels/decode/kernel.cuh"

namespace kda::cuda {

KernelInfo decode_kernel_fp32(Shape shape, Flow flow) { return decode_kernel_of<float>(shape, flow); }

}  // namespace kda::cuda

#include "cuda/kernels/decode/kernel.cuh"

namespace kda::cuda {

KernelInfo decode_kernel_fp16(Shape shape, Flow flow) { return decode_kernel_of<__half>(shape, flow); }

}  // namespace kda::cuda

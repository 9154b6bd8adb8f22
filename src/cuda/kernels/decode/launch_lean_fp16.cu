#include "cuda/kernels/decode/lean_launch.cuh"

namespace kda::cuda {

KernelInfo lean_kernel_fp16(Flow flow, bool many) { return lean_kernel_of<__half>(flow, many); }

}  // namespace kda::cuda

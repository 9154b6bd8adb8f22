#include "cuda/kernels/decode/lean_launch.cuh"

namespace kda::cuda {

KernelInfo lean_kernel_fp32(Flow flow, bool many) { return lean_kernel_of<float>(flow, many); }

}  // namespace kda::cuda

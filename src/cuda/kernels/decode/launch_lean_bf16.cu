#include "cuda/kernels/decode/lean_launch.cuh"

namespace kda::cuda {

KernelInfo lean_kernel_bf16(Flow flow, bool many) { return lean_kernel_of<__nv_bfloat16>(flow, many); }

}  // namespace kda::cuda

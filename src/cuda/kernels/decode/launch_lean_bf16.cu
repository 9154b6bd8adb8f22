#include "cuda/kernels/decode/lean_launch.cuh"

namespace kda::cuda {

KernelInfo lean_kernel_bf16(LeanCall call) { return lean_kernel_of<__nv_bfloat16>(call); }

}  // namespace kda::cuda

#include "cuda/kernels/decode/lean_launch.cuh"

namespace kda::cuda {

KernelInfo lean_kernel_fp32(LeanCall call) { return lean_kernel_of<float>(call); }

}  // namespace kda::cuda

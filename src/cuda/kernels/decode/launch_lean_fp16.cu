#include "cuda/kernels/decode/lean_launch.cuh"

namespace kda::cuda {

KernelInfo lean_kernel_fp16(LeanCall call) { return lean_kernel_of<__half>(call); }

}  // namespace kda::cuda

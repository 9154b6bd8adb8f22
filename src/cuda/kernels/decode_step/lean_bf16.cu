#include "cuda/kernels/decode_step/lean_launch.cuh"

namespace kda::cuda {

KernelInfo lean_step_kernel_bf16(Dtype io, LeanStepForm form) { return lean_step_kernel<__nv_bfloat16>(io, form); }

}  // namespace kda::cuda

#include "cuda/kernels/decode_step/lean_launch.cuh"

namespace kda::cuda {

KernelInfo lean_step_kernel_fp32(Dtype io, LeanStepForm form) { return lean_step_kernel<float>(io, form); }

}  // namespace kda::cuda

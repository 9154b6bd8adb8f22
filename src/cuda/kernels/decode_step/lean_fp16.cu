#include "cuda/kernels/decode_step/lean_launch.cuh"

namespace kda::cuda {

KernelInfo lean_step_kernel_fp16(Dtype io, LeanStepForm form) { return lean_step_kernel<__half>(io, form); }

}  // namespace kda::cuda

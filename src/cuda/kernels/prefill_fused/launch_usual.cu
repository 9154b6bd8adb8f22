#include "cuda/kernels/prefill_fused/kernel_list.cuh"

namespace kda::cuda::prefill_fused {

Kernel find_usual_kernel(Gate gate, Real gate_type, Diagonal diagonal) {
  return find_fused_kernel<Works::kUsual>(gate, gate_type, diagonal);
}

}  // namespace kda::cuda::prefill_fused

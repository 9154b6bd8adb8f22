#include <algorithm>

#include "cuda/kernels/prefill_fused/kernel.cuh"

namespace kda::cuda::prefill_fused {
namespace {

using Kernel = void (*)(Params);

template <Gate kGate, Diagonal kDiagonal>
Kernel kernel_for(Real gate_type) {
  return gate_type == Real::kF32 ? static_cast<Kernel>(prefill_fused_kernel<Config<kGate, float2, kDiagonal>>)
                                 : static_cast<Kernel>(prefill_fused_kernel<Config<kGate, uint32_t, kDiagonal>>);
}

Kernel find_kernel(Gate gate, Real gate_type, float lower_bound) {
  switch (gate) {
    case Gate::kBounded:
      return lower_bound >= kMinAnchoredBound ? kernel_for<Gate::kBounded, Diagonal::kAnchored>(gate_type)
                                              : kernel_for<Gate::kBounded, Diagonal::kDyadic>(gate_type);
    case Gate::kSoftplus: return kernel_for<Gate::kSoftplus, Diagonal::kDyadic>(gate_type);
    case Gate::kPlain: return kernel_for<Gate::kPlain, Diagonal::kDyadic>(gate_type);
  }
  return nullptr;
}

}  // namespace

cudaError_t prepare_prefill_fused(Gate gate, Real gate_type, float lower_bound) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(find_kernel(gate, gate_type, lower_bound)),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, Shared::kBytes);
}

cudaError_t launch_prefill_fused(const Params& params, Gate gate, Real gate_type, int sm_count, cudaStream_t stream) {
  const int64_t works = params.sequences * params.value_heads;
  if (works == 0) return cudaSuccess;
  const int64_t clusters = std::min<int64_t>(works, std::max(1, sm_count / kClusterSize));
  void* arguments[] = {const_cast<Params*>(&params)};
  const cudaError_t error = cudaLaunchKernel(
      reinterpret_cast<const void*>(find_kernel(gate, gate_type, params.lower_bound)),
      dim3(static_cast<unsigned>(clusters * kClusterSize)), dim3(kThreads), arguments, Shared::kBytes, stream);
  return error != cudaSuccess ? error : cudaPeekAtLastError();
}

}  // namespace kda::cuda::prefill_fused

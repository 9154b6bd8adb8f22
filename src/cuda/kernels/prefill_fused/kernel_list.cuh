// The fused kernel of a gate. Included by a source for each of Works.
#pragma once

#include "cuda/kernels/prefill_fused/kernel.cuh"
#include "cuda/kernels/prefill_fused/launch.h"

namespace kda::cuda::prefill_fused {

template <Gate kGate, Diagonal kDiagonal, Works kWorks>
Kernel fused_kernel_for(Real gate_type) {
  using Wide = Config<kGate, float2, kDiagonal, kWorks>;
  using Narrow = Config<kGate, uint32_t, kDiagonal, kWorks>;
  return gate_type == Real::kF32 ? static_cast<Kernel>(prefill_fused_kernel<Wide>)
                                 : static_cast<Kernel>(prefill_fused_kernel<Narrow>);
}

template <Works kWorks>
Kernel find_fused_kernel(Gate gate, Real gate_type, Diagonal diagonal) {
  switch (gate) {
    case Gate::kBounded:
      return diagonal == Diagonal::kAnchored
                 ? fused_kernel_for<Gate::kBounded, Diagonal::kAnchored, kWorks>(gate_type)
                 : fused_kernel_for<Gate::kBounded, Diagonal::kDyadic, kWorks>(gate_type);
    case Gate::kSoftplus: return fused_kernel_for<Gate::kSoftplus, Diagonal::kDyadic, kWorks>(gate_type);
    case Gate::kPlain: return fused_kernel_for<Gate::kPlain, Diagonal::kDyadic, kWorks>(gate_type);
  }
  return nullptr;
}

}  // namespace kda::cuda::prefill_fused

#include <algorithm>

#include "cuda/kernels/prefill_fused/kernel.cuh"
#include "cuda/kernels/prefill_fused/segments.cuh"

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
  // Asking for a kernel's attributes loads it: a run that cuts sequences launches both.
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(merge_segments_kernel));
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(find_kernel(gate, gate_type, lower_bound)),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, Shared::kBytes);
}

namespace {

cudaError_t launch_pass(const Params& params, Gate gate, Real gate_type, int64_t works, int sm_count,
                        cudaStream_t stream) {
  const int64_t clusters = std::min<int64_t>(works, std::max(1, sm_count / kClusterSize));
  void* arguments[] = {const_cast<Params*>(&params)};
  const cudaError_t error = cudaLaunchKernel(
      reinterpret_cast<const void*>(find_kernel(gate, gate_type, params.lower_bound)),
      dim3(static_cast<unsigned>(clusters * kClusterSize)), dim3(kThreads), arguments, Shared::kBytes, stream);
  return error != cudaSuccess ? error : cudaPeekAtLastError();
}

}  // namespace

cudaError_t launch_prefill_fused(const Params& params, Gate gate, Real gate_type, int sm_count, cudaStream_t stream) {
  const int64_t units = params.sequences * params.value_heads;
  if (units == 0) return cudaSuccess;
  const int64_t runs = std::max<int64_t>(params.checkpoints + 2, 2 * int64_t{params.segments} - 2);
  if (units > 0x7fffffff / std::max<int64_t>(1, runs)) return cudaErrorInvalidValue;  // works are counted in 31 bits
  if (params.pass == Pass::kMaps) return launch_pass(params, gate, gate_type, 2 * units, sm_count, stream);
  Params pass = params;
  pass.pass = Pass::kWhole;
  if (params.segments <= 1 || params.checkpoints > 0 || params.segment_space == nullptr)
    return launch_pass(pass, gate, gate_type, units, sm_count, stream);
  pass.pass = Pass::kSummaries;
  cudaError_t error = launch_pass(pass, gate, gate_type, units * (2 * params.segments - 3), sm_count, stream);
  if (error != cudaSuccess) return error;
  void* arguments[] = {&pass};
  error = cudaLaunchKernel(reinterpret_cast<const void*>(merge_segments_kernel),
                           dim3(static_cast<unsigned>(units * kMergeParts)), dim3(kDim), arguments, 0, stream);
  if (error != cudaSuccess) return error;
  pass.pass = Pass::kSegments;
  return launch_pass(pass, gate, gate_type, units * params.segments, sm_count, stream);
}

int64_t prefill_fused_workspace(int64_t sequences, int32_t value_heads, int segments) {
  if (segments <= 1) return 0;
  return sequences * value_heads * (2 * int64_t{segments} - 2) * kDim * kDim * 4;
}

// In items of the inner chunk: rounds of clusters times the items of a work, and what two more launches and the merge
// cost. Uncut sequences are taken as equally long.
int choose_segments(int64_t sequences, int32_t value_heads, int64_t tokens, int sm_count) {
  constexpr int kMostSegments = 8;
  constexpr int64_t kLaunchItems = 8, kMergeItems = 3;
  if (sequences <= 0 || value_heads <= 0) return 1;
  const int64_t clusters = std::max(1, sm_count / kClusterSize), units = sequences * value_heads;
  const int64_t length = (tokens + sequences - 1) / sequences;
  const auto rounds = [&](int64_t works) { return (works + clusters - 1) / clusters; };
  int64_t whole = 1;
  while (whole < length) whole *= 2;
  int best = 1;
  int64_t best_cost = rounds(units) * ((length + kChunk - 1) / kChunk);
  best_cost -= best_cost / 8;  // cutting must gain something
  for (int segments = 2; segments <= kMostSegments; ++segments) {
    const int64_t cut = std::max<int64_t>(kMinSegment, ((whole + segments - 1) / segments + 63) / 64 * 64);
    const int64_t count = (length + cut - 1) / cut;
    if (count < 2) break;
    const int64_t cost = (rounds(units * (2 * count - 3)) + rounds(units * count)) * (cut / kChunk) + kLaunchItems +
                         kMergeItems * (count - 2);
    if (cost < best_cost) best = segments, best_cost = cost;
  }
  return best;
}

}  // namespace kda::cuda::prefill_fused

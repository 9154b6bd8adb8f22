#include <algorithm>

#include "cuda/kernels/prefill_fused/chain.cuh"
#include "cuda/kernels/prefill_fused/launch.h"

namespace kda::cuda::prefill_fused {
namespace {

struct PrepareKernel {
  Kernel kernel;
  int ctas;  // of an SM
};

template <Gate kGate, Diagonal kDiagonal>
PrepareKernel prepare_for(Real gate_type) {
  using Narrow = Config<kGate, uint32_t, kDiagonal>;
  using Wide = Config<kGate, float2, kDiagonal>;
  if (gate_type == Real::kF32) return {prepare_stages_kernel<Wide>, kPrepareCtas<Wide>};
  return {prepare_stages_kernel<Narrow>, kPrepareCtas<Narrow>};
}

PrepareKernel find_prepare(Gate gate, Real gate_type, float lower_bound) {
  if (gate == Gate::kSoftplus) return prepare_for<Gate::kSoftplus, Diagonal::kDyadic>(gate_type);
  if (gate == Gate::kPlain) return prepare_for<Gate::kPlain, Diagonal::kDyadic>(gate_type);
  return diagonal_for(gate, lower_bound) == Diagonal::kAnchored
             ? prepare_for<Gate::kBounded, Diagonal::kAnchored>(gate_type)
             : prepare_for<Gate::kBounded, Diagonal::kDyadic>(gate_type);
}

cudaError_t allow_shared(Kernel kernel, uint32_t bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

template <int kGroups>
cudaError_t launch_chain_of(const Params& params, int64_t works, int64_t room, cudaStream_t stream) {
  const Kernel kernel = params.pass == Pass::kSummaries ? chain_kernel<kGroups, false> : chain_kernel<kGroups, true>;
  return launch_kernel(
      kernel,
      {kChainCtas<kGroups> * std::min(works, room), kChainThreads<kGroups>, ChainShared<kGroups>::kBytes, true},
      params, stream);
}

}  // namespace

cudaError_t prepare_staged(Gate gate, Real gate_type, float lower_bound) {
  cudaError_t error = allow_shared(find_prepare(gate, gate_type, lower_bound).kernel, PrepareShared::kBytes);
  for (const Kernel kernel : {chain_kernel<1, false>, chain_kernel<1, true>})
    if (error == cudaSuccess) error = allow_shared(kernel, ChainShared<1>::kBytes);
  for (const Kernel kernel : {chain_kernel<2, false>, chain_kernel<2, true>})
    if (error == cudaSuccess) error = allow_shared(kernel, ChainShared<2>::kBytes);
  return error;
}

cudaError_t launch_stages(const Params& params, Gate gate, Real gate_type, int sm_count, cudaStream_t stream) {
  const PrepareKernel prepare = find_prepare(gate, gate_type, params.lower_bound);
  const int64_t heads = params.value_heads, most = int64_t{prepare.ctas} * sm_count;
  const int64_t blocks = std::min(params.stage_positions * heads, most < heads ? most : most / heads * heads);
  return launch_kernel(prepare.kernel, {blocks, kPrepareThreads, PrepareShared::kBytes}, params, stream);
}

// Few works: two SMs each, for their latency.
cudaError_t launch_chain(const Params& params, int64_t works, int sm_count, cudaStream_t stream) {
  if (2 * works <= sm_count) return launch_chain_of<1>(params, works, sm_count / 2, stream);
  return launch_chain_of<2>(params, works, sm_count, stream);
}

}  // namespace kda::cuda::prefill_fused

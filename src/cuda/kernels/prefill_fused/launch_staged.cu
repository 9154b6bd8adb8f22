#include <algorithm>

#include "cuda/kernels/prefill_fused/chain.cuh"
#include "cuda/kernels/prefill_fused/launch.h"

namespace kda::cuda::prefill_fused {
namespace {

static_assert(kStageTokens == kChunk);

struct PrepareKernel {
  Kernel kernel;
  int groups;  // of a CTA
  uint32_t shared_bytes;
};

template <Gate kGate, Diagonal kDiagonal>
PrepareKernel prepare_for(Real gate_type) {
  using Narrow = Config<kGate, uint32_t, kDiagonal>;
  using Wide = Config<kGate, float2, kDiagonal>;
  if (gate_type == Real::kF32) return {prepare_stages_kernel<Wide>, kPrepareGroups<Wide>, PreparePlan<Wide>::kBytes};
  return {prepare_stages_kernel<Narrow>, kPrepareGroups<Narrow>, PreparePlan<Narrow>::kBytes};
}

PrepareKernel find_prepare(Gate gate, Real gate_type, Diagonal diagonal) {
  if (gate == Gate::kSoftplus) return prepare_for<Gate::kSoftplus, Diagonal::kDyadic>(gate_type);
  if (gate == Gate::kPlain) return prepare_for<Gate::kPlain, Diagonal::kDyadic>(gate_type);
  return diagonal == Diagonal::kAnchored ? prepare_for<Gate::kBounded, Diagonal::kAnchored>(gate_type)
                                         : prepare_for<Gate::kBounded, Diagonal::kDyadic>(gate_type);
}

cudaError_t allow_shared(Kernel kernel, uint32_t bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

template <int kGroups>
cudaError_t launch_chain_of(const Params& params, int64_t works, int64_t room, cudaStream_t stream) {
  const bool makes_states = params.pass == Pass::kSummaries || params.pass == Pass::kMaps;
  const Kernel kernel = makes_states ? chain_kernel<kGroups, false> : chain_kernel<kGroups, true>;
  // What came before is the preparation, or a kernel of this call that waited for it; with stages of an earlier call
  // it may be whatever made the initial states.
  const bool is_dependent = params.stages_are_ready == 0;
  return launch_kernel(kernel,
                       {kChainCtas<kGroups> * std::min(works, room), kChainThreads<kGroups>,
                        ChainShared<kGroups>::kBytes, is_dependent},
                       params, stream);
}

}  // namespace

cudaError_t prepare_staged(Gate gate, Real gate_type, Diagonal diagonal) {
  const PrepareKernel prepare = find_prepare(gate, gate_type, diagonal);
  cudaError_t error = allow_shared(prepare.kernel, prepare.shared_bytes);
  for (const Kernel kernel : {chain_kernel<1, false>, chain_kernel<1, true>})
    if (error == cudaSuccess) error = allow_shared(kernel, ChainShared<1>::kBytes);
  for (const Kernel kernel : {chain_kernel<2, false>, chain_kernel<2, true>})
    if (error == cudaSuccess) error = allow_shared(kernel, ChainShared<2>::kBytes);
  return error;
}

cudaError_t launch_stages(const Params& params, Gate gate, Real gate_type, int sm_count, cudaStream_t stream) {
  const PrepareKernel prepare =
      find_prepare(gate, gate_type, diagonal_for(gate, params.lower_bound, params.normalize != 0));
  const int64_t units = params.stage_positions * params.value_heads;
  Shape shape{std::min<int64_t>(units, sm_count), 128 * prepare.groups, prepare.shared_bytes};
  if (params.wave > 0) {
    void* flags = static_cast<char*>(params.stages) + units * int64_t{Staged::kStride};
    const cudaError_t error = cudaMemsetAsync(flags, 0, static_cast<size_t>(units) * 4, stream);
    if (error != cudaSuccess) return error;
    // Pairs of SMs, so that pairs are left for the chains' clusters.
    shape.cluster = 2;
    shape.blocks = std::max(2, std::min(params.prepare_ctas, sm_count) / 2 * 2);
  }
  return launch_kernel(prepare.kernel, shape, params, stream);
}

cudaError_t launch_chains(const Params& params, int64_t works, int sms, int64_t room, cudaStream_t stream) {
  if (sms == 2) return launch_chain_of<1>(params, works, room / 2, stream);
  return launch_chain_of<2>(params, works, room, stream);
}

// Few works: two SMs each, for their latency.
cudaError_t launch_chain(const Params& params, int64_t works, int sm_count, cudaStream_t stream) {
  const bool is_beside = params.wave > 0 && params.pass == Pass::kWhole;
  const bool is_lone = is_beside ? 2 * params.wave + params.prepare_ctas <= sm_count : 2 * works <= sm_count;
  const int64_t room = is_beside ? (is_lone ? 2 : 1) * int64_t{params.wave} : sm_count;
  return launch_chains(params, works, is_lone ? 2 : 1, room, stream);
}

}  // namespace kda::cuda::prefill_fused

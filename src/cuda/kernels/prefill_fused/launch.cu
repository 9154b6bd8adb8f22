#include <algorithm>

#include "cuda/kernels/prefill_fused/choose.h"
#include "cuda/kernels/prefill_fused/kernel.cuh"
#include "cuda/kernels/prefill_fused/kernel_list.cuh"
#include "cuda/kernels/prefill_fused/stages.cuh"

namespace kda::cuda::prefill_fused {

Kernel find_any_kernel(Gate gate, Real gate_type, Diagonal diagonal) {
  return find_fused_kernel<Works::kAny>(gate, gate_type, diagonal);
}

cudaError_t prepare_prefill_fused(Gate gate, Real gate_type, Diagonal diagonal) {
  for (const auto find : {find_any_kernel, find_usual_kernel, find_balanced_kernel}) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(find(gate, gate_type, diagonal)),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, Shared::kBytes);
    if (error != cudaSuccess) return error;
  }
  return prepare_staged(gate, gate_type, diagonal);
}

cudaError_t launch_kernel(Kernel kernel, const Shape& shape, const Params& params, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (shape.is_dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {shape.cluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  void* arguments[] = {const_cast<Params*>(&params)};
  const cudaError_t error = cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
  return error != cudaSuccess ? error : cudaPeekAtLastError();
}

namespace {

cudaError_t launch_pass(const Params& params, Gate gate, Real gate_type, int64_t works, int sm_count,
                        cudaStream_t stream) {
  if (params.stages != nullptr) return launch_chain(params, works, sm_count, stream);
  const int64_t clusters = std::min<int64_t>(works, fused_clusters(sm_count));
  if (params.balance_space != nullptr) {
    const cudaError_t error = cudaMemsetAsync(params.balance_space + clusters * kMatrix, 0,
                                              static_cast<size_t>(clusters) * kLeftFlags * 4, stream);
    if (error != cudaSuccess) return error;
  }
  const auto find_dealt = is_usual(params) ? find_usual_kernel : find_any_kernel;
  const auto find = params.balance_space != nullptr ? find_balanced_kernel : find_dealt;
  return launch_kernel(find(gate, gate_type, diagonal_for(gate, params.lower_bound, params.normalize != 0)),
                       {clusters * kClusterSize, kThreads, Shared::kBytes}, params, stream);
}

// The preparation is under way: opening and summaries beside it or behind it, then what is left.
cudaError_t launch_cut(Params pass, int sm_count, cudaStream_t stream) {
  const int64_t units = pass.sequences * pass.value_heads;
  const ChainSms sms = chain_sms(units, pass.cut, sm_count, pass.prepare_ctas);
  pass.pass = Pass::kOpening;
  cudaError_t error = launch_chains(pass, units, sms.opening, sm_count, stream);
  if (error != cudaSuccess) return error;
  if (pass.cut.runs() > 0) {
    pass.pass = Pass::kSummaries;
    error = launch_chains(pass, units * 2 * pass.cut.runs(), sms.summary, sm_count, stream);
    if (error != cudaSuccess) return error;
  }
  pass.pass = Pass::kSegments;
  return launch_chains(pass, units * (pass.cut.segments - pass.cut.opening), 2, sm_count, stream);
}

}  // namespace

cudaError_t launch_prefill_fused(const Params& params, Gate gate, Real gate_type, int sm_count, cudaStream_t stream) {
  const int64_t units = params.sequences * params.value_heads;
  if (units == 0) return cudaSuccess;
  const int64_t runs = std::max<int64_t>(params.checkpoints + 2, 2 * int64_t{params.cut.segments});
  if (units > 0x7fffffff / runs) return cudaErrorInvalidValue;  // works are counted in 31 bits
  Params pass = params;
  pass.gate_family = gate, pass.gate_type = gate_type;
  pass.stage_positions = staged_positions(params);
  if (!may_be_staged(params)) pass.stages = nullptr;
  if (pass.stages == nullptr || params.pass == Pass::kMaps) pass.wave = 0;
  if (pass.wave == 0 || params.segment_space == nullptr) pass.cut = {};
  if (params.pass == Pass::kMaps || pass.stages != nullptr || !may_be_balanced(params, sm_count))
    pass.balance_space = nullptr;
  if (params.pass != Pass::kMaps) pass.pass = Pass::kWhole;
  if (pass.stages != nullptr && params.stages_are_ready == 0) {
    const cudaError_t error = launch_stages(pass, gate, gate_type, sm_count, stream);
    if (error != cudaSuccess) return error;
  }
  if (pass.cut.segments > 1) return launch_cut(pass, sm_count, stream);
  return launch_pass(pass, gate, gate_type, params.pass == Pass::kMaps ? 2 * units : units, sm_count, stream);
}

bool may_be_staged(const Params& params) {
  return params.checkpoints == 0 && has_table(params) &&
         staged_positions(params) * params.value_heads <= 0x7fffffff;
}

// Works in the table, more of them than clusters, and the line of all, any of which may have all tokens, counted in
// 31 bits.
bool may_be_balanced(const Params& params, int sm_count) {
  const int64_t works = params.sequences * params.value_heads;
  return params.checkpoints == 0 && has_table(params) && works > fused_clusters(sm_count) &&
         works <= 0x7fffffff / (2 * (params.tokens / kChunk) + 8);
}

int64_t balance_workspace(int sm_count) { return int64_t{fused_clusters(sm_count)} * (kMatrix + kLeftFlags) * 4; }

int64_t staged_positions(const Params& params) {
  const bool is_packed = params.cu_seqlens.data != nullptr || params.begin.data != nullptr;
  return is_packed ? staged_positions(params.sequences, params.tokens)
                   : params.sequences * ((params.tokens + kChunk - 1) / kChunk);
}

int64_t staged_workspace(int64_t positions, int32_t value_heads) {
  return positions * value_heads * (int64_t{Staged::kStride} + 4);  // and the words that say what is there
}

int64_t prefill_fused_workspace(int64_t sequences, int32_t value_heads, const Cut& cut) {
  if (cut.segments <= 1) return 0;
  return sequences * value_heads * cut.matrices() * kSegmentMatrixBytes;
}

}  // namespace kda::cuda::prefill_fused

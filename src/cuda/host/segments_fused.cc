// Segment summaries on CUDA by the tensor-core prefill (spec S-3, S-9).
#include "base/tensor.h"
#include "cuda/host/candidate.h"
#include "cuda/host/candidates.h"
#include "cuda/host/gates.h"
#include "cuda/host/prefill_fused.h"

namespace kda::cuda {
namespace {

// The prefill kernel without outputs over every sequence twice (S-3): from zero, and from the identity without
// values.
class FusedSummaryKernel final : public Kernel<SegmentSummary> {
 public:
  FusedSummaryKernel(const kda_prefill_desc& desc, const Context& context)
      : desc_(desc), device_(context.device.index), multiprocessors_(context.facts.multiprocessors) {}

  Status prepare() const { return prepare_fused(desc_.attention); }

  int64_t stages_bytes(int64_t sequences, int64_t tokens) const override {
    if (sequences > prefill_fused::kMostTabledSequences) return 0;
    return prefill_fused::staged_workspace(prefill_fused::staged_positions(sequences, tokens),
                                           static_cast<int32_t>(desc_.attention.num_value_heads));
  }

  Status run(const kda_segment_summary_args& args, const WorkspaceGrant&, void* stream) const override {
    KDA_RETURN_IF_ERROR(check_fused_rows("k", args.k));
    KDA_RETURN_IF_ERROR(check_fused_rows("v", args.v));
    KDA_RETURN_IF_ERROR(check_fused_rows("gate", args.gate));
    prefill_fused::Params p;
    // Without stages to keep q is not read by this operator; the kernel prepares its scores all the same.
    const bool keeps = present(args.stages);
    if (keeps) KDA_RETURN_IF_ERROR(check_fused_rows("q", args.q));
    const kda_tensor& q = keeps ? args.q : args.k;
    fill_fused_tokens(desc_.attention, {q, args.k, args.v, args.gate, args.beta, args.A_log, args.dt_bias}, p);
    fill_fused_sequences(args.sequences, args.k, p);
    p.pass = prefill_fused::Pass::kMaps;
    p.state_out = args.summary.data;
    p.state_out_stride = args.summary.strides[0];
    p.state_out_slots = args.summary.shape[0];
    p.state_out_is_packed = 1;
    if (keeps) KDA_RETURN_IF_ERROR(give_stages(args.stages, p));
    return launch_fused(p, desc_.attention, device_, multiprocessors_, stream);
  }

 private:
  kda_prefill_desc desc_;
  int32_t device_, multiprocessors_;
};

Result<std::unique_ptr<Kernel<SegmentSummary>>> create(const kda_prefill_desc& desc, const Context& context,
                                                       WorkspaceBook&) {
  auto kernel = std::make_unique<FusedSummaryKernel>(desc, context);
  KDA_RETURN_IF_ERROR(kernel->prepare());
  return std::unique_ptr<Kernel<SegmentSummary>>(std::move(kernel));
}

}  // namespace

const Candidate<SegmentSummary>* fused_segment_summary() {
  static const CudaCandidate<SegmentSummary> candidate(
      "fused", [](const auto& d, const auto& c, auto& r) { check_segment_summary(kFusedPrefill, d, c, r); }, create);
  return &candidate;
}

}  // namespace kda::cuda

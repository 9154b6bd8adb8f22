// Segment maps on CUDA (spec S-9) of any shape: summaries token by token, merges.
#include "base/tensor.h"
#include "cuda/host/candidate.h"
#include "cuda/host/candidates.h"
#include "cuda/host/gates.h"
#include "cuda/host/launch.h"
#include "cuda/host/recurrence.h"
#include "cuda/host/views.h"
#include "cuda/kernels/segments/params.h"

namespace kda::cuda {
namespace {

// ---- Summaries --------------------------------------------------------------------------------------------------

class PortableSummaryKernel final : public Kernel<SegmentSummary> {
 public:
  PortableSummaryKernel(const kda_prefill_desc& desc, const Context& context)
      : desc_(desc),
        device_(context.device.index),
        multiprocessors_(context.facts.multiprocessors),
        kernel_(summarize_segment_kernel_info(masked_shape(desc.attention))) {}

  Status prepare() const { return prepare_kernel(kernel_.function, kernel_.name, kWalkChunk * kernel_.token_bytes); }

  Status run(const kda_segment_summary_args& args, const WorkspaceGrant&, void* stream) const override {
    SummaryParams p;
    fill_walk(desc_.attention, args, p);
    p.values = p.form.values;
    p.form.values += p.form.keys;
    p.summary = static_cast<float*>(args.summary.data);
    p.stride = args.summary.strides[0];
    return launch_walk(kernel_, device_, multiprocessors_, p, stream);
  }

 private:
  kda_prefill_desc desc_;
  int32_t device_, multiprocessors_;
  KernelInfo kernel_;
};

// ---- Merge ------------------------------------------------------------------------------------------------------

class MergeKernel final : public Kernel<SegmentMerge> {
 public:
  MergeKernel(const kda_segment_merge_desc& desc, const Context& context)
      : desc_(desc),
        device_(context.device.index),
        kernel_(merge_summaries_kernel_info(desc.key_dim <= 128 ? Shape::kMasked128 : Shape::kMasked256)),
        maps_(merge_maps_kernel_info()) {}

  Status prepare() const {
    if (desc_.key_dim == kMapDim) KDA_RETURN_IF_ERROR(prepare_kernel(maps_.function, maps_.name, maps_.block_bytes));
    return prepare_kernel(kernel_.function, kernel_.name);
  }

  Status run(const kda_segment_merge_args& args, const WorkspaceGrant&, void* stream) const override {
    MergeParams p;
    p.heads = static_cast<int32_t>(desc_.num_value_heads);
    p.keys = static_cast<int32_t>(desc_.key_dim);
    p.values = static_cast<int32_t>(desc_.value_dim);
    p.segments = args.summaries.shape[0];
    p.initial = static_cast<const float*>(args.initial_state.data);
    p.summaries = static_cast<const float*>(args.summaries.data);
    p.summary_stride = args.summaries.strides[0];
    p.present = static_cast<const uint8_t*>(args.present.data);
    p.present_stride = stride_of(args.present);
    p.starts = static_cast<float*>(args.start_states.data);
    p.start_stride = stride_of(args.start_states);
    p.final = static_cast<float*>(args.final_state.data);
    LaunchShape shape;
    const DeviceGuard guard(device_);
    KDA_RETURN_IF_ERROR(guard.status());
    if (can_copy_maps(p)) {
      shape.x = desc_.num_value_heads * (desc_.value_dim / kMapRows);
      shape.shared_bytes = maps_.block_bytes;
      return launch(maps_, shape, p, stream);
    }
    shape.x = desc_.num_value_heads * ((desc_.value_dim + kMergeRows - 1) / kMergeRows);
    return launch(kernel_, shape, p, stream);
  }

 private:
  static bool can_copy_maps(const MergeParams& p) {
    const auto aligned = [](const void* x, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(x) % bytes == 0; };
    return p.keys == kMapDim && p.values % kMapRows == 0 && aligned(p.summaries, 16) && p.summary_stride % 4 == 0 &&
           aligned(p.initial, 8) && aligned(p.final, 8) && aligned(p.starts, 8) && p.start_stride % 2 == 0;
  }

  kda_segment_merge_desc desc_;
  int32_t device_;
  KernelInfo kernel_, maps_;
};

// A prepared kernel of either operator.
template <class Op, class K, class Desc>
Result<std::unique_ptr<Kernel<Op>>> create(const Desc& desc, const Context& context, WorkspaceBook&) {
  auto kernel = std::make_unique<K>(desc, context);
  KDA_RETURN_IF_ERROR(kernel->prepare());
  return std::unique_ptr<Kernel<Op>>(std::move(kernel));
}

}  // namespace

const Candidate<SegmentSummary>* portable_segment_summary() {
  static const CudaCandidate<SegmentSummary> candidate(
      "portable", [](const auto& d, const auto& c, auto& r) { check_segment_summary(kPortablePrefill, d, c, r); },
      create<SegmentSummary, PortableSummaryKernel, kda_prefill_desc>);
  return &candidate;
}

const Candidate<SegmentMerge>* portable_segment_merge() {
  static const CudaCandidate<SegmentMerge> candidate("portable", check_segment_merge,
                                                     create<SegmentMerge, MergeKernel, kda_segment_merge_desc>);
  return &candidate;
}

}  // namespace kda::cuda

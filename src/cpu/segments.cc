// The CPU candidates of segment_summary and segment_merge (spec S-1..S-5, S-9).
//
// A summary is the chunked prefill run on V + K value columns without outputs: the first V take v and start from
// zero, which gives B; the others take v = 0 and start from the identity, which gives M (S-3). The [V+K, K] rows
// of the result are the rows of that state.
#include "base/checked.h"
#include "cpu/candidates.h"
#include "cpu/head_inputs.h"

namespace kda::cpu {
namespace {

// The summary's arguments as fill_inputs wants them: q is not read.
struct SummaryInputs {
  const kda_tensor &q, &k, &v, &gate, &beta, &A_log, &dt_bias;
};

class SummaryKernel final : public Kernel<SegmentSummary> {
 public:
  SummaryKernel(const kda_prefill_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc),
        context_(context),
        functions_(prefill_functions(context_isa(context.isa))),
        columns_(desc.attention.value_dim + desc.attention.key_dim) {
    const int64_t workers = context.parallel.num_threads;
    worker_bytes_ = round_up(functions_.scratch_bytes(desc.attention.key_dim, columns_, 1), KDA_WORKSPACE_ALIGNMENT);
    scratch_ = book.book("scratch", KDA_INT8, {workers, worker_bytes_});
    order_ = book.book("order", KDA_INT64, {desc.max_sequences, 2});
    busy_ = book.book("busy", KDA_FP64, {workers});
  }

  Status run(const kda_segment_summary_args& args, const WorkspaceGrant& workspace, void*) const override {
    const SequenceTable table(args.sequences, args.k, 3);
    auto* const order = workspace.get<SequenceOrder>(order_);
    order_sequences(table, order);
    const int64_t heads = desc_.attention.num_value_heads;
    const int64_t panels = ceil_div(columns_, functions_.panel_columns);
    const int64_t blocks = column_blocks(order, table.active(), heads, panels, context_.parallel.num_threads,
                                         workspace.get<double>(busy_));
    const int64_t width = ceil_div(panels, blocks) * functions_.panel_columns;
    char* const scratch = workspace.get<char>(scratch_);
    context_.parallel.for_each(table.active() * heads * blocks, [&](int64_t task, int32_t worker) {
      const int64_t n = order[task / (heads * blocks)].sequence;
      const int64_t within = task % (heads * blocks);
      const int64_t first = within % blocks * width;
      if (first >= columns_) return;
      run_block(args, table.span(n), n, within / blocks, first, std::min(first + width, columns_),
                scratch + worker * worker_bytes_);
    });
    return {};
  }

 private:
  void run_block(const kda_segment_summary_args& args, const TokenSpan& span, int64_t n, int64_t hv, int64_t first,
                 int64_t last, void* scratch) const {
    static constexpr kda_tensor kAbsent{};
    HeadTask task;
    const SummaryInputs inputs{kAbsent, args.k, args.v, args.gate, args.beta, args.A_log, args.dt_bias};
    fill_inputs(desc_.attention, inputs, span, hv, task);  // length 0 is no chunk at all: (I, 0)
    task.column_begin = first;
    task.column_end = last;
    auto* const summary = static_cast<float*>(args.summary.data) + n * args.summary.strides[0] +
                          hv * columns_ * desc_.attention.key_dim;
    task.final = {reinterpret_cast<char*>(summary), KDA_FP32};
    functions_.run_heads(&task, 1, scratch);
  }

  const kda_prefill_desc desc_;
  const Context& context_;
  const PrefillFunctions& functions_;
  const int64_t columns_;
  int64_t worker_bytes_ = 0;
  WorkspaceBook::Id scratch_, order_, busy_;
};

class MergeKernel final : public Kernel<SegmentMerge> {
 public:
  MergeKernel(const kda_segment_merge_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc), context_(context), functions_(prefill_functions(context_isa(context.isa))) {
    worker_bytes_ = round_up(functions_.merge_scratch_bytes(desc.key_dim), KDA_WORKSPACE_ALIGNMENT);
    scratch_ = book.book("scratch", KDA_INT8, {context.parallel.num_threads, worker_bytes_});
  }

  // Parallel over heads and blocks of value rows; the chain over segments stays in one task.
  Status run(const kda_segment_merge_args& args, const WorkspaceGrant& workspace, void*) const override {
    constexpr int64_t kRows = 48;
    const int64_t blocks = ceil_div(desc_.value_dim, kRows);
    char* const scratch = workspace.get<char>(scratch_);
    context_.parallel.for_each(desc_.num_value_heads * blocks, [&](int64_t item, int32_t worker) {
      const int64_t hv = item / blocks, first = item % blocks * kRows;
      MergeTask task;
      task.key_dim = desc_.key_dim;
      task.value_dim = desc_.value_dim;
      task.row_begin = first;
      task.row_end = std::min(first + kRows, desc_.value_dim);
      fill(args, hv, task);
      functions_.merge(task, scratch + worker * worker_bytes_);
    });
    return {};
  }

 private:
  void fill(const kda_segment_merge_args& args, int64_t hv, MergeTask& task) const {
    const int64_t state = desc_.value_dim * desc_.key_dim, map = state + desc_.key_dim * desc_.key_dim;
    task.segments = args.summaries.shape[0];
    task.summaries = static_cast<const float*>(args.summaries.data) + hv * map;
    task.summary_stride = args.summaries.strides[0];
    if (present(args.initial_state)) task.initial = static_cast<const float*>(args.initial_state.data) + hv * state;
    if (present(args.present)) {
      task.present = static_cast<const uint8_t*>(args.present.data);
      task.present_stride = args.present.strides[0];
    }
    if (present(args.start_states)) {
      task.starts = static_cast<float*>(args.start_states.data) + hv * state;
      task.start_stride = args.start_states.strides[0];
    }
    if (present(args.final_state)) task.final = static_cast<float*>(args.final_state.data) + hv * state;
  }

  const kda_segment_merge_desc desc_;
  const Context& context_;
  const PrefillFunctions& functions_;
  int64_t worker_bytes_ = 0;
  WorkspaceBook::Id scratch_;
};

class PortableSummary final : public Candidate<SegmentSummary> {
 public:
  std::string_view name() const override { return "portable"; }
  kda_device_type device() const override { return KDA_CPU; }
  void check(const kda_prefill_desc& desc, const Context&, Refusals& refusals) const override {
    check_head_dims(desc.attention.key_dim, desc.attention.value_dim, refusals);
  }
  Result<std::unique_ptr<Kernel<SegmentSummary>>> create(const kda_prefill_desc& desc, const Context& context,
                                                         WorkspaceBook& book) const override {
    return std::unique_ptr<Kernel<SegmentSummary>>(std::make_unique<SummaryKernel>(desc, context, book));
  }
};

class PortableMerge final : public Candidate<SegmentMerge> {
 public:
  std::string_view name() const override { return "portable"; }
  kda_device_type device() const override { return KDA_CPU; }
  void check(const kda_segment_merge_desc& desc, const Context&, Refusals& refusals) const override {
    check_head_dims(desc.key_dim, desc.value_dim, refusals);
  }
  Result<std::unique_ptr<Kernel<SegmentMerge>>> create(const kda_segment_merge_desc& desc, const Context& context,
                                                       WorkspaceBook& book) const override {
    return std::unique_ptr<Kernel<SegmentMerge>>(std::make_unique<MergeKernel>(desc, context, book));
  }
};

}  // namespace

const Candidate<SegmentSummary>* portable_segment_summary() {
  static const PortableSummary candidate;
  return &candidate;
}

const Candidate<SegmentMerge>* portable_segment_merge() {
  static const PortableMerge candidate;
  return &candidate;
}

}  // namespace kda::cpu

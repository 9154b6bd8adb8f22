// Segment maps (spec S-1..S-4, S-9): St_out = St_in*M + B over a segment. B is what the recurrence makes of a zero
// state, M what it makes of the identity with v = 0; both are rows of one recurrence over V+K state rows.
#include <cstring>
#include <utility>

#include "reference/candidates.h"
#include "reference/head_input.h"
#include "reference/kernel.h"

namespace kda::reference {
namespace {

class SegmentSummaryKernel final : public Kernel<SegmentSummary> {
 public:
  SegmentSummaryKernel(const kda_prefill_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc),
        context_(context),
        V_(desc.attention.value_dim),
        K_(desc.attention.key_dim),
        scratch_(context, book, HeadScratch::size(V_ + K_, K_)) {}

  static void check(const kda_prefill_desc&, Refusals&) {}

  Status run(const kda_segment_summary_args& args, const WorkspaceGrant& workspace, void*) const override {
    const SequenceTable table(args.sequences, args.k, 3);
    const int64_t heads = desc_.attention.num_value_heads;
    context_.parallel.for_each(table.active() * heads, [&](int64_t task, int32_t worker) {
      const int64_t n = task / heads, head = task % heads;
      const HeadScratch s = HeadScratch::carve(scratch_.of(workspace, worker), V_ + K_, K_);
      run_head(args, table.span(n), head, s);
      char* out = advance(static_cast<char*>(args.summary.data), args.summary.dtype,
                          n * args.summary.strides[0] + head * (V_ + K_) * K_);
      store_row(out, args.summary.dtype, (V_ + K_) * K_, s.state);
    });
    return {};
  }

 private:
  void run_head(const kda_segment_summary_args& args, const TokenSpan& span, int64_t head,
                const HeadScratch& s) const {
    std::memset(s.state, 0, static_cast<size_t>((V_ + K_) * K_) * sizeof(double));
    for (int64_t k = 0; k < K_; ++k) s.state[(V_ + k) * K_ + k] = 1;
    std::memset(s.v, 0, static_cast<size_t>(V_ + K_) * sizeof(double));
    AttentionTensors tensors = AttentionTensors::of(args);
    tensors.q = {};  // a map has no outputs
    const HeadInput input(desc_.attention, tensors, span, head);
    for (int64_t t = 0; t < span.length; ++t) {
      const double beta = input.read(t, s);
      step(s.state, V_ + K_, K_, {s.decay, s.k, s.q, s.v, beta, 0, s.u, nullptr});
    }
  }

  kda_prefill_desc desc_;
  const Context& context_;
  int64_t V_, K_;
  WorkerScratch scratch_;
};

class SegmentMergeKernel final : public Kernel<SegmentMerge> {
 public:
  SegmentMergeKernel(const kda_segment_merge_desc& desc, const Context& context, WorkspaceBook& book)
      : context_(context),
        heads_(desc.num_value_heads),
        V_(desc.value_dim),
        K_(desc.key_dim),
        scratch_(context, book, 2 * V_ * K_ + (V_ + K_) * K_) {}

  static void check(const kda_segment_merge_desc&, Refusals&) {}

  Status run(const kda_segment_merge_args& args, const WorkspaceGrant& workspace, void*) const override {
    context_.parallel.for_each(heads_, [&](int64_t head, int32_t worker) {
      double* state = scratch_.of(workspace, worker);
      double* next = state + V_ * K_;
      double* summary = next + V_ * K_;
      if (present(args.initial_state)) {
        load_row(head_of(args.initial_state, head), args.initial_state.dtype, V_ * K_, state);
      } else {
        std::memset(state, 0, static_cast<size_t>(V_ * K_) * sizeof(double));
      }
      for (int64_t p = 0; p < args.summaries.shape[0]; ++p) {
        if (present(args.start_states)) {
          char* out = advance(at(args.start_states, p), args.start_states.dtype, head * V_ * K_);
          store_row(out, args.start_states.dtype, V_ * K_, state);
        }
        if (present(args.present) && *at(args.present, p) == 0) continue;  // the identity
        const char* row = advance(at(args.summaries, p), args.summaries.dtype, head * (V_ + K_) * K_);
        load_row(row, args.summaries.dtype, (V_ + K_) * K_, summary);
        apply(state, summary, next);
        std::swap(state, next);
      }
      if (!present(args.final_state)) return;
      store_row(head_of(args.final_state, head), args.final_state.dtype, V_ * K_, state);
    });
    return {};
  }

 private:
  char* head_of(const kda_tensor& x, int64_t head) const {
    return advance(static_cast<char*>(x.data), x.dtype, head * V_ * K_);
  }

  // next = state*M + B
  void apply(const double* state, const double* summary, double* next) const {
    const double* M = summary + V_ * K_;
    for (int64_t v = 0; v < V_; ++v) {
      double* to = next + v * K_;
      std::memcpy(to, summary + v * K_, static_cast<size_t>(K_) * sizeof(double));
      for (int64_t i = 0; i < K_; ++i) {
        for (int64_t j = 0; j < K_; ++j) to[j] += state[v * K_ + i] * M[i * K_ + j];
      }
    }
  }

  const Context& context_;
  int64_t heads_, V_, K_;
  WorkerScratch scratch_;
};

}  // namespace

const Candidate<SegmentSummary>* segment_summary() {
  static const ReferenceCandidate<SegmentSummary, SegmentSummaryKernel> candidate;
  return &candidate;
}

const Candidate<SegmentMerge>* segment_merge() {
  static const ReferenceCandidate<SegmentMerge, SegmentMergeKernel> candidate;
  return &candidate;
}

}  // namespace kda::reference

// Commit (spec V-10): replays the first c records of a row into its state, moves its conv windows (W-4), drops the
// records. c = accepted; outside [0, count] the row is inactive and keeps its records.
#include "reference/candidates.h"
#include "reference/conv_window.h"
#include "reference/kernel.h"
#include "reference/records.h"

namespace kda::reference {
namespace {

class CommitKernel final : public Kernel<Commit> {
 public:
  CommitKernel(const kda_commit_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc),
        context_(context),
        V_(desc.attention.value_dim),
        K_(desc.attention.key_dim),
        scratch_(context, book, HeadScratch::size(V_, K_)) {}

  static void check(const kda_commit_desc& desc, Refusals& refusals) {
    check_batch_invariant(desc.flags, desc.attention.state_dtype, refusals);
  }

  Status run(const kda_commit_args& args, const WorkspaceGrant& workspace, void*) const override {
    const int64_t active = active_count(args.num_active, args.slots.shape[0]);
    const int64_t heads = desc_.attention.num_value_heads;
    context_.parallel.for_each(active * heads, [&](int64_t task, int32_t worker) {
      const int64_t n = task / heads, head = task % heads;
      const CommitRow row = commit_row(desc_, args, n);
      if (row.active && row.tokens > 0) {
        commit_head(args, row, head, HeadScratch::carve(scratch_.of(workspace, worker), V_, K_));
        if (head == 0) commit_windows(args, row);
      }
    });
    for (int64_t n = 0; n < active; ++n) {
      const CommitRow row = commit_row(desc_, args, n);
      if (row.active) record_count(args.records.count, row.record) = 0;
    }
    return {};
  }

 private:
  void commit_head(const kda_commit_args& args, const CommitRow& row, int64_t head, const HeadScratch& s) const {
    AttentionTensors tensors{};
    tensors.A_log = args.A_log;
    tensors.dt_bias = args.dt_bias;
    const HeadInput input(desc_.attention, tensors, {}, head);
    char* const state = state_at(args.state, row.slot, head);
    load_row(state, args.state.dtype, V_ * K_, s.state);
    replay_records(desc_.attention, input, args.records, row.record, head, row.tokens, s);
    store_row(state, args.state.dtype, V_ * K_, s.state);
  }

  void commit_windows(const kda_commit_args& args, const CommitRow& row) const {
    if (desc_.conv_width == 0) return;
    for (int part = 0; part < desc_.conv_parts; ++part) {
      const kda_tensor& pool = args.conv_state[part];
      const int64_t channels = pool.shape[desc_.conv_layout == KDA_CONV_SD ? 2 : 1];
      const ConvWindow window(pool, desc_.conv_layout, row.slot);
      for (int64_t c = 0; c < channels; ++c) window.shift(c, row.tokens, desc_.conv_width - 1);
    }
  }

  kda_commit_desc desc_;
  const Context& context_;
  int64_t V_, K_;
  WorkerScratch scratch_;
};

}  // namespace

const Candidate<Commit>* commit() {
  static const ReferenceCandidate<Commit, CommitKernel> candidate;
  return &candidate;
}

}  // namespace kda::reference

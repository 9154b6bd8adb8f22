// Host half of decode and commit: rows are judged once, on the calling thread, then heads run in parallel.
#include <algorithm>

#include "base/checked.h"
#include "cpu/attention_gates.h"
#include "cpu/candidates.h"
#include "cpu/conv_pool.h"
#include "cpu/decode_call.h"
#include "cpu/denormals.h"
#include "cpu/portable.h"

namespace kda::cpu {
namespace {

constexpr int64_t kHeadGroup = 8;

class DecodeKernel final : public Kernel<Decode> {
 public:
  DecodeKernel(const kda_decode_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc),
        parallel_(context.parallel),
        functions_(decode_functions(context_isa(context.isa))),
        scratch_floats_(HeadScratch(desc_, nullptr).total) {
    rows_ = book_array<DecodeRow>(book, "rows", desc.max_sequences);
    scratch_ = book.book("scratch", KDA_FP32, {parallel_.num_threads, scratch_floats_});
  }

  Status run(const kda_decode_args& args, const WorkspaceGrant& workspace, void*) const override {
    const SequenceTable table(args.sequences, args.q, 3);
    auto* rows = workspace.get<DecodeRow>(rows_);
    for (int64_t n = 0; n < table.active(); ++n) rows[n] = decode_row(desc_, args, table, n);
    run_rows({&desc_, &args, rows}, table.active(), workspace.get<float>(scratch_));
    if (desc_.mode == KDA_DECODE_RECORDS) set_record_counts(args.records, rows, table.active());
    return {};
  }

 private:
  void run_rows(const DecodeCall& call, int64_t active, float* scratch) const {
    const int64_t heads = desc_.attention.num_value_heads;
    const int64_t parts = value_parts(active * heads);
    const int64_t per_part = round_up(ceil_div(desc_.attention.value_dim, parts), kRowPad);
    // Neighbouring heads of a row go together when there are plenty: their states lie one behind the other.
    const int64_t group = std::clamp<int64_t>(active * heads / (8 * int64_t{parallel_.num_threads}), 1, kHeadGroup);
    const int64_t groups = ceil_div(heads, group);
    parallel_.for_each(active * groups * parts, [&](int64_t task, int32_t worker) {
      const FlushDenormals flush;
      const int64_t v0 = task % parts * per_part;
      const int64_t v1 = std::min(v0 + per_part, desc_.attention.value_dim);
      if (v0 >= v1) return;
      const int64_t n = task / parts / groups, hv = task / parts % groups * group;
      functions_.decode(call, n, hv, std::min(hv + group, heads), v0, v1, scratch + worker * scratch_floats_);
    });
  }

  // Few heads are split over their value rows, never over K. Not with records: one task writes a head's keys.
  int64_t value_parts(int64_t heads) const {
    const int64_t threads = parallel_.num_threads;
    if (heads == 0 || heads >= 2 * threads || threads == 1 || desc_.mode == KDA_DECODE_RECORDS) return 1;
    return std::min(ceil_div(2 * threads, heads), ceil_div(desc_.attention.value_dim, kRowPad));
  }

  kda_decode_desc desc_;
  Parallel parallel_;
  const DecodeFunctions& functions_;
  int64_t scratch_floats_;
  WorkspaceBook::Id rows_, scratch_;
};

class CommitKernel final : public Kernel<Commit> {
 public:
  CommitKernel(const kda_commit_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc),
        parallel_(context.parallel),
        isa_(context_isa(context.isa)),
        scratch_floats_(HeadScratch(desc_, nullptr).total) {
    rows_ = book_array<CommitRow>(book, "rows", desc.max_sequences);
    scratch_ = book.book("scratch", KDA_FP32, {parallel_.num_threads, scratch_floats_});
  }

  Status run(const kda_commit_args& args, const WorkspaceGrant& workspace, void*) const override {
    const int64_t active = active_count(args.num_active, args.slots.shape[0]);
    auto* rows = workspace.get<CommitRow>(rows_);
    for (int64_t i = 0; i < active; ++i) rows[i] = commit_row(desc_, args, i);
    const CommitCall call{&desc_, &args, rows};
    const int64_t heads = desc_.attention.num_value_heads;
    auto* scratch = workspace.get<float>(scratch_);
    parallel_.for_each(active * heads, [&](int64_t task, int32_t worker) {
      const FlushDenormals flush;
      decode_functions(isa_).commit(call, task / heads, task % heads, scratch + worker * scratch_floats_);
    });
    for (int64_t i = 0; i < active; ++i) {
      if (!rows[i].active) continue;
      move_windows(args, rows[i]);
      set_count(args.records, rows[i].record, 0);
    }
    return {};
  }

 private:
  // new[i] = old[c + i] for i < W-1 (W-4).
  void move_windows(const kda_commit_args& args, const CommitRow& row) const {
    if (desc_.conv_width == 0 || row.tokens == 0) return;
    for (int i = 0; i < desc_.conv_parts; ++i) {
      const ConvPool pool(args.conv_state[i], desc_.conv_layout);
      for (int64_t column = 0; column < desc_.conv_width - 1; ++column) {
        pool.copy_column(row.slot, column + row.tokens, row.slot, column, 0, pool.channels);
      }
    }
  }

  kda_commit_desc desc_;
  Parallel parallel_;
  Isa isa_;
  int64_t scratch_floats_;
  WorkspaceBook::Id rows_, scratch_;
};

struct DecodeGates {
  static void check(const kda_decode_desc& d, Refusals& refusals) { check_attention_gates(d.attention, refusals); }
};
struct CommitGates {
  static void check(const kda_commit_desc& d, Refusals& refusals) { check_attention_gates(d.attention, refusals); }
};

}  // namespace

const Candidate<Decode>* portable_decode() {
  static const Portable<Decode, DecodeKernel, DecodeGates> candidate;
  return &candidate;
}

const Candidate<Commit>* portable_commit() {
  static const Portable<Commit, CommitKernel, CommitGates> candidate;
  return &candidate;
}

}  // namespace kda::cpu

// Decode, verify and verify_record (spec V-1..V-10b): the recurrence of prefill over short rows, with a state per
// token (columns mode) or a record per token (records mode). One task is a (sequence, value head).
//
// The oracle carries fp64 within a call and rounds where a state is stored, so decode and verify agree bit for bit
// with fp64 states; with 16- or 32-bit pools they agree within the roundings of N-2. Records hold u in fp32 (P-3).
#include <cstring>

#include "reference/candidates.h"
#include "reference/kernel.h"
#include "reference/records.h"

namespace kda::reference {
namespace {

class DecodeKernel final : public Kernel<Decode> {
 public:
  DecodeKernel(const kda_decode_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc),
        context_(context),
        V_(desc.attention.value_dim),
        K_(desc.attention.key_dim),
        scratch_(context, book, HeadScratch::size(V_, K_)) {}

  static void check(const kda_decode_desc& desc, Refusals& refusals) {
    check_batch_invariant(desc.flags, desc.attention.state_dtype, refusals);
  }

  Status run(const kda_decode_args& args, const WorkspaceGrant& workspace, void*) const override {
    const SequenceTable table(args.sequences, args.q, 3);
    const int64_t heads = desc_.attention.num_value_heads;
    const bool records = desc_.mode == KDA_DECODE_RECORDS;
    context_.parallel.for_each(table.active() * heads, [&](int64_t task, int32_t worker) {
      const int64_t n = task / heads, head = task % heads;
      const DecodeRow row = decode_row(desc_, args, table, n);
      const HeadScratch s = HeadScratch::carve(scratch_.of(workspace, worker), V_, K_);
      if (!row.active) {
        if (head == 0) zero_output(args.out, args.out_rows, row.span, heads, V_);
      } else if (records) {
        run_records(args, row, head, s);
      } else {
        run_columns(args, row, n, head, s);
      }
    });
    // Counts last: with fold every head of a row reads the old one.
    for (int64_t n = 0; records && n < table.active(); ++n) {
      const DecodeRow row = decode_row(desc_, args, table, n);
      if (row.active) record_count(args.records.count, row.record) = static_cast<int32_t>(row.span.length);
    }
    return {};
  }

 private:
  void run_columns(const kda_decode_args& args, const DecodeRow& row, int64_t n, int64_t head,
                   const HeadScratch& s) const {
    const bool per_token = desc_.store == KDA_STORE_PER_TOKEN;
    if (row.fresh) std::memset(s.state, 0, static_cast<size_t>(V_ * K_) * sizeof(double));
    else load_row(state_at(args.state, row.start_slot, head), args.state.dtype, V_ * K_, s.state);
    const auto store_column = [&](int64_t column) {
      const int64_t slot = store_slot(desc_, args, n, column);
      if (slot >= 0) store_row(state_at(args.state, slot, head), args.state.dtype, V_ * K_, s.state);
    };
    run_tokens(args, row.span, head, s, [&](int64_t t, const HeadInput&) {
      if (per_token) store_column(t);
    });
    // A fresh row of no tokens becomes zero, another keeps its bits (P-11).
    if (row.span.length == 0 ? row.fresh : !per_token) store_column(0);
  }

  void run_records(const kda_decode_args& args, const DecodeRow& row, int64_t head, const HeadScratch& s) const {
    char* const state = state_at(args.state, row.start_slot, head);
    load_row(state, args.state.dtype, V_ * K_, s.state);
    if (row.commit > 0) {
      const AttentionTensors tensors = AttentionTensors::of(args);
      const HeadInput input(desc_.attention, tensors, row.span, head);
      replay_records(desc_.attention, input, args.records, row.record, head, row.commit, s);
      store_row(state, args.state.dtype, V_ * K_, s.state);
      // Go on from the stored bits, as commit followed by verify_record does.
      load_row(state, args.state.dtype, V_ * K_, s.state);
    }
    run_tokens(args, row.span, head, s, [&](int64_t t, const HeadInput& input) {
      record_token(desc_.attention, input, args.records, row.record, head, t, s.u);
    });
  }

  // E-7 over the row's tokens; `after(t, input)` sees the state and u of each.
  template <class F>
  void run_tokens(const kda_decode_args& args, const TokenSpan& span, int64_t head, const HeadScratch& s,
                  const F& after) const {
    const AttentionTensors tensors = AttentionTensors::of(args);
    const HeadInput input(desc_.attention, tensors, span, head);
    for (int64_t t = 0; t < span.length; ++t) {
      const double beta = input.read(t, s);
      step(s.state, V_, K_, {s.decay, s.k, s.q, s.v, beta, desc_.attention.scale, s.u, s.o});
      store_output(args.out, args.out_rows, span, t, head, V_, s.o);
      after(t, input);
    }
  }

  kda_decode_desc desc_;
  const Context& context_;
  int64_t V_, K_;
  WorkerScratch scratch_;
};

}  // namespace

const Candidate<Decode>* decode() {
  static const ReferenceCandidate<Decode, DecodeKernel> candidate;
  return &candidate;
}

}  // namespace kda::reference

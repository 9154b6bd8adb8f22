// Prefill, token by token (spec E-7, E-11; states P-1..P-11, checkpoints K-1..K-5, rows ).
// One task is a (sequence, value head). The state lives in fp64 from first to last token and is rounded once where
// it is stored (N-2); fp64 states and outputs are not rounded at all.
#include <cstring>

#include "reference/candidates.h"
#include "reference/head_input.h"
#include "reference/kernel.h"

namespace kda::reference {
namespace {

class PrefillKernel final : public Kernel<Prefill> {
 public:
  PrefillKernel(const kda_prefill_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc),
        context_(context),
        V_(desc.attention.value_dim),
        K_(desc.attention.key_dim),
        scratch_(context, book, HeadScratch::size(V_, K_)) {}

  static void check(const kda_prefill_desc& desc, Refusals& refusals) {
    check_batch_invariant(desc.flags, desc.attention.state_dtype, refusals);
  }

  Status run(const kda_prefill_args& args, const WorkspaceGrant& workspace, void*) const override {
    const SequenceTable table(args.sequences, args.q, 3);
    const int64_t heads = desc_.attention.num_value_heads;
    context_.parallel.for_each(table.active() * heads, [&](int64_t task, int32_t worker) {
      run_head(args, table.span(task / heads), task / heads, task % heads,
               HeadScratch::carve(scratch_.of(workspace, worker), V_, K_));
    });
    return {};
  }

 private:
  void run_head(const kda_prefill_args& args, const TokenSpan& span, int64_t n, int64_t head,
                const HeadScratch& s) const {
    const SlotRule rule{desc_.initial_state, desc_.null_slot};
    const StateRow row = state_row(rule, args.state, args.slots, args.write_slots, args.has_initial_state, n);
    if (!row.active) {
      if (head == 0) zero_output(args.out, args.out_rows, span, desc_.attention.num_value_heads, V_);
      return;
    }
    if (row.fresh) std::memset(s.state, 0, static_cast<size_t>(V_ * K_) * sizeof(double));
    else load_row(state_at(args.state, row.read_slot, head), args.state.dtype, V_ * K_, s.state);

    const AttentionTensors tensors = AttentionTensors::of(args);
    const HeadInput input(desc_.attention, tensors, span, head);
    for (int64_t t = 0; t < span.length; ++t) {
      const double beta = input.read(t, s);
      step(s.state, V_, K_, {s.decay, s.k, s.q, s.v, beta, desc_.attention.scale, s.u, s.o});
      store_output(args.out, args.out_rows, span, t, head, V_, s.o);
      store_checkpoints(args, n, head, t + 1, s.state);
    }
    store_final(args, row, n, head, span.length == 0, s.state);
  }

  // Checkpoints whose offset is `tokens` (K-2, K-3).
  void store_checkpoints(const kda_prefill_args& args, int64_t n, int64_t head, int64_t tokens,
                         const double* state) const {
    const IndexView offsets = index_row(args.checkpoint_offsets, n);
    for (int64_t c = 0; c < offsets.size; ++c) {
      if (offsets[c] != tokens) continue;
      if (present(args.checkpoint_states)) {
        const kda_tensor& x = args.checkpoint_states;
        store_row(advance(at(x, n, c), x.dtype, head * V_ * K_), x.dtype, V_ * K_, state);
        continue;
      }
      const int64_t slot = index_row(args.checkpoint_slots, n)[c];
      if (!slot_is_live(slot, args.state.shape[0], desc_.null_slot)) continue;
      store_row(state_at(args.state, slot, head), args.state.dtype, V_ * K_, state);
    }
  }

  void store_final(const kda_prefill_args& args, const StateRow& row, int64_t n, int64_t head, bool empty,
                   const double* state) const {
    if (args.no_final_state) return;
    const bool packed = present(args.final_state);
    const kda_tensor& target = packed ? args.final_state : args.state;
    const int64_t slot = packed ? n : row.write_slot;
    if (!present(target) || slot < 0) return;
    char* to = state_at(target, slot, head);
    if (!empty || row.fresh || target.dtype != args.state.dtype) return store_row(to, target.dtype, V_ * K_, state);
    // No token: the state keeps its bits, NaN payloads included (P-11).
    const char* from = state_at(args.state, row.read_slot, head);
    if (to != from) std::memcpy(to, from, static_cast<size_t>(V_ * K_) * dtype_size(target.dtype));
  }

  kda_prefill_desc desc_;
  const Context& context_;
  int64_t V_, K_;
  WorkerScratch scratch_;
};

}  // namespace

const Candidate<Prefill>* prefill() {
  static const ReferenceCandidate<Prefill, PrefillKernel> candidate;
  return &candidate;
}

}  // namespace kda::reference

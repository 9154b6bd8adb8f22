// The CPU candidate of prefill: slots, offsets, outputs and parallel work; the arithmetic is in cpu/simd.
//
// Parallel over (sequence, value head), longest sequences first, and over blocks of value columns when those are
// few; never over K or tokens, so no result depends on the number of workers (N-12). A sequence's results depend
// on its own rows alone, with or without the batch-invariant flag (N-13). The CPU does not split sequences (S-8).
#include <cstring>

#include "base/checked.h"
#include "base/half.h"
#include "cpu/candidates.h"
#include "cpu/head_inputs.h"

namespace kda::cpu {
namespace {

// States of the heads of one task: a part of the second-level cache, beside the rows that pass through it.
constexpr int64_t kGroupBytes = 256 << 10;

class PrefillKernel final : public Kernel<Prefill> {
 public:
  PrefillKernel(const kda_prefill_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc), context_(context), functions_(prefill_functions(context_isa(context.isa))) {
    const kda_attention_spec& a = desc.attention;
    const int64_t workers = context.parallel.num_threads;
    const int64_t state = a.key_dim * a.value_dim * static_cast<int64_t>(sizeof(float));
    most_heads_ = std::clamp<int64_t>(kGroupBytes / state, 1, std::min(kMaxHeadGroup, a.num_value_heads));
    worker_bytes_ = round_up(functions_.scratch_bytes(a.key_dim, a.value_dim, most_heads_), KDA_WORKSPACE_ALIGNMENT);
    scratch_ = book.book("scratch", KDA_INT8, {workers, worker_bytes_});
    order_ = book.book("order", KDA_INT64, {desc.max_sequences, 2});
    busy_ = book.book("busy", KDA_FP64, {workers});
  }

  Status run(const kda_prefill_args& args, const WorkspaceGrant& workspace, void*) const override {
    const SequenceTable table(args.sequences, args.q, 3);
    auto* const order = workspace.get<SequenceOrder>(order_);
    order_sequences(table, order);
    const kda_attention_spec& a = desc_.attention;
    const int64_t workers = context_.parallel.num_threads;
    const int64_t panels = ceil_div(a.value_dim, functions_.panel_columns);
    const int64_t blocks =
        column_blocks(order, table.active(), a.num_value_heads, panels, workers, workspace.get<double>(busy_));
    const int64_t columns = ceil_div(panels, blocks) * functions_.panel_columns;
    // Heads in one task, as many as leave every worker two tasks.
    const int64_t heads =
        blocks > 1 ? 1 : std::clamp<int64_t>(table.active() * a.num_value_heads / (2 * workers), 1, most_heads_);
    const int64_t groups = ceil_div(a.num_value_heads, heads);
    const int64_t tasks_per_sequence = groups * blocks;
    char* const scratch = workspace.get<char>(scratch_);
    context_.parallel.for_each(table.active() * tasks_per_sequence, [&](int64_t task, int32_t worker) {
      const int64_t n = order[task / tasks_per_sequence].sequence;
      const int64_t within = task % tasks_per_sequence;
      const int64_t first = within % blocks * columns;
      if (first >= a.value_dim) return;
      const int64_t hv = within / blocks * heads;
      run_block(args, table.span(n), n, {hv, std::min(hv + heads, a.num_value_heads)},
                {first, std::min(first + columns, a.value_dim)}, scratch + worker * worker_bytes_);
    });
    return {};
  }

 private:
  struct Range {
    int64_t begin, end;
  };

  // Some value columns of some value heads of sequence n.
  void run_block(const kda_prefill_args& args, const TokenSpan& span, int64_t n, Range heads, Range columns,
                 void* scratch) const {
    const SlotRule rule{desc_.initial_state, desc_.null_slot};
    const StateRow row = state_row(rule, args.state, args.slots, args.write_slots, args.has_initial_state, n);
    HeadTask tasks[kMaxHeadGroup];
    for (int64_t hv = heads.begin; hv < heads.end; ++hv) {
      if (!row.active) {
        zero_rows(args, span, hv, columns.begin, columns.end);
        continue;
      }
      HeadTask& task = tasks[hv - heads.begin];
      if (!row.fresh) task.initial = state_of(args.state, row.read_slot, hv);
      task.final = final_state(args, row, n, hv);
      if (span.length == 0) {  // P-11
        keep_state(task.initial, task.final, columns.begin, columns.end);
        continue;
      }
      fill_inputs(desc_.attention, args, span, hv, task);
      task.column_begin = columns.begin;
      task.column_end = columns.end;
      fill_outputs(args, span, hv, task);
      if (present(args.checkpoint_offsets)) task.checkpoints = checkpoints(args, n, hv);
    }
    if (row.active && span.length > 0) functions_.run_heads(tasks, heads.end - heads.begin, scratch);
  }

  StateRef state_of(const kda_tensor& states, int64_t slot, int64_t hv) const {
    const int64_t offset = slot * states.strides[0] + hv * desc_.attention.value_dim * desc_.attention.key_dim;
    return {static_cast<char*>(states.data) + offset * static_cast<int64_t>(dtype_size(states.dtype)), states.dtype};
  }

  StateRef final_state(const kda_prefill_args& args, const StateRow& row, int64_t n, int64_t hv) const {
    if (args.no_final_state != 0) return {};
    if (present(args.final_state)) return state_of(args.final_state, n, hv);
    if (!present(args.state) || row.write_slot < 0) return {};
    return state_of(args.state, row.write_slot, hv);
  }

  CheckpointRows checkpoints(const kda_prefill_args& args, int64_t n, int64_t hv) const {
    CheckpointRows rows;
    rows.offsets = index_row(args.checkpoint_offsets, n);
    StateRef first;
    if (present(args.checkpoint_slots)) {
      rows.slots = index_row(args.checkpoint_slots, n);
      rows.num_slots = args.state.shape[0];
      rows.null_slot = desc_.null_slot;
      first = state_of(args.state, 0, hv);
      rows.stride = args.state.strides[0];
    } else {
      first = state_of(args.checkpoint_states, n, hv);
      rows.stride = args.checkpoint_states.strides[1];
    }
    rows.base = first.data;
    rows.dtype = first.dtype;
    rows.stride *= static_cast<int64_t>(dtype_size(first.dtype));
    return rows;
  }

  // Address of head hv in output row 0 of the span's sample, and bytes from row to row.
  static char* out_head(const kda_prefill_args& args, const TokenSpan& span, int64_t hv, int64_t& stride) {
    const TokenRows rows = head_rows(args.out, TokenSpan{span.batch, 0, 0}, 3, hv);
    stride = rows.stride;
    return const_cast<char*>(rows.data);
  }

  static void fill_outputs(const kda_prefill_args& args, const TokenSpan& span, int64_t hv, HeadTask& task) {
    task.out = out_head(args, span, hv, task.out_stride);
    task.out_dtype = args.out.dtype;
    if (!present(args.out_rows)) {
      task.out += span.begin * task.out_stride;
      return;
    }
    task.out_rows = index_view(args.out_rows);
    task.out_rows.data += span.begin * task.out_rows.stride * (task.out_rows.wide ? 8 : 4);
    task.num_out_rows = args.out.shape[0];
  }

  // An inactive sequence's output rows are zero (P-5).
  static void zero_rows(const kda_prefill_args& args, const TokenSpan& span, int64_t hv, int64_t first,
                        int64_t last) {
    if (span.length == 0) return;
    const auto size = static_cast<int64_t>(dtype_size(args.out.dtype));
    int64_t stride = 0;
    char* const out = out_head(args, span, hv, stride);
    for (int64_t t = 0; t < span.length; ++t) {
      const int64_t to = out_row(args.out, args.out_rows, span, 3, t);
      if (to >= 0) std::memset(out + to * stride + first * size, 0, static_cast<size_t>((last - first) * size));
    }
  }

  // A sequence without tokens ends with the state it began with, or zeros (P-11).
  void keep_state(const StateRef& from, const StateRef& to, int64_t first, int64_t last) const {
    if (to.data == nullptr || to.data == from.data) return;
    const int64_t begin = first * desc_.attention.key_dim, end = last * desc_.attention.key_dim;
    const auto size = static_cast<int64_t>(dtype_size(to.dtype));
    char* const out = to.data + begin * size;
    if (from.data == nullptr) {
      std::memset(out, 0, static_cast<size_t>((end - begin) * size));
    } else if (from.dtype == to.dtype) {
      std::memcpy(out, from.data + begin * size, static_cast<size_t>((end - begin) * size));
    } else {  // the packed final state may be fp32 beside a 16-bit pool
      for (int64_t i = begin; i < end; ++i) reinterpret_cast<float*>(to.data)[i] = element(from, i);
    }
  }
  static float element(const StateRef& state, int64_t i) {
    return state.dtype == KDA_BF16 ? to_float(reinterpret_cast<const bf16*>(state.data)[i])
                                   : to_float(reinterpret_cast<const fp16*>(state.data)[i]);
  }

  const kda_prefill_desc desc_;
  const Context& context_;
  const PrefillFunctions& functions_;
  int64_t most_heads_ = 1;
  int64_t worker_bytes_ = 0;
  WorkspaceBook::Id scratch_, order_, busy_;
};

class PortablePrefill final : public Candidate<Prefill> {
 public:
  std::string_view name() const override { return "portable"; }
  kda_device_type device() const override { return KDA_CPU; }
  void check(const kda_prefill_desc& desc, const Context&, Refusals& refusals) const override {
    check_attention_gates(desc.attention, refusals);
  }
  Result<std::unique_ptr<Kernel<Prefill>>> create(const kda_prefill_desc& desc, const Context& context,
                                                  WorkspaceBook& book) const override {
    return std::unique_ptr<Kernel<Prefill>>(std::make_unique<PrefillKernel>(desc, context, book));
  }
};

}  // namespace

const Candidate<Prefill>* portable_prefill() {
  static const PortablePrefill candidate;
  return &candidate;
}

}  // namespace kda::cpu

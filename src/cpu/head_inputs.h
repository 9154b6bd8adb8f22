// Shared by prefill and segment_summary: from a plan's spec and a run's tensors to the inputs of one head, and
// the order in which sequences become parallel work.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/backend.h"
#include "core/rows.h"
#include "cpu/attention_gates.h"
#include "cpu/gate_head.h"
#include "cpu/prefill_kernel.h"

namespace kda::cpu {

inline AttentionForm attention_form(const kda_attention_spec& a) {
  AttentionForm form;
  form.beta_gain = a.allow_neg_eigval != 0 ? 2.0f : 1.0f;
  form.beta_logits = a.beta_form != KDA_BETA_PLAIN;
  form.normalize = a.no_qk_norm == 0;
  form.scale = static_cast<float>(a.scale);
  return form;
}

// Rows of one head of a token tensor [T, heads, D] or [B, T, heads, D] (row_dims 3), or [.., T, heads] (2).
inline TokenRows head_rows(const kda_tensor& x, const TokenSpan& span, int row_dims, int64_t head) {
  const auto size = static_cast<int64_t>(dtype_size(x.dtype));
  const int token_dim = x.rank - row_dims;
  const char* first = token_row(x, span, row_dims, 0) + head * x.strides[token_dim + 1] * size;
  return {first, x.dtype, x.strides[token_dim] * size};
}

// q may be absent. Fills everything of the task that does not concern states and outputs.
template <class Args>
void fill_inputs(const kda_attention_spec& a, const Args& args, const TokenSpan& span, int64_t hv, HeadTask& task) {
  const int64_t head = hv / (a.num_value_heads / a.num_heads);  // E-8
  task.form = attention_form(a);
  task.length = span.length;
  task.key_dim = a.key_dim;
  task.value_dim = a.value_dim;
  if (span.length == 0) return;
  if (present(args.q)) task.q = head_rows(args.q, span, 3, head);
  task.k = head_rows(args.k, span, 3, head);
  task.v = head_rows(args.v, span, 3, hv);
  task.gate = head_rows(args.gate, span, 3, hv);
  task.beta = head_rows(args.beta, span, 2, hv);
  task.gate_head = gate_head(a, args.A_log, hv);
  if (present(args.dt_bias)) task.gate_bias = static_cast<const float*>(args.dt_bias.data) + hv * a.key_dim;
}

// Sequences in the order in which they become tasks: longest first, equal ones by number, so that the last
// tasks to be claimed are short. The order changes no result (N-12).
struct SequenceOrder {
  int64_t length;
  int64_t sequence;
};
inline void order_sequences(const SequenceTable& table, SequenceOrder* order) {
  for (int64_t n = 0; n < table.active(); ++n) order[n] = {table.span(n).length, n};
  std::sort(order, order + table.active(), [](const SequenceOrder& x, const SequenceOrder& y) {
    return x.length != y.length ? x.length > y.length : x.sequence < y.sequence;
  });
}

// Into how many blocks of value columns every head is divided when heads are few (the factors of a chunk are then
// formed once per block): what finishes first when the longest task left goes to the first idle worker. Blocks
// hold whole panels, and columns are independent, so the number changes no bit. `busy` has a place per worker.
inline int64_t column_blocks(const SequenceOrder* order, int64_t sequences, int64_t heads, int64_t panels,
                             int64_t workers, double* busy) {
  constexpr double kFactorShare = 0.25;  // of a head's time, spent on what every block repeats
  int64_t best = 1;
  double best_time = HUGE_VAL;
  for (int64_t blocks = 1; blocks <= panels && sequences * heads * blocks <= 4 * workers; blocks *= 2) {
    std::fill(busy, busy + workers, 0.0);
    for (int64_t n = 0; n < sequences; ++n) {
      const double time =
          static_cast<double>(order[n].length) * (kFactorShare + (1 - kFactorShare) / static_cast<double>(blocks));
      for (int64_t i = 0; i < heads * blocks; ++i) *std::min_element(busy, busy + workers) += time;
    }
    const double time = *std::max_element(busy, busy + workers);
    if (time < best_time) {
      best_time = time;
      best = blocks;
    }
  }
  return best;
}

}  // namespace kda::cpu

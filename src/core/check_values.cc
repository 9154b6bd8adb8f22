// Checked mode (spec G-7): reads index values on the host and reports what normal mode would pass over.
// May allocate: it is a debugging aid, not a serving path.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/half.h"
#include "core/rows.h"
#include "core/validate.h"

namespace kda {
namespace {

Status check_ranges(const kda_sequences& s, int64_t tokens, int64_t active) {
  const IndexView begin = index_view(s.begin), length = index_view(s.length);
  std::vector<std::pair<int64_t, int64_t>> used;
  for (int64_t n = 0; n < active; ++n) {
    if (length[n] < 0) return invalid_argument("length[", n, "]: wanted >= 0, got ", length[n]);
    if (length[n] == 0) continue;
    if (begin[n] < 0 || begin[n] > tokens || length[n] > tokens - begin[n]) {
      return invalid_argument("begin[", n, "]: wanted rows within [0, ", tokens, "), got ", begin[n], " + ", length[n]);
    }
    used.emplace_back(begin[n], n);
  }
  std::sort(used.begin(), used.end());
  for (size_t i = 1; i < used.size(); ++i) {
    const int64_t before = used[i - 1].second;
    if (used[i - 1].first + length[before] <= used[i].first) continue;
    return invalid_argument("begin: wanted disjoint ranges, got rows shared by sequences ", before, " and ",
                            used[i].second);
  }
  return {};
}

double load_gate(const kda_tensor& gate, const char* at) {
  switch (gate.dtype) {
    case KDA_FP32: return *reinterpret_cast<const float*>(at);
    case KDA_BF16: return to_float(*reinterpret_cast<const bf16*>(at));
    default: return to_float(*reinterpret_cast<const fp16*>(at));
  }
}

}  // namespace

Status check_active_value(const kda_tensor& num_active, int64_t n) {
  if (!present(num_active)) return {};
  const int64_t active = index_view(num_active)[0];
  if (active >= 0 && active <= n) return {};
  return invalid_argument("num_active: wanted 0 to ", n, ", got ", active);
}

Status check_offset_values(const kda_sequences& s, const TokenShape& shape) {
  KDA_RETURN_IF_ERROR(check_active_value(s.num_active, shape.sequences));
  const int64_t active = present(s.num_active) ? index_view(s.num_active)[0] : shape.sequences;
  if (present(s.begin)) return check_ranges(s, shape.tokens, active);
  if (!present(s.cu_seqlens)) return {};
  const IndexView cu = index_view(s.cu_seqlens);
  if (cu[0] != 0) return invalid_argument("cu_seqlens[0]: wanted 0, got ", cu[0]);
  for (int64_t n = 0; n < active; ++n) {
    if (cu[n + 1] < cu[n]) {
      return invalid_argument("cu_seqlens[", n + 1, "]: wanted >= cu_seqlens[", n, "] = ", cu[n], ", got ", cu[n + 1]);
    }
    if (cu[n + 1] > shape.tokens) {
      return invalid_argument("cu_seqlens[", n + 1, "]: wanted at most ", shape.tokens, " rows, got ", cu[n + 1]);
    }
  }
  return {};
}

Status check_gate_values(const kda_attention_spec& a, const kda_sequences& s, const kda_tensor& gate) {
  if (a.gate_family != KDA_GATE_PLAIN) return {};
  const SequenceTable table(s, gate, 3);
  const auto size = static_cast<int64_t>(dtype_size(gate.dtype));
  for (int64_t n = 0; n < table.active(); ++n) {
    const TokenSpan span = table.span(n);
    for (int64_t t = 0; t < span.length; ++t) {
      const char* row = token_row(gate, span, 3, t);
      for (int64_t h = 0; h < a.num_value_heads; ++h) {
        for (int64_t k = 0; k < a.key_dim; ++k) {
          const double g = load_gate(gate, row + (h * gate.strides[gate.rank - 2] + k) * size);
          if (g <= 0) continue;  // false for NaN
          return invalid_argument("gate: wanted log decays <= 0, got ", g, " at token ", span.begin + t, ", head ", h,
                                  ", channel ", k);
        }
      }
    }
  }
  return {};
}

Status check_row_values(const kda_tensor& out_rows, int64_t rows) {
  const IndexView view = index_view(out_rows);
  std::vector<std::pair<int64_t, int64_t>> used;
  for (int64_t i = 0; i < view.size; ++i) {
    if (view[i] >= 0 && view[i] < rows) used.emplace_back(view[i], i);
  }
  std::sort(used.begin(), used.end());
  for (size_t i = 1; i < used.size(); ++i) {
    if (used[i].first != used[i - 1].first) continue;
    return invalid_argument("out_rows: wanted distinct rows, got row ", used[i].first, " at positions ",
                            used[i - 1].second, " and ", used[i].second);
  }
  return {};
}

Status check_chunk_values(const kda_sequences& s, const kda_tensor& token, const kda_tensor& indices,
                          const kda_tensor& offsets) {
  if (!present(indices)) return {};
  const SequenceTable table(s, token, 3);
  const IndexView before = index_view(offsets);
  int64_t row = 0;
  for (int64_t n = 0; n < table.active(); ++n) {
    if (before[n] != row) return invalid_argument("chunk_offsets[", n, "]: wanted ", row, ", got ", before[n]);
    const int64_t chunks = ceil_div(table.span(n).length, KDA_PREFILL_GRID);
    if (row + chunks > indices.shape[0]) {
      return invalid_argument("chunk_indices: wanted a row for each of ", row + chunks, " chunks, got ",
                              indices.shape[0]);
    }
    for (int64_t c = 0; c < chunks; ++c, ++row) {
      const IndexView pair = index_row(indices, row);
      if (pair[0] == n && pair[1] == c) continue;
      return invalid_argument("chunk_indices[", row, "]: wanted (", n, ", ", c, "), got (", pair[0], ", ", pair[1],
                              ")");
    }
  }
  if (table.active() == table.count() && before[table.count()] != row) {
    return invalid_argument("chunk_offsets[", table.count(), "]: wanted ", row, ", got ", before[table.count()]);
  }
  return {};
}

}  // namespace kda

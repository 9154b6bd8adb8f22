// Token rows of a call: where each sequence's rows lie in the step's buffer, in every form of P-12, and the output
// rows that go with them.
#pragma once

#include <kda/kda.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/cases.h"
#include "conformance/tensor.h"

namespace kda::conformance {

enum class Form { kOffsets32, kOffsets64, kRanges, kBatched };
std::vector<std::string> form_names();

// A batch has equal lengths, all else any.
bool fits(Form form, const std::vector<int64_t>& lengths);

struct TokenRows {
  Form form = Form::kOffsets32;
  std::vector<int64_t> lengths, begins;
  int64_t total = 0;  // of the buffer: ranges lie back to front with gaps, cu64 has rows behind the last offset (F20)
  Tensor offsets, begin, length, active;

  int64_t sequences() const { return static_cast<int64_t>(lengths.size()); }
  // Views of the vectors above.
  kda_sequences view() const;
  // A token tensor as the form wants it: [B, T, ...] for a batch.
  kda_tensor view(const Tensor& t) const;
};
// `all_but_last`: num_active leaves the last sequence out (P-7).
TokenRows place(Form form, const std::vector<int64_t>& lengths, bool wide_index, bool all_but_last);

// An output buffer [rows, heads, dim], with gaps if `padded`.
Tensor out_buffer(kda_dtype dtype, int64_t rows, int64_t heads, int64_t dim, bool padded);
// out_rows: the rows in reverse, one entry out of range.
Tensor reversed_rows(int64_t rows, kda_dtype dtype);

// Output rows against the oracle's, per sequence; rows that the oracle left alone must hold their old bits. Rows of
// [heads, dim] values.
void check_out(Report& report, const std::string& what, const TokenRows& rows, const Tensor& out_rows,
               const Tensor& before, const Tensor& after, const Tensor& oracle, double limit);

}  // namespace kda::conformance

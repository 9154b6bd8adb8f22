#include "conformance/tokens.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace kda::conformance {

std::vector<std::string> form_names() { return {"cu32", "cu64", "ranges", "batched"}; }

bool fits(Form form, const std::vector<int64_t>& lengths) {
  return form != Form::kBatched ||
         std::adjacent_find(lengths.begin(), lengths.end(), std::not_equal_to<>()) == lengths.end();
}

kda_sequences TokenRows::view() const {
  kda_sequences s{};
  s.cu_seqlens = offsets;
  s.begin = begin;
  s.length = length;
  s.num_active = active;
  return s;
}

kda_tensor TokenRows::view(const Tensor& x) const {
  kda_tensor t = x.view();
  if (form != Form::kBatched) return t;
  for (int d = t.rank; d > 0; --d) {
    t.shape[d] = t.shape[d - 1];
    t.strides[d] = t.strides[d - 1];
  }
  ++t.rank;
  t.shape[0] = sequences();
  t.shape[1] /= std::max<int64_t>(sequences(), 1);
  t.strides[0] = t.shape[1] * t.strides[1];
  return t;
}

TokenRows place(Form form, const std::vector<int64_t>& lengths, bool wide_index, bool all_but_last) {
  TokenRows rows;
  rows.form = form;
  rows.lengths = lengths;
  const size_t N = lengths.size();
  rows.begins.resize(N);
  const bool ranges = form == Form::kRanges;
  for (size_t i = 0; i < N; ++i) {
    const size_t n = ranges ? N - 1 - i : i;
    rows.begins[n] = rows.total;
    rows.total += lengths[n] + (ranges ? 2 : 0);
  }
  if (ranges) {
    rows.begin = Tensor::ints(rows.begins, wide_index ? KDA_INT64 : KDA_INT32);
    rows.length = Tensor::ints(lengths, KDA_INT32);
  } else if (form != Form::kBatched) {
    std::vector<int64_t> cu = rows.begins;
    cu.push_back(rows.total);
    rows.offsets = Tensor::ints(cu, form == Form::kOffsets64 ? KDA_INT64 : KDA_INT32);
  }
  if (form == Form::kOffsets64) rows.total += 3;
  if (all_but_last) rows.active = Tensor::ints({std::max<int64_t>(rows.sequences() - 1, 0)});
  return rows;
}

Tensor out_buffer(kda_dtype dtype, int64_t rows, int64_t heads, int64_t dim, bool padded) {
  const int64_t head = dim + (padded ? 5 : 0);
  return Tensor(dtype, {rows, heads, dim}, {heads * head, head, 1}, padded ? 3 : 0);
}

Tensor reversed_rows(int64_t rows, kda_dtype dtype) {
  std::vector<int64_t> to;
  for (int64_t r = 0; r < rows; ++r) to.push_back(r == 2 ? rows + 4 : rows - 1 - r);
  return Tensor::ints(to, dtype);
}

static std::vector<double> gather(const Tensor& out, const std::vector<int64_t>& rows) {
  std::vector<double> x;
  for (int64_t r : rows) {
    const std::vector<double> row = values(select(out, 0, r));
    x.insert(x.end(), row.begin(), row.end());
  }
  return x;
}

void check_out(Report& report, const std::string& what, const TokenRows& rows, const Tensor& out_rows,
               const Tensor& before, const Tensor& after, const Tensor& oracle, double limit) {
  std::vector<int64_t> written, lengths;
  int64_t shortest = 0;  // fewest rows of a sequence that has any
  for (size_t n = 0; n < rows.lengths.size(); ++n) {
    int64_t count = 0;
    for (int64_t t = 0; t < rows.lengths[n]; ++t) {
      int64_t row = rows.begins[n] + t;
      if (out_rows.present()) row = static_cast<int64_t>(out_rows.get({row}));
      // A row that nobody wrote still holds the poison.
      if (row < 0 || row >= rows.total || std::isnan(oracle.get({row, 0, 0}))) continue;
      written.push_back(row);
      ++count;
    }
    lengths.push_back(count);
    if (count > 0 && (shortest == 0 || count < shortest)) shortest = count;
  }
  report.expect_none(what + ": rows of no sequence", Snapshot(before).changes_outside(after, written));
  const int64_t heads = after.shape()[1], dim = after.shape()[2];
  const std::vector<double> got = gather(after, written);
  report.measure(what,
                 compare_outputs(got, gather(oracle, written), lengths, heads, dim, absolute_floor(after.dtype())),
                 limit, after.dtype(), static_cast<int64_t>(got.size()), shortest * dim);
}

}  // namespace kda::conformance

#include "conformance/compare.h"

#include <cmath>
#include <cstdio>

namespace kda::conformance {
namespace {

struct Sum {
  double difference = 0, reference = 0;
  double error() const {
    if (difference == 0) return 0;
    return reference > 0 ? std::sqrt(difference / reference) : INFINITY;
  }
};

std::string name(const Coordinate& c) {
  std::string s = "sequence " + std::to_string(c.sequence) + ", head " + std::to_string(c.head);
  if (c.token >= 0) s += ", token " + std::to_string(c.token);
  return s;
}

// Accumulates one row into its head's and the tensor's sums; returns the row's own difference.
double add_row(const double* x, const double* r, int64_t dim, double floor, const Coordinate& at, Comparison& c,
               Sum& head, Sum& all) {
  Sum row;
  for (int64_t i = 0; i < dim; ++i) {
    if (!std::isfinite(x[i]) || !std::isfinite(r[i])) {
      const bool same = (std::isnan(x[i]) && std::isnan(r[i])) || x[i] == r[i];
      if (!same && c.mask_fault.empty()) {
        c.mask_fault = name(at) + ", element " + std::to_string(i) + ": " + std::to_string(x[i]) +
                       " where the reference has " + std::to_string(r[i]);
      }
      continue;
    }
    const double difference = std::fabs(x[i] - r[i]);
    if (difference > floor) row.difference += difference * difference;
    row.reference += r[i] * r[i];
  }
  head.difference += row.difference;
  head.reference += row.reference;
  all.difference += row.difference;
  all.reference += row.reference;
  if (row.error() > c.worst_row) {
    c.worst_row = row.error();
    c.row_at = at;
  }
  return row.difference;
}

struct Span {
  int64_t begin, length;
};

Comparison compare(const std::vector<double>& x, const std::vector<double>& reference, const std::vector<Span>& spans,
                   int64_t heads, int64_t dim, double floor, bool states) {
  Comparison c;
  if (x.size() != reference.size()) {
    c.mask_fault = std::to_string(x.size()) + " elements against " + std::to_string(reference.size());
    return c;
  }
  Sum all;
  for (size_t n = 0; n < spans.size(); ++n) {
    for (int64_t h = 0; h < heads; ++h) {
      Sum head;
      Coordinate at{static_cast<int64_t>(n), h, -1}, most = at;
      double most_difference = -1;
      for (int64_t t = 0; t < spans[n].length; ++t) {
        at.token = states ? -1 : t;
        const auto row = static_cast<size_t>(((spans[n].begin + t) * heads + h) * dim);
        const double difference = add_row(&x[row], &reference[row], dim, floor, at, c, head, all);
        if (difference > most_difference) most_difference = difference, most = at;
      }
      if (head.error() > c.worst_head) {
        c.worst_head = head.error();
        c.head_at = most;
      }
    }
  }
  c.total = all.error();
  return c;
}

}  // namespace

double absolute_floor(kda_dtype dtype) {
  switch (dtype) {
    case KDA_FP16: return 0x1.03p-25;  // a little more than half a step: the fp32 value before it may lie at a tie
    case KDA_FP64: return 0x1p-1022;
    default: return 0x1p-126;  // fp32 and bf16: the smallest normal number
  }
}

std::string Comparison::text() const {
  if (!mask_fault.empty()) return "NaN/Inf masks differ: " + mask_fault;
  char numbers[160];
  std::snprintf(numbers, sizeof numbers, "relative L2 %.3e; worst head %.3e", total, worst_head);
  std::string s = numbers;
  if (head_at.head >= 0) s += " (" + name(head_at) + ")";
  if (row_at.head >= 0) {
    std::snprintf(numbers, sizeof numbers, "; worst row %.3e", worst_row);
    s += numbers + (" (" + name(row_at) + ")");
  }
  return s;
}

Comparison compare_outputs(const std::vector<double>& x, const std::vector<double>& reference,
                           const std::vector<int64_t>& lengths, int64_t heads, int64_t dim, double floor) {
  std::vector<Span> spans;
  int64_t begin = 0;
  for (int64_t length : lengths) {
    spans.push_back({begin, length});
    begin += length;
  }
  return compare(x, reference, spans, heads, dim, floor, false);
}

Comparison compare_states(const std::vector<double>& x, const std::vector<double>& reference, int64_t heads,
                          int64_t elements, double floor) {
  std::vector<Span> spans;
  for (int64_t n = 0; n < static_cast<int64_t>(x.size()) / (heads * elements); ++n) spans.push_back({n, 1});
  return compare(x, reference, spans, heads, elements, floor, true);
}

Comparison compare_flat(const std::vector<double>& x, const std::vector<double>& reference, double floor) {
  return compare(x, reference, {{0, 1}}, 1, static_cast<int64_t>(x.size()), floor, false);
}

double norm(const std::vector<double>& x) { return head_norm(x, 1, static_cast<int64_t>(x.size()), 0); }

double head_norm(const std::vector<double>& x, int64_t heads, int64_t dim, int64_t h) {
  double sum = 0;
  const auto total = static_cast<int64_t>(x.size());
  for (int64_t row = h * dim; row + dim <= total; row += heads * dim) {
    for (int64_t i = row; i < row + dim; ++i) sum += x[static_cast<size_t>(i)] * x[static_cast<size_t>(i)];
  }
  return std::sqrt(sum);
}

}  // namespace kda::conformance

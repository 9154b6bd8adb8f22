// The only measure of closeness (spec N-9), of the tests, of `kda check` and of `kda replay --verify`: relative L2
// over the whole tensor and over every (sequence, head), after NaN and Inf masks were found equal. Correlation is not
// a measure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/tensor.h"

namespace kda::conformance {

struct Coordinate {
  int64_t sequence = -1, head = -1, token = -1;  // token -1: a state
};

// Largest difference that says nothing about an implementation: half the distance between a type's smallest numbers
// (G-2), and results that may be flushed to zero (N-14).
double absolute_floor(kda_dtype dtype);

struct Comparison {
  std::string mask_fault;      // not empty: NaN or Inf where the reference has none, or the other way round
  double total = 0;            // over the whole tensor
  double worst_head = 0;       // largest over (sequence, head)
  double worst_row = 0;        // largest over (sequence, head, token), against that row's own norm
  Coordinate head_at, row_at;  // head_at.token: the row with most of that head's difference

  // Tensor <= limit, every (sequence, head) <= twice the limit (N-9) or `head_limit`, masks equal.
  bool within(double limit) const { return within(limit, 2 * limit); }
  bool within(double limit, double head_limit) const {
    return mask_fault.empty() && total <= limit && worst_head <= head_limit;
  }
  std::string text() const;
};

// Outputs [T, heads, dim]: row r belongs to the sequence that covers it; `lengths` are those of the packed
// sequences, rows behind them are not compared.
Comparison compare_outputs(const std::vector<double>& x, const std::vector<double>& reference,
                           const std::vector<int64_t>& lengths, int64_t heads, int64_t dim, double floor = 0);
// States [N, heads, V*K]. Differences of at most `floor` count as none, here and above.
Comparison compare_states(const std::vector<double>& x, const std::vector<double>& reference, int64_t heads,
                          int64_t elements, double floor = 0);
// No structure: one head, one row.
Comparison compare_flat(const std::vector<double>& x, const std::vector<double>& reference, double floor = 0);

// Frobenius norm.
double norm(const std::vector<double>& x);
// Norm of head `h` of [rows, heads, dim].
double head_norm(const std::vector<double>& x, int64_t heads, int64_t dim, int64_t h);

}  // namespace kda::conformance

#include "conformance/pools.h"

namespace kda::conformance {

void check_states(Report& report, const std::string& what, const Written& w, int64_t heads, int64_t elements,
                  double limit) {
  const int64_t rows = w.after.shape()[0];
  std::vector<int64_t> changed;
  std::vector<double> got, wanted;
  for (int64_t n = 0; n < rows; ++n) {
    if (same_bits(select(w.reference_before, 0, n), select(w.reference_after, 0, n))) continue;
    changed.push_back(n);
    const std::vector<double> x = values(select(w.after, 0, n)), r = values(select(w.reference_after, 0, n));
    got.insert(got.end(), x.begin(), x.end());
    wanted.insert(wanted.end(), r.begin(), r.end());
  }
  report.expect_none(what + ": memory that the call does not name",
                     Snapshot(w.before).changes_outside(w.after, changed));
  if (changed.empty()) return;
  Comparison c = compare_states(got, wanted, heads, elements, absolute_floor(w.after.dtype()));
  for (Coordinate* at : {&c.head_at, &c.row_at}) {
    if (at->sequence >= 0) at->sequence = changed[static_cast<size_t>(at->sequence)];
  }
  report.measure(what, c, limit, w.after.dtype(), static_cast<int64_t>(got.size()), elements);
}

}  // namespace kda::conformance

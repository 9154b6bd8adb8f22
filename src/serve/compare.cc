#include "serve/compare.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "serve/convert.h"

namespace kda::serve {
namespace {

// Classes that must agree before numbers are compared.
int mask(double x) { return std::isnan(x) ? 1 : std::isinf(x) ? (x > 0 ? 2 : 3) : 0; }

double ratio(double difference, double norm) {
  if (difference == 0) return 0;
  return norm > 0 ? std::sqrt(difference / norm) : std::numeric_limits<double>::infinity();
}

}  // namespace

TensorError compare(const void* got, kda_dtype dtype, const double* want, int64_t rows, int64_t heads, int64_t dim) {
  TensorError e;
  double all_difference = 0, all_norm = 0;
  for (int64_t h = 0; h < heads; ++h) {
    double head_difference = 0, head_norm = 0, worst = -1;
    int64_t worst_row = 0;
    for (int64_t r = 0; r < rows; ++r) {
      double difference = 0, norm = 0;
      for (int64_t i = 0; i < dim; ++i) {
        const int64_t at = (r * heads + h) * dim + i;
        const double x = load(got, dtype, at), y = want[at];
        if (mask(x) != mask(y)) {
          if (e.masks_equal) e.mask_row = r, e.mask_head = h;
          e.masks_equal = false;
          continue;
        }
        if (mask(y) != 0) continue;
        difference += (x - y) * (x - y);
        norm += y * y;
      }
      if (difference > worst) worst = difference, worst_row = r;
      e.row_rel = std::fmax(e.row_rel, ratio(difference, norm));
      head_difference += difference;
      head_norm += norm;
    }
    const double head_rel = ratio(head_difference, head_norm);
    if (h == 0 || head_rel > e.head_rel) e.head_rel = head_rel, e.head = h, e.row = worst_row;
    all_difference += head_difference;
    all_norm += head_norm;
  }
  e.rel = ratio(all_difference, all_norm);
  return e;
}

std::string TensorError::describe(double limit) const {
  if (!masks_equal) {
    return fmt::format("NaN or Inf in other places than the oracle's, first at head {}, token {}", mask_head,
                       mask_row);
  }
  return fmt::format(
      "relative L2 {:.3e} (limit {:.1e}), worst head {}: {:.3e} (limit {:.1e}), most of it at token {}; worst row "
      "{:.3e}",
      rel, limit, head, head_rel, 2 * limit, row, row_rel);
}

}  // namespace kda::serve

// Pools of a case: what a call may have written in them, checked slot by slot.
#pragma once

#include <string>
#include <vector>

#include "conformance/cases.h"
#include "conformance/tensor.h"

namespace kda::conformance {

// A tensor before and after a call, by the backend and by the reference (fp64 states).
struct Written {
  const Tensor& before;
  const Tensor& after;
  const Tensor& reference_before;
  const Tensor& reference_after;
};

// Rows (outermost index) that the reference left alone must have kept their bits, gaps too; the others are compared
// as states [rows, heads, elements] within `limit`.
void check_states(Report& report, const std::string& what, const Written& written, int64_t heads, int64_t elements,
                  double limit);

}  // namespace kda::conformance

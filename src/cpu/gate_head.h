// The constants of one value head's gate, from the plan and A_log (spec E-1), for every operator of the CPU backend.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/tensor.h"
#include "cpu/common.h"

namespace kda::cpu {

// Kept finite: where exp(A_log) or the bound passes fp32's range, an infinity would make 0 * inf of a gate of zero.
inline GateHead gate_head(const kda_attention_spec& a, const kda_tensor& A_log, int64_t hv) {
  constexpr double kMost = std::numeric_limits<float>::max();
  GateHead head;
  head.family = a.gate_family;
  head.lower_bound = static_cast<float>(std::max(a.lower_bound, -kMost));
  if (present(A_log)) {
    // A NaN stays one: min gives its first argument then.
    head.a = static_cast<float>(std::min(std::exp(double{static_cast<const float*>(A_log.data)[hv]}), kMost));
  }
  return head;
}

}  // namespace kda::cpu

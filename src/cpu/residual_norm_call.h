// What the host half of residual_norm hands to its kernel.
#pragma once

#include "core/operators.h"
#include "cpu/isa.h"

namespace kda::cpu {

struct ResidualNormCall {
  const kda_residual_norm_desc* desc;
  const kda_residual_norm_args* args;
};

struct ResidualNormFunctions {
  // Token rows [r0, r1). Scratch: 2 * padded(D) floats.
  void (*run)(const ResidualNormCall& call, int64_t r0, int64_t r1, float* scratch);
};
const ResidualNormFunctions& residual_norm_functions(Isa isa);

}  // namespace kda::cpu

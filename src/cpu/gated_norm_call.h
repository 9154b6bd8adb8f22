// What the host half of gated_norm hands to its kernel.
#pragma once

#include "core/operators.h"
#include "cpu/isa.h"

namespace kda::cpu {

struct GatedNormCall {
  const kda_gated_norm_desc* desc;
  const kda_gated_norm_args* args;
};

struct GatedNormFunctions {
  // Token rows [r0, r1) of the [B·T] rows, all heads. Scratch: 2·padded(V) floats.
  void (*run)(const GatedNormCall& call, int64_t r0, int64_t r1, float* scratch);
};
const GatedNormFunctions& gated_norm_functions(Isa isa);

}  // namespace kda::cpu

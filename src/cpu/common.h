// Plain definitions that the host half and the kernels of the CPU backend share.
#pragma once

#include <cstdint>

#include "kda/types.h"

namespace kda::cpu {

// Rows in scratch memory are whole vectors of any ISA, zero behind their elements.
constexpr int64_t kRowPad = 16;
constexpr int64_t padded(int64_t n) { return (n + kRowPad - 1) / kRowPad * kRowPad; }

// Head sizes that every operator serves (spec Z-9).
constexpr int64_t kMaxKeyDim = 256;
constexpr int64_t kMaxValueDim = 1024;

// Gate constants of one value head (spec E-1).
struct GateHead {
  kda_gate_family family = KDA_GATE_SOFTPLUS;
  float a = 1.0f;            // exp(A_log[hv])
  float lower_bound = 0.0f;  // bounded family
};

}  // namespace kda::cpu

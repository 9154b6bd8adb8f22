// The limits of spec N-9, for the tensor; a single (sequence, head) may have twice that (Comparison::within).
#pragma once

#include <kda/types.h>

#include <cstdint>

namespace kda::conformance {

struct Limits {
  double out, state;
};

// How a candidate computes: fp32 throughout (CPU; decode and verify everywhere), or products on tensor cores.
enum class Arithmetic { kFp32, kTensorCores };

// `degenerate`: D9..D11 (repeated and near-equal keys).
Limits limits(kda_dtype io, bool degenerate = false, Arithmetic arithmetic = Arithmetic::kFp32);
// Chained operators with io() between them (E-11): N-9's first row for 16-bit io, 1e-5 for fp32.
Limits chained_limits(kda_dtype io);
// What storing a state in a pool of this dtype adds to its error.
double pool_rounding(kda_dtype pool);

// `limit` for `elements` values stored in a dtype. N-9's figures for 16-bit types are what rounding costs on average
// over many values; of a few values each may be rounded by half a unit in its last place.
double for_size(double limit, kda_dtype stored, int64_t elements);

}  // namespace kda::conformance

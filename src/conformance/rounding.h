// Rounding to storage types, written apart from the library's (src/base/half.h) so that one can check the other:
// values are rounded in fp64 by scaling to integers, then encoded exactly.
#pragma once

#include <kda/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kda::conformance {

// x rounded once to the type's value set, to nearest even, without saturation (spec G-2).
double round_to(kda_dtype dtype, double x);

// Writes round_to(dtype, x) at p, in the type's encoding; integers and bools toward zero, kept within
// the type's range, NaN as 0.
void store(void* p, kda_dtype dtype, double x);
// Reads one element, exactly.
double load(const void* p, kda_dtype dtype);

// In place, for vectors.
std::vector<double> rounded(kda_dtype dtype, std::vector<double> x);

}  // namespace kda::conformance

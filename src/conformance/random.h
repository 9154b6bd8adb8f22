// R(s, shape): the reproducible uniform numbers of the field cases and of spec N-10, in [-1, 1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kda::conformance {

// splitmix64's output for the given state (the increment is added first).
uint64_t splitmix64(uint64_t state);

// Element `i` (C order) of R(stream); exact in fp32.
double uniform(uint32_t stream, uint64_t i);

// R(stream, shape) with `count` elements in all.
std::vector<double> uniform_vector(uint32_t stream, int64_t count);

}  // namespace kda::conformance

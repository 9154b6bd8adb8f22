// The names of conformance/compare.h for tests.
#pragma once

#include "conformance/compare.h"
#include "support/tensor.h"

namespace kda::test {
using conformance::compare_flat;
using conformance::compare_outputs;
using conformance::compare_states;
using conformance::Comparison;
using conformance::Coordinate;
using conformance::head_norm;
using conformance::norm;
}  // namespace kda::test

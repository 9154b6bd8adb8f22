// The names of conformance/distributions.h for tests.
#pragma once

#include "conformance/distributions.h"
#include "support/tensor.h"

namespace kda::test {
using conformance::Distribution;
using conformance::distribution;
using conformance::field_problem;
using conformance::FieldInput;
using conformance::GateForm;
using conformance::inverse_softplus;
using conformance::kDistributions;
using conformance::Problem;
}  // namespace kda::test

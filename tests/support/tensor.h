// The names of conformance/tensor.h for tests.
#pragma once

#include "conformance/tensor.h"

namespace kda::test {
using conformance::assign;
using conformance::canary_pool;
using conformance::dense_strides;
using conformance::element;
using conformance::fill;
using conformance::first_difference;
using conformance::narrow;
using conformance::product;
using conformance::reshape;
using conformance::same_bits;
using conformance::select;
using conformance::Shape;
using conformance::Snapshot;
using conformance::Tensor;
using conformance::values;
}  // namespace kda::test

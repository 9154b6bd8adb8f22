// The names of conformance/covering.h for tests.
#pragma once

#include "conformance/covering.h"

namespace kda::test {
using conformance::covering_pairs;
}  // namespace kda::test

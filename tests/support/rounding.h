// The names of conformance/rounding.h for tests.
#pragma once

#include "conformance/rounding.h"

namespace kda::test {
using conformance::load;
using conformance::round_to;
using conformance::rounded;
using conformance::store;
}  // namespace kda::test

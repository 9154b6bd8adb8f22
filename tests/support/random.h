// The names of conformance/random.h for tests.
#pragma once

#include "conformance/random.h"

namespace kda::test {
using conformance::splitmix64;
using conformance::uniform;
using conformance::uniform_vector;
}  // namespace kda::test

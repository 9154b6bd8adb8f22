// Files of expected values made by other implementations (tests/data/vectors/README.md) as cases.
#pragma once

#include <string>
#include <vector>

#include "conformance/cases.h"

namespace kda::conformance {

struct VectorCases {
  std::vector<Case> cases;
  std::vector<std::string> skipped;  // "name: why"
  std::vector<std::string> unknown;  // safetensors files that nobody here knows
};

// The safetensors files of a folder, sorted by name. Throws std::runtime_error if it cannot be listed. A damaged file
// is a case that fails.
VectorCases vector_cases(const std::string& directory);

}  // namespace kda::conformance

// A named conformance vector file of tests/data/vectors (see the README there) as test tensors.
#pragma once

#include <map>
#include <string>

#include "support/tensor.h"

namespace kda::test {

// Tensor name to tensor; throws std::runtime_error if the file cannot be read.
std::map<std::string, Tensor> load_vectors(const std::string& name);

}  // namespace kda::test

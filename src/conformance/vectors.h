// Safetensors files as tensors: vectors of expected values.
#pragma once

#include <map>
#include <string>

#include "conformance/tensor.h"

namespace kda::conformance {

using Vectors = std::map<std::string, Tensor>;

// Every tensor of a file by name; throws kda::Error (damaged, or a type that cannot be read).
Vectors read_vectors(const std::string& path);

}  // namespace kda::conformance

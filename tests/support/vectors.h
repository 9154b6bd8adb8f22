// A named conformance vector file of tests/data/vectors (see the README there) as tensors.
#pragma once

#include "conformance/vectors.h"

namespace kda::test {

inline conformance::Vectors load_vectors(const std::string& name) {
  return conformance::read_vectors(std::string(KDA_TEST_DATA_DIR) + "/vectors/" + name + ".safetensors");
}

}  // namespace kda::test

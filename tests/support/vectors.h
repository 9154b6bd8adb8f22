// A named conformance vector file of tests/data/vectors (see the README there) as tensors.
#pragma once

#include <cstdlib>
#include <string>

#include "conformance/vectors.h"

namespace kda::conformance::test {

// A program that was packed for another machine finds its data beside itself (scripts/gpu-check).
inline std::string data_dir() {
  const char* given = std::getenv("KDA_TEST_DATA_DIR");
  return given != nullptr ? given : KDA_TEST_DATA_DIR;
}

inline Vectors load_vectors(const std::string& name) {
  return read_vectors(data_dir() + "/vectors/" + name + ".safetensors");
}

}  // namespace kda::conformance::test

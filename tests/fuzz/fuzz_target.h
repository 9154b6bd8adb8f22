// A fuzz target is one function; libFuzzer's main or that of run_corpus.cc calls it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

inline void must(bool condition) {
  if (!condition) std::abort();
}

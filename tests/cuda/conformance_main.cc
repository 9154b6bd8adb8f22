// The conformance suite (tests/conformance) over the CUDA candidates. Without a device: exit code 2 and the reason.
#include <gtest/gtest.h>

#include <cstdio>

#include "runtime.h"

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);  // a run that is stopped shows where
  testing::InitGoogleTest(&argc, argv);
  kda::cuda_test::Memory memory;
  kda::conformance::set_device(kda::cuda_test::context(), &memory);
  std::printf("%s\n", kda::cuda_test::device_text().c_str());
  const int result = RUN_ALL_TESTS();
  kda::conformance::set_device(nullptr, nullptr);
  return result;
}

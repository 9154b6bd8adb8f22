// Contract tests of operators that have no plan object in conformance/api.h, on the device where the program has one.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "conformance/api.h"
#include "conformance/device.h"

namespace kda::conformance::test {

// True in the programs that run checks on a device (tests/cuda): contract tests of the operators that have no plan
// object in conformance/api.h then go there too.
inline bool on_device() { return device_context() != nullptr; }
// The context of those tests.
inline kda_context* test_context() { return on_device() ? device_context() : cpu_context(); }
// Checks that look at host memory while they run, or count its calls.
#define KDA_HOST_MEMORY_ONLY()                                                                \
  do {                                                                                        \
    if (::kda::conformance::test::on_device()) GTEST_SKIP() << "looks at host memory itself"; \
  } while (false)
// Runs a call whose tensors (all but host ones) are `tensors`, on the device: they travel there and back, guards
// included.
template <class Call>
kda_status call_there(const std::vector<kda_tensor*>& tensors, const Call& call) {
  Mirror mirror(*memory_of(device_context()), tensors, 0);
  if (!mirror.ok()) return KDA_OUT_OF_MEMORY;
  const kda_status status = call();
  return mirror.back().empty() ? status : KDA_INTERNAL;
}

}  // namespace kda::conformance::test

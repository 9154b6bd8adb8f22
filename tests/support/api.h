// The names of conformance/api.h for tests.
#pragma once

#include "conformance/api.h"
#include "support/distributions.h"
#include "support/tensor.h"

namespace kda::test {
using conformance::cpu_context;
using conformance::decode_args;
using conformance::decode_desc;
using conformance::make_plan;
using conformance::make_summary_plan;
using conformance::oracle;
using conformance::Outcome;
using conformance::Plan;
using conformance::prefill;
using conformance::prefill_args;
using conformance::prefill_desc;
using conformance::PrefillOptions;
using conformance::sized;

// True in the programs that run checks on a device (tests/cuda): contract tests of the operators that have no plan
// object in conformance/api.h then go there too.
inline bool on_device() { return conformance::device_context() != nullptr; }
// The context of those tests.
inline kda_context* test_context() { return on_device() ? conformance::device_context() : cpu_context(); }
// Checks that look at host memory while they run, or count its calls.
#define KDA_HOST_MEMORY_ONLY()                                                   \
  do {                                                                           \
    if (::kda::test::on_device()) GTEST_SKIP() << "looks at host memory itself"; \
  } while (false)
// Runs a call whose tensors (all but host ones) are `tensors`, on the device: they travel there and back, guards
// included.
template <class Call>
kda_status call_there(const std::vector<kda_tensor*>& tensors, const Call& call) {
  conformance::Mirror mirror(*conformance::memory_of(conformance::device_context()), tensors, 0);
  if (!mirror.ok()) return KDA_OUT_OF_MEMORY;
  const kda_status status = call();
  return mirror.back().empty() ? status : KDA_INTERNAL;
}
}  // namespace kda::test

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
}  // namespace kda::test

// scripts/test runs the kernel tests once per instruction set with KDA_FORCE_ISA; this is the proof that the forced
// one ran.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "conformance/api.h"
#include "conformance/distributions.h"

namespace kda::conformance::test {
namespace {

TEST(Isa, TheForcedOneRuns) {
  const char* expected = std::getenv("KDA_EXPECT_ISA");
  if (expected == nullptr) expected = std::getenv("KDA_FORCE_ISA");
  const std::string best = std::string(kda_cpu_isas()).substr(0, std::string(kda_cpu_isas()).find(','));
  const std::string wanted = expected == nullptr ? best : expected;
  EXPECT_EQ(wanted, kda_context_isa(cpu_context()));

  FieldInput input;
  input.lengths = {1};
  input.heads = 1;
  const Problem p = field_problem(input);
  const Plan prefill = make_plan(prefill_desc(p, "portable"));
  ASSERT_TRUE(prefill.ok()) << prefill.message();
  EXPECT_EQ(wanted, kda_plan_isa(prefill.get()));
  const Plan decode = make_plan(decode_desc(p, "portable"));
  ASSERT_TRUE(decode.ok()) << decode.message();
  EXPECT_EQ(wanted, kda_plan_isa(decode.get()));
}

}  // namespace
}  // namespace kda::conformance::test

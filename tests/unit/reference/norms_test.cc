// The oracle against the norms that the specification and the field cases give.
#include <gtest/gtest.h>

#include "conformance/api.h"
#include "conformance/compare.h"
#include "conformance/distributions.h"

namespace kda::conformance::test {

class Norms : public testing::TestWithParam<Distribution> {};

TEST_P(Norms, N10_OutAndStateNormsOfTheDistributions) {
  const Distribution& d = GetParam();
  for (GateForm form : {GateForm::kPlain, GateForm::kRaw}) {
    if (form == GateForm::kRaw && d.number <= 2) continue;
    const Outcome r = oracle(distribution(d.number, form));
    ASSERT_EQ(r.status, KDA_OK) << r.message;
    EXPECT_NEAR(norm(r.out.values()) / d.out_norm, 1, 1e-6) << norm(r.out.values());
    EXPECT_NEAR(norm(r.state.values()) / d.state_norm, 1, 1e-6) << norm(r.state.values());
  }
}

INSTANTIATE_TEST_SUITE_P(D, Norms, testing::ValuesIn(kDistributions),
                         [](const auto& p) { return std::to_string(p.param.number); });

}  // namespace kda::conformance::test

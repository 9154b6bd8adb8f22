#include "conformance/random.h"

#include <gtest/gtest.h>

namespace kda::conformance::test {

TEST(Generator, FieldCases_GivenValues) {
  EXPECT_NEAR(uniform(1, 0), 0.5326035, 5e-8);
  EXPECT_NEAR(uniform(1, 1), -0.7479380, 5e-8);
  EXPECT_NEAR(uniform(1, 2), 0.4018624, 5e-8);
  EXPECT_NEAR(uniform(2, 0), 0.8101304, 5e-8);
}

TEST(Generator, FieldCases_ExactInFp32AndInRange) {
  for (uint64_t i = 0; i < 10000; ++i) {
    const double r = uniform(3, i);
    EXPECT_GE(r, -1);
    EXPECT_LT(r, 1);
    EXPECT_EQ(r, static_cast<double>(static_cast<float>(r)));
  }
}

}  // namespace kda::conformance::test

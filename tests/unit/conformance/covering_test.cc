#include "conformance/covering.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>

namespace kda::conformance {
namespace {

using Pair = std::tuple<size_t, int, size_t, int>;

std::set<Pair> pairs_of(const std::vector<std::vector<int>>& cases) {
  std::set<Pair> found;
  for (const auto& c : cases) {
    for (size_t p = 0; p < c.size(); ++p) {
      for (size_t q = p + 1; q < c.size(); ++q) found.insert({p, c[p], q, c[q]});
    }
  }
  return found;
}

}  // namespace

TEST(CoveringPairs, EveryPairOccursAndTheCasesAreFew) {
  const std::vector<int> sizes = {5, 3, 2, 4};
  const auto cases = covering_pairs(sizes);
  EXPECT_EQ(pairs_of(cases).size(), 5u * 3 + 5 * 2 + 5 * 4 + 3 * 2 + 3 * 4 + 2 * 4);
  EXPECT_LE(cases.size(), 30u);  // 20 at least, 120 in the full product
}

TEST(CoveringPairs, ForbiddenCombinationsNeverOccurAndCostNoOtherPair) {
  const std::vector<int> sizes = {4, 4, 3};
  const auto allowed = [](const std::vector<int>& c) { return !(c[0] == 3 && c[1] >= 2); };
  const auto cases = covering_pairs(sizes, allowed);
  for (const auto& c : cases) EXPECT_TRUE(allowed(c));
  EXPECT_EQ(pairs_of(cases).size(), 4u * 4 - 2 + 4 * 3 + 4 * 3);
}

TEST(CoveringPairs, AContradictionEnds) {
  // Values (1, 1) of two parameters are possible only with a third value that is not.
  const auto allowed = [](const std::vector<int>& c) { return !(c[0] == 1 && c[1] == 1 && c[2] >= 0); };
  for (const auto& c : covering_pairs({2, 2, 2}, allowed)) EXPECT_FALSE(c[0] == 1 && c[1] == 1);
}

}  // namespace kda::conformance

// Pairwise covering arrays: every pair of values of two parameters occurs in some case, in far fewer cases than
// the full product has.
#pragma once

#include <vector>

namespace kda::test {

// `sizes[p]` = number of values of parameter p. Each case holds one value number per parameter. Deterministic.
std::vector<std::vector<int>> covering_pairs(const std::vector<int>& sizes);

}  // namespace kda::test

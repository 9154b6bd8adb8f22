// Pairwise covering: few rows that hold every pair of levels of every two factors.
#pragma once

#include <vector>

namespace kda::test {

// `levels[f]` is the number of levels of factor f; each row names a level for every factor. Deterministic.
std::vector<std::vector<int>> pairwise(const std::vector<int>& levels);

}  // namespace kda::test

#include "support/pairwise.h"

#include <cstddef>
#include <set>
#include <tuple>

#include "support/random.h"

namespace kda::test {

std::vector<std::vector<int>> pairwise(const std::vector<int>& levels) {
  using Pair = std::tuple<size_t, int, size_t, int>;  // factor a < b with their levels
  std::set<Pair> open;
  const size_t n = levels.size();
  for (size_t a = 0; a < n; ++a) {
    for (size_t b = a + 1; b < n; ++b) {
      for (int i = 0; i < levels[a]; ++i) {
        for (int j = 0; j < levels[b]; ++j) open.insert({a, i, b, j});
      }
    }
  }
  std::vector<std::vector<int>> rows;
  uint64_t seed = 0;
  while (!open.empty()) {
    // Of some random rows that hold an open pair take the one that covers most.
    std::vector<int> best;
    size_t best_covered = 0;
    for (int attempt = 0; attempt < 50; ++attempt) {
      std::vector<int> row(n);
      for (size_t f = 0; f < n; ++f) row[f] = static_cast<int>(splitmix64(seed++) % static_cast<uint64_t>(levels[f]));
      const auto& [a, i, b, j] = *open.begin();
      row[a] = i;
      row[b] = j;
      size_t covered = 0;
      for (size_t x = 0; x < n; ++x) {
        for (size_t y = x + 1; y < n; ++y) covered += open.count({x, row[x], y, row[y]});
      }
      if (covered > best_covered) {
        best = row;
        best_covered = covered;
      }
    }
    for (size_t x = 0; x < n; ++x) {
      for (size_t y = x + 1; y < n; ++y) open.erase({x, best[x], y, best[y]});
    }
    rows.push_back(best);
  }
  return rows;
}

}  // namespace kda::test

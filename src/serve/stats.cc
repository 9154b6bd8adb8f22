#include "serve/stats.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kda::serve {

Percentiles percentiles(std::vector<double> samples) {
  Percentiles p;
  if (samples.empty()) return p;
  std::sort(samples.begin(), samples.end());
  const auto n = static_cast<double>(samples.size());
  const auto rank = [&](double q) {
    const auto i = static_cast<size_t>(std::max(0.0, std::ceil(q * n) - 1));
    return samples[std::min(i, samples.size() - 1)];
  };
  p.p50 = rank(0.5);
  p.p90 = rank(0.9);
  p.p99 = rank(0.99);
  p.max = samples.back();
  p.mean = std::accumulate(samples.begin(), samples.end(), 0.0) / n;
  p.count = static_cast<int64_t>(samples.size());
  return p;
}

}  // namespace kda::serve

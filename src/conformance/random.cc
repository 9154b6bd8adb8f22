#include "conformance/random.h"

namespace kda::conformance {

uint64_t splitmix64(uint64_t state) {
  uint64_t z = state + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

double uniform(uint32_t stream, uint64_t i) {
  const uint64_t m = splitmix64((uint64_t{stream} << 32) + i);
  return static_cast<double>(m >> 40) * 0x1p-23 - 1.0;
}

std::vector<double> uniform_vector(uint32_t stream, int64_t count) {
  std::vector<double> x(static_cast<size_t>(count));
  for (size_t i = 0; i < x.size(); ++i) x[i] = uniform(stream, i);
  return x;
}

}  // namespace kda::conformance

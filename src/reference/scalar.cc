#include "reference/scalar.h"

#include <cstring>

namespace kda::reference {

void load_row(const char* p, kda_dtype dtype, int64_t n, double* x) {
  const auto size = static_cast<int64_t>(dtype_size(dtype));
  for (int64_t i = 0; i < n; ++i) x[i] = load(p + i * size, dtype);
}

void store_row(char* p, kda_dtype dtype, int64_t n, const double* x) {
  const auto size = static_cast<int64_t>(dtype_size(dtype));
  for (int64_t i = 0; i < n; ++i) store(p + i * size, dtype, x[i]);
}

void zero_row(char* p, kda_dtype dtype, int64_t n) { std::memset(p, 0, static_cast<size_t>(n) * dtype_size(dtype)); }

}  // namespace kda::reference

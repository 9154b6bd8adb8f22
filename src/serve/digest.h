// 128-bit digests of a request's results, one running value per layer: h <- XXH3(h, bytes). Rows arrive in token
// order whatever the step boundaries, so the value depends on the rows' bits alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kda::serve {

struct Hash128 {
  uint64_t low = 0, high = 0;
  bool operator==(const Hash128&) const = default;
};

Hash128 hash128(const void* data, size_t bytes);
Hash128 chain(const Hash128& before, const void* data, size_t bytes);
// 32 hexadecimal digits.
std::string to_hex(const Hash128& hash);

class Digest {
 public:
  explicit Digest(int32_t layers = 0) : layers_(static_cast<size_t>(layers)) {}
  // Adds `rows` rows of `row_bytes` bytes each; the same value whether they come at once or one by one.
  void add_rows(int32_t layer, const char* rows, int64_t count, int64_t row_bytes);
  void add(int32_t layer, const void* data, size_t bytes);
  Hash128 result() const;

 private:
  std::vector<Hash128> layers_;
};

}  // namespace kda::serve

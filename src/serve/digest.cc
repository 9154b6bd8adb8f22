#include "serve/digest.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kda::serve {

Hash128 hash128(const void* data, size_t bytes) {
  const XXH128_hash_t h = XXH3_128bits(data, bytes);
  return {h.low64, h.high64};
}

Hash128 chain(const Hash128& before, const void* data, size_t bytes) {
  const Hash128 link[2] = {before, hash128(data, bytes)};
  return hash128(link, sizeof link);
}

std::string to_hex(const Hash128& hash) { return fmt::format("{:016x}{:016x}", hash.high, hash.low); }

void Digest::add(int32_t layer, const void* data, size_t bytes) {
  Hash128& h = layers_[static_cast<size_t>(layer)];
  h = chain(h, data, bytes);
}

void Digest::add_rows(int32_t layer, const char* rows, int64_t count, int64_t row_bytes) {
  for (int64_t i = 0; i < count; ++i) add(layer, rows + i * row_bytes, static_cast<size_t>(row_bytes));
}

Hash128 Digest::result() const { return hash128(layers_.data(), layers_.size() * sizeof(Hash128)); }

}  // namespace kda::serve

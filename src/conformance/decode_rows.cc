#include "conformance/decode_rows.h"

#include <algorithm>
#include <cstdlib>

#include "conformance/random.h"

namespace kda::conformance {

std::vector<std::string> row_patterns() { return {"1xfull", "3xmixed", "8xmixed", "32x1", "256x1"}; }
std::vector<std::string> slots_names() { return {"packed", "table", "dead", "gapped", "apart", "null0", "active"}; }
std::vector<std::string> accepted_names() { return {"absent", "valid", "bad"}; }

std::vector<int64_t> row_lengths(const RowChoice& c) {
  const size_t x = c.pattern.find('x');
  const int64_t rows = std::atoll(c.pattern.c_str());
  const std::string kind = c.pattern.substr(x + 1);
  std::vector<int64_t> lengths;
  for (int64_t n = 0; n < rows; ++n) {
    if (kind == "full") lengths.push_back(c.width);
    else if (kind == "mixed") lengths.push_back((2 * n + 1) % (c.width + 2));
    else lengths.push_back(std::min<int64_t>(std::atoll(kind.c_str()), c.width));
  }
  return lengths;
}

static std::vector<int64_t> accepted_counts(const RowChoice& c, int64_t rows, const std::vector<int64_t>* count) {
  std::vector<int64_t> accepted;
  for (int64_t n = 0; n < rows; ++n) {
    const uint64_t random = splitmix64(static_cast<uint64_t>(n) + 77);
    const auto most = count ? (*count)[static_cast<size_t>(n)] : c.width;
    accepted.push_back(count ? static_cast<int64_t>(random % static_cast<uint64_t>(most + 1))
                             : 1 + static_cast<int64_t>(random % static_cast<uint64_t>(most)));
    if (c.accepted != Accepted::kBad) continue;
    const int64_t bad[] = {count ? -1 : 0, most + 1, 100, -2147483647};
    if (n % 3 == 1) accepted.back() = bad[n / 3 % 4];
  }
  return accepted;
}

RowTables row_tables(const RowChoice& c, int64_t rows, int64_t columns, const std::vector<int64_t>* count) {
  RowTables t;
  const kda_dtype index = c.wide_index ? KDA_INT64 : KDA_INT32;
  const bool apart = c.slots == Slots::kApart;
  t.slots_in_pool = c.slots == Slots::kPacked ? rows : 1 + rows * columns * (apart ? 2 : 1);
  std::vector<int64_t> accepted(static_cast<size_t>(rows), 1);
  if (c.accepted != Accepted::kAbsent) {
    accepted = accepted_counts(c, rows, count);
    t.accepted = Tensor::ints(accepted);
  }
  if (c.slots == Slots::kNullZero) t.null_slot = 0;
  if (c.slots == Slots::kPacked) {
    for (int64_t n = 0; n < rows; ++n) t.start.push_back(n);
    return t;
  }
  // Tables lie in wider rows, as block tables do; a free slot every row is the reverse of order.
  const auto table = [&](int64_t first, bool spoil) {
    Tensor slots(index, {rows, columns}, {columns + 3, 1}, 2);
    for (int64_t n = 0; n < rows; ++n) {
      for (int64_t j = 0; j < columns; ++j) {
        int64_t slot = first + (rows - 1 - n) * columns + j;
        const bool dead = spoil && (n + j) % 4 == 1;
        if (dead) slot = c.slots == Slots::kNullZero ? 0 : n % 2 == 0 ? -1 : t.slots_in_pool + slot;
        slots.set({n, j}, static_cast<double>(slot));
      }
    }
    return slots;
  };
  t.slots = table(1, c.slots == Slots::kDead || c.slots == Slots::kNullZero);
  if (apart) t.write_slots = table(1 + rows * columns, false);
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t column = count ? 0 : accepted[static_cast<size_t>(n)] - 1;
    const auto slot = column >= 0 && column < columns ? static_cast<int64_t>(t.slots.get({n, column})) : int64_t{-1};
    t.start.push_back(slot > 0 && slot < t.slots_in_pool ? slot : -1);
  }
  return t;
}

}  // namespace kda::conformance

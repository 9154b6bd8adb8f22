// The aliasing check (G-9) against the set of bytes that two views really touch.
#include <gtest/gtest.h>

#include <set>

#include "conformance/random.h"
#include "core/validate.h"

namespace kda {
namespace {

std::set<int64_t> bytes_of(const kda_tensor& t) {
  std::set<int64_t> bytes;
  const auto base = reinterpret_cast<intptr_t>(t.data);
  for (int64_t i = 0; i < t.shape[0]; ++i) {
    for (int64_t j = 0; j < t.shape[1]; ++j) {
      for (int64_t k = 0; k < t.shape[2]; ++k) {
        const int64_t first = base + 2 * (i * t.strides[0] + j * t.strides[1] + k * t.strides[2]);
        bytes.insert({first, first + 1});
      }
    }
  }
  return bytes;
}

}  // namespace

TEST(Aliasing, G09_AcceptsOnlyViewsThatShareNothing) {
  static unsigned char memory[4096];
  uint64_t seed = 0;
  const auto draw = [&](uint64_t n) { return static_cast<int64_t>(conformance::splitmix64(seed++) % n); };
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    // Slices of one [slots, rows, columns] buffer with gaps, some of other shapes and strides.
    const int64_t row = 8 + draw(5), slot = 4 * row + draw(9);
    kda_tensor views[2] = {};
    for (kda_tensor& t : views) {
      t.dtype = KDA_BF16;
      t.rank = 3;
      t.shape[0] = 1 + draw(3);
      t.shape[1] = 1 + draw(4);
      t.shape[2] = 1 + draw(6);
      t.strides[0] = draw(8) == 0 ? slot + 1 : slot;
      t.strides[1] = draw(8) == 0 ? row - 1 : row;
      t.strides[2] = 1;
      t.data = memory + 2 * draw(static_cast<uint64_t>(2 * row));
    }
    AliasCheck check;
    check.add("a", views[0], true);
    check.add("b", views[1], false);
    if (!check.result({}).ok()) continue;
    ++accepted;
    const std::set<int64_t> a = bytes_of(views[0]);
    for (const int64_t b : bytes_of(views[1])) ASSERT_EQ(a.count(b), 0u) << "round " << round;
  }
  EXPECT_GT(accepted, 500);
}

TEST(Aliasing, G09_WrittenViewsDoNotOverlapThemselves) {
  static unsigned char memory[1 << 14];
  uint64_t seed = 7;
  const auto draw = [&](uint64_t n) { return static_cast<int64_t>(conformance::splitmix64(seed++) % n); };
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    kda_tensor t = make_tensor(memory + (1 << 13), KDA_BF16, {1 + draw(4), 1 + draw(4), 1 + draw(4)});
    for (int64_t& stride : t.strides) stride = draw(24) - (draw(8) == 0 ? 24 : 0);
    AliasCheck check;
    check.add("a", t, true);
    if (!check.result({}).ok()) continue;
    ++accepted;
    ASSERT_EQ(bytes_of(t).size(), 2 * static_cast<size_t>(num_elements(t))) << "round " << round;
  }
  EXPECT_GT(accepted, 2000);
  // Whatever order the dimensions have; inputs may overlap themselves.
  AliasCheck fine;
  const kda_tensor transposed = {memory, KDA_BF16, {KDA_CPU, 0}, 3, {5, 3, 8}, {8, 40, 1}};
  const kda_tensor broadcast = {memory + 4096, KDA_BF16, {KDA_CPU, 0}, 3, {5, 3, 8}, {0, 8, 1}};
  fine.add("out", transposed, true);
  fine.add("k", broadcast, false);
  EXPECT_TRUE(fine.result({}).ok());
}

TEST(Aliasing, R35_AWorkspaceThatRunsToTheEndOfMemory) {
  static unsigned char memory[64];
  AliasCheck check;
  const kda_tensor t = make_tensor(memory, KDA_UINT8, {64});
  check.add("out", t, true);
  EXPECT_EQ(check.result({memory, SIZE_MAX}).code(), KDA_INVALID_ARGUMENT);
}

TEST(Aliasing, G09_PartsOfAMergedPoolAreApart) {
  // q, k, v windows as channel slices of [slots, L, 3P] in pages with a gap.
  static unsigned char memory[1 << 12];
  AliasCheck check;
  kda_tensor parts[3];
  const char* names[] = {"q", "k", "v"};
  for (int i = 0; i < 3; ++i) {
    parts[i] = {memory + 2 * 8 * i, KDA_BF16, {KDA_CPU, 0}, 3, {5, 3, 8}, {3 * 24 + 7, 24, 1}};
    check.add(names[i], parts[i], true);
  }
  EXPECT_TRUE(check.result({}).ok());
}

}  // namespace kda

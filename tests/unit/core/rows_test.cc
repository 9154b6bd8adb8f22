#include "core/rows.h"

#include <gtest/gtest.h>

namespace kda {
namespace {

kda_tensor view(std::vector<int32_t>& v) { return make_tensor(v.data(), KDA_INT32, {static_cast<int64_t>(v.size())}); }

TEST(Rows, P13_OffsetsAreClampedAndLengthsAreNotNegative) {
  std::vector<int32_t> cu = {0, 5, 3, 97};
  kda_sequences s{};
  s.cu_seqlens = view(cu);
  const SequenceTable table(s, make_tensor(nullptr, KDA_FP32, {70, 2, 4}), 3);
  EXPECT_EQ(table.count(), 3);
  EXPECT_EQ(table.span(1).length, 0);
  EXPECT_EQ(table.span(2).begin, 3);
  EXPECT_EQ(table.span(2).length, 67);
}

TEST(Rows, P13_RangesOutsideTheBufferKeepTheirInnerRows) {
  std::vector<int32_t> begin = {-2, 60, 80, INT32_MIN, 3}, length = {5, 100, 4, INT32_MAX, -1};
  kda_sequences s{};
  s.begin = view(begin);
  s.length = view(length);
  const SequenceTable table(s, make_tensor(nullptr, KDA_FP32, {70, 2, 4}), 3);
  EXPECT_EQ(table.span(0).begin, 0);
  EXPECT_EQ(table.span(0).length, 3);
  EXPECT_EQ(table.span(1).length, 10);
  EXPECT_EQ(table.span(2).length, 0);
  EXPECT_EQ(table.span(3).length, 0);
  EXPECT_EQ(table.span(4).length, 0);
}

TEST(Rows, P13_RangesAtTheEndsOfInt64) {
  std::vector<int64_t> begin = {INT64_MIN, INT64_MIN, INT64_MAX, 3, -4},
                       length = {INT64_MAX, INT64_MIN, INT64_MAX, INT64_MAX, INT64_MAX};
  kda_sequences s{};
  s.begin = make_tensor(begin.data(), KDA_INT64, {5});
  s.length = make_tensor(length.data(), KDA_INT64, {5});
  const SequenceTable table(s, make_tensor(nullptr, KDA_FP32, {70, 2, 4}), 3);
  EXPECT_EQ(table.span(0).length, 0);
  EXPECT_EQ(table.span(1).length, 0);
  EXPECT_EQ(table.span(2).length, 0);
  EXPECT_EQ(table.span(3).begin, 3);
  EXPECT_EQ(table.span(3).length, 67);
  EXPECT_EQ(table.span(4).begin, 0);
  EXPECT_EQ(table.span(4).length, 70);
}

TEST(Rows, Z01_RangesOfNoSequencesMayBeNull) {
  kda_sequences s{};
  s.begin = s.length = make_tensor(nullptr, KDA_INT32, {0});
  EXPECT_EQ(SequenceTable(s, make_tensor(nullptr, KDA_FP32, {70, 2, 4}), 3).count(), 0);
  // Without any vector a tensor of one sample is one sequence, also one without tokens (G-8).
  const SequenceTable whole({}, make_tensor(nullptr, KDA_FP32, {0, 2, 4}), 3);
  EXPECT_EQ(whole.count(), 1);
  EXPECT_EQ(whole.span(0).length, 0);
}

TEST(Rows, P05_P08_LiveDeadAndFreshSlots) {
  std::vector<int32_t> read = {1, -1, 5, 0, 1}, write = {2, 3, 3, 3, -1};
  std::vector<uint8_t> flags = {1, 1, 1, 0, 1};
  float pool[5] = {};
  const kda_tensor state = make_tensor(pool, KDA_FP32, {5, 1, 1, 1});
  const kda_tensor f = make_tensor(flags.data(), KDA_BOOL, {5});
  const SlotRule rule{KDA_INITIAL_FLAGS, 0};
  auto row = [&](int64_t n) { return state_row(rule, state, view(read), view(write), f, n); };
  EXPECT_TRUE(row(0).active);
  EXPECT_EQ(row(0).write_slot, 2);
  EXPECT_FALSE(row(1).active);  // negative
  EXPECT_FALSE(row(2).active);  // too large
  EXPECT_TRUE(row(3).active);   // fresh: the null read slot does not matter
  EXPECT_TRUE(row(3).fresh);
  EXPECT_TRUE(row(4).active);  // computes, stores nothing
  EXPECT_EQ(row(4).write_slot, -1);
}

}  // namespace
}  // namespace kda

#include "base/tensor.h"

#include <gtest/gtest.h>

#include "base/checked.h"

namespace kda {
namespace {

TEST(Checked, G10_ProductsAndSumsDoNotWrap) {
  EXPECT_EQ(checked_product({1 << 20, 1 << 20, 1 << 20}), int64_t{1} << 60);
  EXPECT_FALSE(checked_product({int64_t{1} << 32, int64_t{1} << 31}).has_value());
  EXPECT_FALSE(checked_add(INT64_MAX, 1).has_value());
  EXPECT_EQ(ceil_div(65, 64), 2);
  EXPECT_EQ(round_up(64, 64), 64);
}

TEST(Tensor, ByteRangeFollowsStrides) {
  float data[64] = {};
  kda_tensor t = make_tensor(data, KDA_FP32, {2, 3});
  t.strides[0] = 10;
  const ByteRange range = byte_range(t);
  EXPECT_EQ(range.last - range.first, (10 + 3) * sizeof(float));
  t.shape[0] = 0;
  EXPECT_FALSE(byte_range(t).overlaps(range));
}

TEST(Tensor, InnerDenseIgnoresStridesOfSizeOne) {
  float data[24] = {};
  kda_tensor t = make_tensor(data, KDA_FP32, {2, 1, 3, 4});
  t.strides[1] = 77;
  EXPECT_TRUE(inner_dense(t, 3));
  t.strides[2] = 5;
  EXPECT_FALSE(inner_dense(t, 2));
  EXPECT_TRUE(inner_dense(t, 1));
}

TEST(Tensor, F23_OffsetsOfLargeInputsAreExact) {
  // B = 16, H = 64, K = 128: first row of the last head of the last sample (limit 2,147,483,647 in 32 bits).
  for (const auto& [tokens, offset] : {std::pair<int64_t, int64_t>{17476, 2147458944}, {17477, 2147581824}}) {
    kda_tensor t = make_tensor(nullptr, KDA_BF16, {16, tokens, 64, 128});
    EXPECT_EQ(15 * t.strides[0] + 63 * t.strides[2], offset);
  }
}

TEST(Tensor, IndexViewReadsBothWidthsThroughStrides) {
  const int32_t narrow[] = {4, 9999, 2, 9999, 7, 9999};
  const int64_t wide[] = {4, 2, int64_t{1} << 40};
  kda_tensor t = make_tensor(const_cast<int32_t*>(narrow), KDA_INT32, {3});
  t.strides[0] = 2;
  EXPECT_EQ(index_view(t)[2], 7);
  EXPECT_EQ(index_view(make_tensor(const_cast<int64_t*>(wide), KDA_INT64, {3}))[2], int64_t{1} << 40);
  const kda_tensor table = make_tensor(const_cast<int32_t*>(narrow), KDA_INT32, {3, 2});
  EXPECT_EQ(index_row(table, 1)[0], 2);
  EXPECT_EQ(index_row(table, 1).size, 2);
}

}  // namespace
}  // namespace kda

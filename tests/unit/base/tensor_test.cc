#include "base/tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/checked.h"
#include "kda/kda.h"

namespace kda {
namespace {

TEST(Checked, G10_ProductsAndSumsDoNotWrap) {
  EXPECT_EQ(checked_product({1 << 20, 1 << 20, 1 << 20}), int64_t{1} << 60);
  EXPECT_FALSE(checked_product({int64_t{1} << 32, int64_t{1} << 31}).has_value());
  EXPECT_FALSE(checked_add(INT64_MAX, 1).has_value());
  EXPECT_EQ(ceil_div(65, 64), 2);
  EXPECT_EQ(round_up(64, 64), 64);
}

TEST(Tensor, G10_DenseStridesOrARefusal) {
  const auto dense = [](std::vector<int64_t> shape) {
    kda_tensor t{};
    t.rank = static_cast<int32_t>(shape.size());
    std::copy_n(shape.begin(), std::min<size_t>(shape.size(), KDA_MAX_RANK), t.shape);
    const kda_status status = kda_tensor_make_dense(&t);
    return std::pair{status, std::vector<int64_t>(t.strides, t.strides + std::min<int>(t.rank, KDA_MAX_RANK))};
  };
  using Strides = std::vector<int64_t>;
  EXPECT_EQ(dense({2, 3, 4}), std::pair(KDA_OK, Strides({12, 4, 1})));
  EXPECT_EQ(dense({}), std::pair(KDA_OK, Strides()));
  EXPECT_EQ(dense({2, 0, 4}), std::pair(KDA_OK, Strides({4, 4, 1})));
  EXPECT_EQ(dense({1, INT64_MAX}), std::pair(KDA_OK, Strides({INT64_MAX, 1})));
  // Nothing is written on a refusal: a product that does not fit, elements or none, a negative size, a rank too high.
  for (const auto& shape : {Strides{2, int64_t{1} << 62}, {0, int64_t{1} << 32, int64_t{1} << 31}, {3, -1}}) {
    EXPECT_EQ(dense(shape), std::pair(KDA_INVALID_ARGUMENT, Strides(shape.size(), 0)));
    EXPECT_STRNE(kda_last_error(), "");
  }
  EXPECT_EQ(dense(Strides(KDA_MAX_RANK + 1, 1)).first, KDA_INVALID_ARGUMENT);
  EXPECT_FALSE(present(make_tensor(nullptr, KDA_FP32, {INT64_MAX, 2})));
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

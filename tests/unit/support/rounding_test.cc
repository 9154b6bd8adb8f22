// The tests' own rounding against values known by hand, and the library's against it.
#include "conformance/rounding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/half.h"
#include "conformance/random.h"

namespace kda::conformance::test {
namespace {

uint16_t bits(kda_dtype dtype, double x) {
  uint16_t u;
  store(&u, dtype, x);
  return u;
}

// Same bits, or both NaN.
void expect_same(uint16_t mine, uint16_t theirs, kda_dtype dtype, double x) {
  if (std::isnan(x)) {
    EXPECT_TRUE(std::isnan(load(&theirs, dtype)));
    return;
  }
  EXPECT_EQ(mine, theirs) << x;
}

}  // namespace

TEST(Rounding, G02_ToNearestEvenWithoutSaturation) {
  EXPECT_EQ(bits(KDA_BF16, 1.0), 0x3f80);
  EXPECT_EQ(bits(KDA_BF16, 1.00390625), 0x3f80);  // half way: to even
  EXPECT_EQ(bits(KDA_BF16, 1.01171875), 0x3f82);  // half way: to even, up
  EXPECT_EQ(bits(KDA_BF16, 3.4e38), 0x7f80);      // above the largest finite: inf
  EXPECT_EQ(bits(KDA_FP16, 65504.0), 0x7bff);
  EXPECT_EQ(bits(KDA_FP16, 65519.9), 0x7bff);
  EXPECT_EQ(bits(KDA_FP16, 65520.0), 0x7c00);
  EXPECT_EQ(bits(KDA_FP16, 0x1p-24), 0x0001);
  EXPECT_EQ(bits(KDA_FP16, 0x1p-25), 0x0000);  // half of the smallest: to even
  EXPECT_EQ(bits(KDA_FP16, 0x1.8p-25), 0x0001);
  EXPECT_EQ(bits(KDA_FP16, -2.0), 0xc000);
}

TEST(Rounding, IntegersStayWithinTheirRange) {
  const double inf = INFINITY;
  const auto stored = [](kda_dtype dtype, double x) {
    int64_t room = 0;
    store(&room, dtype, x);
    return load(&room, dtype);
  };
  EXPECT_EQ(stored(KDA_INT8, -1.9), -1);
  EXPECT_EQ(stored(KDA_INT8, 127.9), 127);
  EXPECT_EQ(stored(KDA_INT8, 128), 127);
  EXPECT_EQ(stored(KDA_UINT8, -0.5), 0);
  EXPECT_EQ(stored(KDA_UINT8, -inf), 0);
  EXPECT_EQ(stored(KDA_UINT8, 300), 255);
  EXPECT_EQ(stored(KDA_INT16, -1e9), -32768);
  EXPECT_EQ(stored(KDA_INT32, 2147483647.5), 2147483647);
  EXPECT_EQ(stored(KDA_INT64, 0x1p63), 0x1p63);  // the maximum, as a double
  EXPECT_EQ(stored(KDA_INT64, -inf), -0x1p63);
  EXPECT_EQ(stored(KDA_INT32, NAN), 0);
}

TEST(Rounding, G02_LibraryAgreesOnSingleAndDoublePrecisionInput) {
  for (uint32_t i = 0; i < 400000; ++i) {
    // Random bit patterns of fp32: every exponent, NaN and Inf too.
    const auto u = static_cast<uint32_t>(splitmix64(i));
    float f;
    std::memcpy(&f, &u, 4);
    const double x = static_cast<double>(f);
    expect_same(bits(KDA_BF16, x), to_bf16(f).bits, KDA_BF16, x);
    expect_same(bits(KDA_FP16, x), to_fp16(f).bits, KDA_FP16, x);
    // fp64 near the ties that a detour through fp32 would round twice.
    const double y = round_to(KDA_BF16, x) * (1 + 0x1p-8 + uniform(1, i) * 0x1p-40);
    expect_same(bits(KDA_BF16, y), to_bf16(y).bits, KDA_BF16, y);
    const double z =
        std::ldexp(1 + (i % 1024) * 0x1p-10 + 0x1p-11 + uniform(2, i) * 0x1p-40, static_cast<int>(i % 60) - 30);
    expect_same(bits(KDA_FP16, z), to_fp16(z).bits, KDA_FP16, z);
  }
}

TEST(Rounding, G02_WideningIsExact) {
  for (uint32_t u = 0; u < 0x10000; ++u) {
    const auto h = static_cast<uint16_t>(u);
    const double b = load(&h, KDA_BF16), f = load(&h, KDA_FP16);
    if (!std::isnan(b)) {
      EXPECT_EQ(b, static_cast<double>(to_float(bf16{h})));
    }
    if (!std::isnan(f)) {
      EXPECT_EQ(f, static_cast<double>(to_float(fp16{h})));
      EXPECT_EQ(bits(KDA_FP16, f), h);
    }
  }
}

}  // namespace kda::conformance::test

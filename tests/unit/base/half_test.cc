#include "base/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace kda {
namespace {

// Nearest value of a 16-bit format found by search over its finite values: independent of the bit tricks.
template <class T>
double value(uint16_t bits) {
  return static_cast<double>(to_float(T{bits}));
}

template <class T>
void check_neighbours(double x, T rounded, double largest) {
  if (std::isnan(x)) {
    EXPECT_TRUE(std::isnan(value<T>(rounded.bits)));
    return;
  }
  const double got = value<T>(rounded.bits);
  EXPECT_EQ(std::signbit(got), std::signbit(x)) << x;
  if (std::isinf(got)) {
    EXPECT_GE(std::fabs(x), largest) << x;
    return;
  }
  // No neighbour is nearer, and a tie has an even last place.
  for (int step : {-1, 1}) {
    const uint16_t other = static_cast<uint16_t>(rounded.bits + step);
    if ((other & 0x7fff) > 0x7fff || ((other ^ rounded.bits) & 0x8000)) continue;
    const double neighbour = value<T>(other);
    if (!std::isfinite(neighbour)) continue;
    const double mine = std::fabs(got - x), theirs = std::fabs(neighbour - x);
    EXPECT_LE(mine, theirs) << x;
    if (mine == theirs) {
      EXPECT_EQ(rounded.bits & 1, 0) << x;
    }
  }
}

TEST(Half, G02_EveryValueSurvivesARoundTrip) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const bf16 b{static_cast<uint16_t>(bits)};
    const fp16 h{static_cast<uint16_t>(bits)};
    if (std::isnan(to_float(b))) {
      EXPECT_TRUE(std::isnan(to_float(to_bf16(to_float(b)))));
    } else {
      EXPECT_EQ(to_bf16(to_float(b)).bits, bits);
      EXPECT_EQ(to_bf16(static_cast<double>(to_float(b))).bits, bits);
    }
    if (std::isnan(to_float(h))) {
      EXPECT_TRUE(std::isnan(to_float(to_fp16(to_float(h)))));
    } else {
      EXPECT_EQ(to_fp16(to_float(h)).bits, bits);
      EXPECT_EQ(to_fp16(static_cast<double>(to_float(h))).bits, bits);
    }
  }
}

TEST(Half, G02_RoundsToNearestEvenWithoutSaturation) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 400000; ++i) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    check_neighbours(static_cast<double>(x), to_bf16(x), 3.39e38);
    check_neighbours(static_cast<double>(x), to_fp16(x), 65520.0);
  }
  // All exponents of fp16 and its subnormals, around every tie.
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const double tie =
        0.5 * (value<fp16>(static_cast<uint16_t>(bits)) + value<fp16>(static_cast<uint16_t>(bits + 1)));
    for (double x : {tie, std::nextafter(tie, 0.0), std::nextafter(tie, 1e9)})
      check_neighbours(x, to_fp16(x), 65520.0);
  }
  EXPECT_TRUE(std::isinf(to_float(to_fp16(65520.0f))));
  EXPECT_EQ(to_float(to_fp16(65519.0f)), 65504.0f);
  EXPECT_TRUE(std::isinf(to_float(to_bf16(std::numeric_limits<float>::max()))));
}

TEST(Half, G02_FromDoubleRoundsOnce) {
  // 1 + 2^-8 is a tie in bf16; a little more must go up although fp32 would first round it back to the tie.
  EXPECT_EQ(to_float(to_bf16(1.0 + 0x1p-8)), 1.0f);
  EXPECT_EQ(to_float(to_bf16(1.0 + 0x1p-8 + 0x1p-40)), 1.0f + 0x1p-7f);
  EXPECT_EQ(to_float(to_fp16(1.0 + 0x1p-11 + 0x1p-40)), 1.0f + 0x1p-10f);
  EXPECT_EQ(to_float(to_fp16(-(1.0 + 0x1p-11 + 0x1p-40))), -(1.0f + 0x1p-10f));
}

}  // namespace
}  // namespace kda

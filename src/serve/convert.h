// Host conversion from fp32 to the io dtypes, to nearest even (spec G-2): the replay fills its tables itself, since
// nothing behind the C ABI converts.
#pragma once

#include <kda/types.h>

#include <bit>
#include <cmath>
#include <cstdint>

namespace kda::serve {

inline uint16_t bf16_bits(float x) {
  const auto u = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline uint16_t fp16_bits(float x) {
  const auto sign = static_cast<uint16_t>(std::signbit(x) ? 0x8000 : 0);
  const float a = std::fabs(x);
  if (std::isnan(x)) return sign | 0x7e00;
  if (a >= 65520.0f) return sign | 0x7c00;
  if (a == 0) return sign;
  int exponent = 0;
  std::frexp(a, &exponent);  // a = m * 2^exponent, m in [0.5, 1)
  // The spacing of fp16 around a: 11 significant bits, but never finer than 2^-24.
  const int ulp = exponent - 11 < -24 ? -24 : exponent - 11;
  const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(a, -ulp)));  // 0..2048, ties to even
  if (ulp == -24) return static_cast<uint16_t>(sign | steps);                     // subnormal, or 2^-14 by its carry
  return static_cast<uint16_t>(sign | (((static_cast<uint32_t>(ulp + 24) << 10) + steps)));
}

inline void store(void* data, kda_dtype dtype, int64_t i, float x) {
  switch (dtype) {
    case KDA_BF16: static_cast<uint16_t*>(data)[i] = bf16_bits(x); break;
    case KDA_FP16: static_cast<uint16_t*>(data)[i] = fp16_bits(x); break;
    default: static_cast<float*>(data)[i] = x; break;
  }
}

}  // namespace kda::serve

// Host conversions between fp32 and the io dtypes, to nearest even (spec G-2). Through the C ABI nothing
// converts; the replay makes its tables and reads its results itself.
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

inline float bf16_value(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline float fp16_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const int mantissa = bits & 0x3ff;
  float v = 0;
  if (exponent == 0x1f) {
    v = mantissa ? NAN : INFINITY;
  } else {
    v = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                      : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -v : v;
}

// Element i of an fp32, bf16, fp16 or fp64 array.
inline double load(const void* data, kda_dtype dtype, int64_t i) {
  switch (dtype) {
    case KDA_BF16: return bf16_value(static_cast<const uint16_t*>(data)[i]);
    case KDA_FP16: return fp16_value(static_cast<const uint16_t*>(data)[i]);
    case KDA_FP64: return static_cast<const double*>(data)[i];
    default: return static_cast<const float*>(data)[i];
  }
}

inline void store(void* data, kda_dtype dtype, int64_t i, float x) {
  switch (dtype) {
    case KDA_BF16: static_cast<uint16_t*>(data)[i] = bf16_bits(x); break;
    case KDA_FP16: static_cast<uint16_t*>(data)[i] = fp16_bits(x); break;
    default: static_cast<float*>(data)[i] = x; break;
  }
}

}  // namespace kda::serve

// bf16 and fp16 as storage types: exact widening, rounding to nearest even without saturation (spec G-2).
#pragma once

#include <bit>
#include <cstdint>

namespace kda {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
inline float to_float(fp16 h) {
  const uint32_t sign = uint32_t{h.bits & 0x8000u} << 16;
  const uint32_t exponent = (h.bits >> 10) & 0x1f;
  const uint32_t mantissa = h.bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24, exact
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline bf16 to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};  // quiet NaN
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

inline fp16 to_fp16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | ((a >> 13) & 0x3ffu))};  // quiet NaN
  if (a >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // >= 65520 rounds to inf
  if (a < 0x38800000u) {  // below 2^-14: result is subnormal, a multiple of 2^-24
    const uint32_t shift = 126 - (a >> 23);  // 14 at 2^-14 (exponent 112)
    if (a < 0x33000000u) return {sign};      // below 2^-25: zero
    const uint32_t m = (a & 0x7fffffu) | 0x800000u;
    const uint32_t q = m >> shift;
    const uint32_t rest = m & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1);
    return {static_cast<uint16_t>(sign | (q + (rest > half || (rest == half && (q & 1u)))))};
  }
  const uint32_t r = a - 0x38000000u + 0xfffu + ((a >> 13) & 1u);
  return {static_cast<uint16_t>(sign | (r >> 13))};
}

// Rounds once from fp64 (through fp32 would round twice): used by the oracle.
bf16 to_bf16(double x);
fp16 to_fp16(double x);

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) { return x; }
template <>
inline bf16 from_float<bf16>(float x) { return to_bf16(x); }
template <>
inline fp16 from_float<fp16>(float x) { return to_fp16(x); }

}  // namespace kda

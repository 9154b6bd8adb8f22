#include "conformance/rounding.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace kda::conformance {
namespace {

// To `bits` significant bits, no finer than 2^min_exponent, infinite from 2^max_exponent on.
double round_float(double x, int bits, int min_exponent, int max_exponent) {
  if (!std::isfinite(x) || x == 0) return x;
  int exponent;
  std::frexp(x, &exponent);  // x = m * 2^exponent, 0.5 <= |m| < 1
  const int unit = std::max(exponent - bits, min_exponent);
  const double y = std::ldexp(std::nearbyint(std::ldexp(x, -unit)), unit);
  return std::fabs(y) >= std::ldexp(1.0, max_exponent) ? std::copysign(INFINITY, x) : y;
}

template <class T>
void put(void* p, T value) {
  std::memcpy(p, &value, sizeof value);
}
template <class T>
T get(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

uint16_t encode_bf16(double x) {
  const auto y = static_cast<float>(x);  // exact: x was rounded
  uint32_t u;
  std::memcpy(&u, &y, 4);
  return static_cast<uint16_t>(u >> 16);
}

uint16_t encode_fp16(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return static_cast<uint16_t>(sign | 0x7e00);
  const double a = std::fabs(x);
  if (std::isinf(a)) return static_cast<uint16_t>(sign | 0x7c00);
  if (a < 0x1p-14) return static_cast<uint16_t>(sign | static_cast<uint16_t>(a * 0x1p24));
  int exponent;
  const double m = std::frexp(a, &exponent);  // 0.5 <= m < 1
  return static_cast<uint16_t>(sign | ((exponent + 14) << 10) | (static_cast<int>(m * 2048) - 1024));
}

// Toward zero, to the nearest bound where T has no such value, 0 for NaN.
template <class T>
T to_integer(double x) {
  using limits = std::numeric_limits<T>;
  if (std::isnan(x)) return 0;
  if (x <= static_cast<double>(limits::min())) return limits::min();
  if (x >= std::ldexp(1.0, limits::digits)) return limits::max();  // an int64's maximum itself is no double
  return static_cast<T>(x);
}

double decode_fp16(uint16_t h) {
  const int exponent = (h >> 10) & 0x1f, mantissa = h & 0x3ff;
  double a = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  if (exponent == 0x1f) a = mantissa ? NAN : INFINITY;
  return (h & 0x8000) ? -a : a;
}

}  // namespace

double round_to(kda_dtype dtype, double x) {
  switch (dtype) {
    case KDA_FP32: return static_cast<double>(static_cast<float>(x));
    case KDA_BF16: return round_float(x, 8, -133, 128);
    case KDA_FP16: return round_float(x, 11, -24, 16);
    default: return x;
  }
}

void store(void* p, kda_dtype dtype, double x) {
  switch (dtype) {
    case KDA_FP64: return put(p, x);
    case KDA_FP32: return put(p, static_cast<float>(x));
    case KDA_BF16: return put(p, encode_bf16(round_to(dtype, x)));
    case KDA_FP16: return put(p, encode_fp16(round_to(dtype, x)));
    case KDA_INT64: return put(p, to_integer<int64_t>(x));
    case KDA_INT32: return put(p, to_integer<int32_t>(x));
    case KDA_INT16: return put(p, to_integer<int16_t>(x));
    case KDA_INT8: return put(p, to_integer<int8_t>(x));
    case KDA_BOOL:
    case KDA_UINT8: return put(p, to_integer<uint8_t>(x));
    case KDA_DTYPE_NONE: return;
  }
}

double load(const void* p, kda_dtype dtype) {
  switch (dtype) {
    case KDA_FP64: return get<double>(p);
    case KDA_FP32: return static_cast<double>(get<float>(p));
    case KDA_BF16: {
      const uint32_t u = uint32_t{get<uint16_t>(p)} << 16;
      return static_cast<double>(get<float>(&u));
    }
    case KDA_FP16: return decode_fp16(get<uint16_t>(p));
    case KDA_INT64: return static_cast<double>(get<int64_t>(p));
    case KDA_INT32: return get<int32_t>(p);
    case KDA_INT16: return get<int16_t>(p);
    case KDA_INT8: return get<int8_t>(p);
    case KDA_BOOL:
    case KDA_UINT8: return get<uint8_t>(p);
    case KDA_DTYPE_NONE: return 0;
  }
  return 0;
}

std::vector<double> rounded(kda_dtype dtype, std::vector<double> x) {
  for (double& v : x) v = round_to(dtype, v);
  return x;
}

}  // namespace kda::conformance

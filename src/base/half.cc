#include "base/half.h"

#include <cmath>

namespace kda {
namespace {

// fp64 -> fp32 with the sticky bit kept in the last place ("round to odd"), so that a second rounding to a
// format with at least two bits less is the rounding of the fp64 value itself.
float to_float_odd(double x) {
  const float y = static_cast<float>(x);
  if (!std::isfinite(x) || static_cast<double>(y) == x) return y;
  uint32_t u = std::bit_cast<uint32_t>(y);
  if (std::isinf(y)) return std::bit_cast<float>((u & 0x80000000u) | 0x7f7fffffu);
  if (std::fabs(static_cast<double>(y)) > std::fabs(x)) u -= 1;  // towards zero first
  return std::bit_cast<float>(u | 1u);
}

}  // namespace

bf16 to_bf16(double x) { return to_bf16(to_float_odd(x)); }
fp16 to_fp16(double x) { return to_fp16(to_float_odd(x)); }

}  // namespace kda

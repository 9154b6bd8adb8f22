// Gated RMS norm of one head row (spec L-7.4), shared by gated_norm and decode_step:
//   y = io(o · rsqrt(mean_v(o²) + eps) · w_v · σ(z))   in fp32, multiplied in this order.
#if defined(KDA_CPU_SIMD_NORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_SIMD_NORM_INL_H_
#undef KDA_CPU_SIMD_NORM_INL_H_
#else
#define KDA_CPU_SIMD_NORM_INL_H_
#endif

#include <cmath>

#include "cpu/simd/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// o: the io-rounded row in padded scratch; weight: padded scratch.
template <class Io>
HWY_INLINE void norm_row(const float* o, const Io* z, const float* weight, int64_t n, float eps, Io* y) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const float mean = dot(o, o, padded(n)) / static_cast<float>(n);
  const auto scale = hn::Set(d, 1.0f / std::sqrt(mean + eps));
  const auto apply = [&](int64_t i, VF gate) HWY_ATTR {
    const auto normed = hn::Mul(hn::Mul(hn::LoadU(d, o + i), scale), hn::LoadU(d, weight + i));
    return hn::Mul(normed, norm_gate(d, gate));
  };
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) store(d, apply(i, load(d, z + i)), y + i);
  if (i >= n) return;
  const auto left = static_cast<size_t>(n - i);
  store_n(d, apply(i, load_n(d, z + i, left)), y + i, left);
}

HWY_INLINE void norm_any(kda_dtype io, const float* o, const void* z, const float* weight, int64_t n, float eps,
                         void* y) {
  switch (io) {
    case KDA_FP32: return norm_row(o, static_cast<const float*>(z), weight, n, eps, static_cast<float*>(y));
    case KDA_BF16: return norm_row(o, static_cast<const bf16*>(z), weight, n, eps, static_cast<bf16*>(y));
    default: return norm_row(o, static_cast<const fp16*>(z), weight, n, eps, static_cast<fp16*>(y));
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_SIMD_NORM_INL_H_

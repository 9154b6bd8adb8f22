// Vector functions that all CPU kernels share: exp, sigmoid, softplus, SiLU, the gate families (spec E-1, E-2),
// beta (E-5), typed loads and stores (G-2), sums in a fixed order (N-12).
//
// Errors, against fp64, over 2*10^6 arguments on every ISA (tests/unit/cpu/math_test.cc): exp 2^-23, sigmoid and
// softplus 4e-7 relative. Results below 2^-126 are zero, in any mode of the unit. Each lane depends on its own
// arguments alone: how a row is cut into vectors changes no bit.
//
// Included once per target, inside the foreach_target scheme of cpu/simd/targets.h.
#if defined(KDA_CPU_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_SIMD_MATH_INL_H_
#undef KDA_CPU_SIMD_MATH_INL_H_
#else
#define KDA_CPU_SIMD_MATH_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>
#include <limits>

#include "base/half.h"
#include "cpu/common.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using VF = hn::Vec<F32>;

// ---- Loads and stores -----------------------------------------------------------------------------------

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const bf16* p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<uint32_t, D> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, float* p) {
  hn::StoreU(v, d, p);
}
template <class D>
HWY_INLINE void store([[maybe_unused]] D d, hn::Vec<D> v, bf16* p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<uint32_t, D> d32;
  const auto u = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(d32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(u, hn::Set(d32, 0x7fffu)), odd));
  const auto nan = hn::Or(hn::ShiftRight<16>(u), hn::Set(d32, 0x40u));
  const auto bits = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(v)), nan, rounded);
  hn::StoreU(hn::TruncateTo(d16, bits), d16, reinterpret_cast<uint16_t*>(p));
}

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
// The unit's own conversions: nearest even, subnormals kept whatever the flush mode.
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const fp16* p) {
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
}
template <class D>
HWY_INLINE void store([[maybe_unused]] D d, hn::Vec<D> v, fp16* p) {
  const hn::Rebind<hwy::float16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
}
#else
// Highway's emulation truncates; lane by lane here.
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const fp16* p) {
  HWY_ALIGN float lanes[hn::MaxLanes(d)];
  for (size_t i = 0; i < hn::Lanes(d); ++i) lanes[i] = to_float(p[i]);
  return hn::Load(d, lanes);
}
template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, fp16* p) {
  HWY_ALIGN float lanes[hn::MaxLanes(d)];
  hn::Store(v, d, lanes);
  for (size_t i = 0; i < hn::Lanes(d); ++i) p[i] = to_fp16(lanes[i]);
}
#endif

// The first n < Lanes(d) elements, zero behind them; memory behind the n-th is not touched (F63).
template <class D, class T>
HWY_INLINE hn::Vec<D> load_n(D d, const T* p, size_t n) {
  if constexpr (HWY_TARGET == HWY_AVX3 && sizeof(T) == 4) return hn::MaskedLoad(hn::FirstN(d, n), d, p);
  HWY_ALIGN T lanes[hn::MaxLanes(d)] = {};
  std::memcpy(lanes, p, n * sizeof(T));
  return load(d, lanes);
}
template <class D, class T>
HWY_INLINE void store_n(D d, hn::Vec<D> v, T* p, size_t n) {
  if constexpr (HWY_TARGET == HWY_AVX3 && sizeof(T) == 4) {
    hn::BlendedStore(v, hn::FirstN(d, n), d, p);
  } else {
    HWY_ALIGN T lanes[hn::MaxLanes(d)];
    store(d, v, lanes);
    std::memcpy(p, lanes, n * sizeof(T));
  }
}

// A row of n elements as floats; `to` is scratch of padded(n) floats, zero behind the row.
template <class T>
HWY_INLINE void load_row(const T* from, int64_t n, float* to) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(load(d, from + i), d, to + i);
  if (i < n) {
    hn::StoreU(load_n(d, from + i, static_cast<size_t>(n - i)), d, to + i);
    i += lanes;
  }
  for (; i < padded(n); ++i) to[i] = 0.0f;
}
// Rounds n floats to a row; `from` may be read up to padded(n).
template <class T>
HWY_INLINE void store_row(const float* from, int64_t n, T* to) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) store(d, hn::LoadU(d, from + i), to + i);
  if (i < n) store_n(d, hn::LoadU(d, from + i), to + i, static_cast<size_t>(n - i));
}

// ---- Functions ------------------------------------------------------------------------------------------

// e^x. exp(0) = 1; below ln 2^-126 zero, above ln FLT_MAX infinity; NaN stays.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V low = hn::Set(d, -87.336540f);    // the least float with e^x >= 2^-126
  const V high = hn::Set(d, 88.722831f);    // the largest with e^x <= FLT_MAX
  const V magic = hn::Set(d, 12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const V clamped = hn::Min(hn::Max(x, low), high);
  const V t = hn::MulAdd(clamped, hn::Set(d, 1.44269504f), magic);
  const V n = hn::Sub(t, magic);
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), clamped);  // ln 2 in two parts, the first of 9 bits
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  // (e^r - 1 - r)/r^2 on |r| <= ln(2)/2, minimax for the relative error of e^r: 3.1e-9.
  V q = hn::MulAdd(hn::Set(d, 0.00138141742569f), r, hn::Set(d, 0.00836892179472f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.0416684079709f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.166665189386f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.499999933335f));
  const V p = hn::Add(hn::MulAdd(q, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  // The result is a normal number, so n goes straight into the exponent.
  const auto scaled = hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, t)));
  V y = hn::BitCast(d, scaled);
  y = hn::IfThenZeroElse(hn::Lt(x, low), y);
  y = hn::IfThenElse(hn::Gt(x, high), hn::Set(d, std::numeric_limits<float>::infinity()), y);
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

// log(1 + t) for t in [0, 1] as 2 atanh(t / (2 + t)); relative error of the polynomial 4.5e-9.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V log1p_unit(D d, V t) {
  const V s = hn::Div(t, hn::Add(t, hn::Set(d, 2.0f)));
  const V w = hn::Mul(s, s);
  V q = hn::MulAdd(hn::Set(d, 0.14006418851f), w, hn::Set(d, 0.140008144391f));
  q = hn::MulAdd(q, w, hn::Set(d, 0.200107690654f));
  q = hn::MulAdd(q, w, hn::Set(d, 0.333332080496f));
  const V twice = hn::Add(s, s);
  return hn::MulAdd(hn::Mul(twice, w), q, twice);
}

// 1 / (1 + e^-y), from e^-|y| so that nothing overflows and small results keep their digits.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V sigmoid(D d, V y) {
  const V one = hn::Set(d, 1.0f);
  const V z = exp(d, hn::Neg(hn::Abs(y)));
  return hn::Div(hn::IfThenElse(hn::Ge(y, hn::Zero(d)), one, z), hn::Add(one, z));
}

// p * 2^n for integral n in [-160, 160]: below 2^-126 zero (with flushing on), above FLT_MAX infinity.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V scale_by_power(D d, V p, V n) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (hn::MaxLanes(D()) == 16) return V{_mm512_scalef_ps(p.raw, n.raw)};
#endif
  // In two steps, each with an exponent that exists.
  const hn::RebindToSigned<D> di;
  const auto bias = hn::Set(di, 127);
  const auto whole = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(whole);
  const auto power = [&](auto e) HWY_ATTR { return hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(e, bias))); };
  return hn::Mul(hn::Mul(p, power(half)), power(hn::Sub(whole, half)));
}

// 1 + e^-y for the two activations below. Relative error 1e-7·(1 + |y|): less than exp() promises, at half its cost.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V one_plus_exp_minus(D d, V y) {
  const V limit = hn::Set(d, 150.0f);
  const V t = hn::Min(limit, hn::Max(hn::Neg(limit), hn::Mul(y, hn::Set(d, -1.44269504f))));
  const V n = hn::Round(t);
  const V f = hn::Sub(t, n);
  // 2^f on |f| <= 1/2, minimax: relative error 7.5e-8.
  V p = hn::MulAdd(hn::Set(d, 0.00132763584709f), f, hn::Set(d, 0.00967565552589f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.0555071448097f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.240221176177f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.693146965785f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  return hn::Add(hn::Set(d, 1.0f), scale_by_power(d, p, n));
}

// y * sigmoid(y), for the convolution (W-1). A NaN stays one whatever the exponential makes of it.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V silu(D d, V y) {
  return hn::Div(y, one_plus_exp_minus(d, y));
}
// sigmoid(z) for the gated norm (L-7.4); NaN stays.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V norm_gate(D d, V z) {
  const V gate = hn::Div(hn::Set(d, 1.0f), one_plus_exp_minus(d, z));
  return hn::IfThenElse(hn::IsNaN(z), z, gate);
}

// x above 20, else log1p(e^x) (E-1), as max(x, 0) + log1p(e^-|x|): no digit is lost below -16.6.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V softplus(D d, V x) {
  const V soft = hn::Add(hn::Max(x, hn::Zero(d)), log1p_unit(d, exp(d, hn::Neg(hn::Abs(x)))));
  return hn::IfThenElse(hn::Gt(x, hn::Set(d, 20.0f)), x, soft);
}

// Log decay g of E-1 from the raw gate and its bias (the plain family ignores the bias).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V log_decay(D d, const GateHead& head, V raw, V bias) {
  if (head.family == KDA_GATE_PLAIN) return raw;
  const V x = hn::Add(raw, bias);
  const V a = hn::Set(d, head.a);
  if (head.family == KDA_GATE_SOFTPLUS) return hn::Mul(hn::Neg(a), softplus(d, x));
  return hn::Mul(hn::Set(d, head.lower_bound), sigmoid(d, hn::Mul(a, x)));
}

// sigmoid of one number, with the bits of the vector function.
HWY_INLINE float sigmoid1(float y) {
  const hn::CappedTag<float, 1> d;
  return hn::GetLane(sigmoid(d, hn::Set(d, y)));
}

// ---- Sums in a fixed order ------------------------------------------------------------------------------

HWY_INLINE float sum_lanes(VF v) {
  const F32 d;
  return hn::GetLane(hn::SumOfLanes(d, v));
}

#if HWY_TARGET != HWY_SCALAR
// Adds the 16-byte blocks of v and stores the four sums.
template <class D, class V>
HWY_INLINE void store_block_sum(D d, V v, float* to) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    hn::StoreU(v, d, to);
  } else {
    const hn::Half<D> half;
    store_block_sum(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), to);
  }
}
#endif

// to[r] = sum of the lanes of v[r]. Four at once cost a third of four alone.
HWY_INLINE void sum_lanes4(const VF* v, float* to) {
#if HWY_TARGET == HWY_SCALAR
  for (int r = 0; r < 4; ++r) to[r] = sum_lanes(v[r]);
#else
  const F32 d;
  const hn::Repartition<double, F32> d2;
  const auto add_pairs = [&](VF a, VF b)
                             HWY_ATTR { return hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)); };
  // Each 16-byte block becomes its share of [v0 v1 v0 v1] and [v2 v3 v2 v3], then of [v0 v1 v2 v3].
  const auto low = hn::BitCast(d2, add_pairs(v[0], v[1])), high = hn::BitCast(d2, add_pairs(v[2], v[3]));
  const VF all =
      hn::Add(hn::BitCast(d, hn::InterleaveLower(d2, low, high)), hn::BitCast(d, hn::InterleaveUpper(d2, low, high)));
  store_block_sum(d, all, to);
#endif
}

// Sum of a[i]*b[i] over rows of scratch, n = padded(length): four partial sums per lane, then pairwise.
HWY_INLINE float dot(const float* a, const float* b, int64_t n) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  VF s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    s0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), s0);
    s1 = hn::MulAdd(hn::LoadU(d, a + i + lanes), hn::LoadU(d, b + i + lanes), s1);
    s2 = hn::MulAdd(hn::LoadU(d, a + i + 2 * lanes), hn::LoadU(d, b + i + 2 * lanes), s2);
    s3 = hn::MulAdd(hn::LoadU(d, a + i + 3 * lanes), hn::LoadU(d, b + i + 3 * lanes), s3);
  }
  for (; i < n; i += lanes) s0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), s0);
  return sum_lanes(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)));
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_SIMD_MATH_INL_H_

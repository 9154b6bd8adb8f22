// Row movers of the state copies (spec C-1, C-2, C-16, C-17), once per ISA.
//
// Equations:  copy    dst[i] = src[i], bits kept (C-17)
//             widen   dst[i] = fp32(src[i]), exact; narrow  dst[i] = rne(src[i]), no saturation (G-2)
// Memory:     unaligned loads; `stream` aligns its stores to the vector and ends with a fence, so that whoever is
//             told that the call has returned sees the row. Nothing outside [src, src+count) is read.
// Precision:  bf16 and fp16 by integer arithmetic or the hardware's conversion; both ignore the FTZ and DAZ modes
//             for the values that the formats can hold. NaN: sign and upper payload kept, made quiet.
// Limits:     cached plain copies are memcpy: a hand-written loop with 64-byte vectors was between 3 % faster and
//             26 % slower than glibc 2.36 (rep movsb) for rows of 0.75 to 2 MiB on an AMD EPYC of family 26.
#include "cpu/state_copy_kernels.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/state_copy_kernels.cc"
#include "base/half.h"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void copy_bytes(const char* src, char* dst, size_t count) { std::memcpy(dst, src, count); }

void stream_bytes(const char* src, char* dst, size_t count) {
#if HWY_TARGET == HWY_SCALAR
  std::memcpy(dst, src, count);
#else
  const hn::ScalableTag<uint8_t> d;
  const size_t lanes = hn::Lanes(d);
  const size_t head = (lanes - reinterpret_cast<uintptr_t>(dst) % lanes) % lanes;
  if (count < head + lanes) {
    std::memcpy(dst, src, count);
    return;
  }
  std::memcpy(dst, src, head);
  const auto* from = reinterpret_cast<const uint8_t*>(src);
  auto* to = reinterpret_cast<uint8_t*>(dst);
  size_t i = head;
  constexpr size_t kAhead = 1024;  // bytes; a prefetch past the end touches nothing
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    for (size_t j = 0; j < 4; ++j) hwy::Prefetch(from + i + kAhead + j * lanes);
    const auto a = hn::LoadU(d, from + i), b = hn::LoadU(d, from + i + lanes);
    const auto c = hn::LoadU(d, from + i + 2 * lanes), e = hn::LoadU(d, from + i + 3 * lanes);
    hn::Stream(a, d, to + i);
    hn::Stream(b, d, to + i + lanes);
    hn::Stream(c, d, to + i + 2 * lanes);
    hn::Stream(e, d, to + i + 3 * lanes);
  }
  for (; i + lanes <= count; i += lanes) hn::Stream(hn::LoadU(d, from + i), d, to + i);
  std::memcpy(dst + i, src + i, count - i);
  hwy::FlushStream();
#endif
}

// One element, at any address.
template <class Half>
void widen_one(const char* src, char* dst) {
  Half half;
  std::memcpy(&half, src, sizeof half);
  const float value = to_float(half);
  std::memcpy(dst, &value, sizeof value);
}
template <class Half>
void narrow_one(const char* src, char* dst) {
  float value;
  std::memcpy(&value, src, sizeof value);
  const Half half = from_float<Half>(value);
  std::memcpy(dst, &half, sizeof half);
}

#if HWY_TARGET != HWY_SCALAR
// Highway's generic vectors, the portable target of newer compilers, have an fp16 conversion without NaN and Inf.
template <class Half>
constexpr bool vectorises = HWY_TARGET != HWY_EMU128 || std::is_same_v<Half, bf16>;

// bf16: the upper half of the fp32 bits, rounded to nearest even by an addition.
template <class D>
hn::Vec<hn::Rebind<uint32_t, D>> widen(D d, bf16, const uint16_t* src) {
  const hn::Rebind<uint32_t, D> d32;
  return hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d, src)));
}
template <class D>
hn::Vec<D> narrow(D d, bf16, hn::Vec<hn::Rebind<uint32_t, D>> u) {
  const hn::Rebind<uint32_t, D> d32;
  const hn::Rebind<int32_t, D> i32;
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(d32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(odd, hn::Set(d32, 0x7fffu))));
  const auto quiet = hn::Or(hn::ShiftRight<16>(u), hn::Set(d32, 0x40u));
  const auto magnitude = hn::And(u, hn::Set(d32, 0x7fffffffu));
  const auto nan = hn::Gt(hn::BitCast(i32, magnitude), hn::Set(i32, 0x7f800000));
  const auto result = hn::IfThenElse(hn::RebindMask(d32, nan), quiet, rounded);
  return hn::DemoteTo(d, hn::BitCast(i32, result));  // below 2^16: no saturation
}
// fp16: the hardware's conversion (vectorises<fp16>).
template <class D>
hn::Vec<hn::Rebind<uint32_t, D>> widen(D d, fp16, const uint16_t* src) {
  const hn::Rebind<hwy::float16_t, D> d16;
  const hn::Rebind<float, D> f32;
  return hn::BitCast(hn::Rebind<uint32_t, D>(), hn::PromoteTo(f32, hn::BitCast(d16, hn::LoadU(d, src))));
}
template <class D>
hn::Vec<D> narrow(D d, fp16, hn::Vec<hn::Rebind<uint32_t, D>> u) {
  const hn::Rebind<hwy::float16_t, D> d16;
  const hn::Rebind<float, D> f32;
  return hn::BitCast(d, hn::DemoteTo(d16, hn::BitCast(f32, u)));
}
#endif

template <class Half>
void widen_row(const char* src, char* dst, size_t count) {
  size_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::ScalableTag<uint32_t> d32;
  const hn::Rebind<uint16_t, decltype(d32)> d16;
  const size_t lanes = hn::Lanes(d32);
  const auto* from = reinterpret_cast<const uint16_t*>(src);
  auto* to = reinterpret_cast<uint32_t*>(dst);
  if constexpr (vectorises<Half>) {
    for (; i + lanes <= count; i += lanes) hn::StoreU(widen(d16, Half{}, from + i), d32, to + i);
  }
#endif
  for (; i < count; ++i) widen_one<Half>(src + 2 * i, dst + 4 * i);
}

template <class Half>
void narrow_row(const char* src, char* dst, size_t count) {
  size_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::ScalableTag<uint32_t> d32;
  const hn::Rebind<uint16_t, decltype(d32)> d16;
  const size_t lanes = hn::Lanes(d32);
  const auto* from = reinterpret_cast<const uint32_t*>(src);
  auto* to = reinterpret_cast<uint16_t*>(dst);
  if constexpr (vectorises<Half>) {
    for (; i + lanes <= count; i += lanes) hn::StoreU(narrow(d16, Half{}, hn::LoadU(d32, from + i)), d16, to + i);
  }
#endif
  for (; i < count; ++i) narrow_one<Half>(src + 4 * i, dst + 2 * i);
}

const RowMovers* movers() {
  static constexpr RowMovers table{&copy_bytes,      &stream_bytes,     &widen_row<bf16>,
                                   &widen_row<fp16>, &narrow_row<bf16>, &narrow_row<fp16>};
  return &table;
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {
HWY_EXPORT(movers);
const RowMovers& row_movers(Isa isa) { return *KDA_CPU_TABLE(movers, isa)(); }
}  // namespace kda::cpu
#endif

// The wrappers of src/cuda/ptx, one instruction each, computed on the host. Products are exact up to fp32 sums in an
// order of their own; asynchronous copies and products happen where they
// are issued, but a product's reads count until it is waited for.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>

namespace kda::cuda::ptx {

// fp16 and bf16 bits.
// Most of the products' time, where the compiler calls a function for it: exact, but for the payloads of NaNs.
inline float from_f16(uint32_t bits) {
  const uint32_t magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
  const float value =
      magnitude >= 0x0f800000 ? bits_as<float>(magnitude | 0x7f800000) : bits_as<float>(magnitude) * 0x1p112f;
  return bits_as<float>(bits_as<uint32_t>(value) | sign);
}
inline uint32_t to_f16(float x) { return bits_as<uint16_t>(static_cast<_Float16>(x)); }
inline float from_bf16(uint32_t bits) { return __uint_as_float(bits << 16); }
inline uint32_t to_bf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  return std::isnan(x) ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
}

template <class T>
T load_shared(uint32_t address) {
  T x;
  std::memcpy(&x, emulation::shared_pointer(address, sizeof(T), emulation::Access::kRead), sizeof(T));
  return x;
}
template <class T>
void store_shared(uint32_t address, T x) {
  std::memcpy(emulation::shared_pointer(address, sizeof(T), emulation::Access::kWrite), &x, sizeof(T));
}

// cluster.h
inline uint32_t cluster_rank() { return emulation::cta_rank(); }
inline uint32_t rank_of_window(uint32_t shared_address) { return shared_address >> 24; }
inline uint32_t map_shared_rank(uint32_t address, uint32_t rank) { return (address & 0xffffffu) | rank << 24; }
inline void cluster_arrive() {}
inline void cluster_arrive_relaxed() {}
inline void store_cluster(uint32_t address, float x) { store_shared(address, x); }
inline void cluster_wait() { emulation::cluster_barrier(); }
inline void named_barrier(uint32_t id, uint32_t threads) { emulation::named_barrier(id, static_cast<int>(threads)); }
inline void named_barrier_arrive(uint32_t id, uint32_t threads) {
  emulation::named_barrier_arrive(id, static_cast<int>(threads));
}
template <int kRegisters>
void set_max_registers_up() {}
template <int kRegisters>
void set_max_registers_down() {}

// grid.h: grids run one after the other, but for what a test lets the one before write late.
inline void launch_dependents() {}
inline void wait_for_prerequisites() { emulation::finish_grid_before(); }
template <class T>
void have(T&) {}

// signal.h
template <int kPending>
void bulk_store_wait() {
  emulation::finish_reads(kPending);
}
inline void fence_async_proxy_global() {}
inline void store_release(uint32_t* p, uint32_t x) { __atomic_store_n(p, x, __ATOMIC_RELEASE); }
inline uint32_t load_acquire(const uint32_t* p) {
  const uint32_t x = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  if (x == 0) emulation::poll_again();
  return x;
}

// mbarrier.h
inline uint32_t shared_address(const void* p) { return emulation::shared_address(p); }
inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  emulation::mbarrier_init(barrier, static_cast<int>(arrivals));
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint32_t barrier) { emulation::mbarrier_arrive(barrier); }
inline void mbarrier_arrive_cluster(uint32_t barrier) { emulation::mbarrier_arrive(barrier); }
inline void mbarrier_arrive_expect_cluster(uint32_t barrier, uint32_t bytes) {
  emulation::mbarrier_expect_bytes(barrier, static_cast<int>(bytes));
  emulation::mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  mbarrier_arrive_expect_cluster(barrier, bytes);
}
inline void store_cluster_counted(uint32_t address, float x, uint32_t barrier) {
  store_shared(address, x);
  emulation::mbarrier_complete_bytes(barrier, 4);
}
inline bool mbarrier_test(uint32_t barrier, uint32_t parity) { return emulation::mbarrier_test(barrier, parity); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) { emulation::mbarrier_wait(barrier, parity); }

// copy.h
inline void fence_async_proxy() {}
inline void bulk_copy_to_cluster(uint32_t target, uint32_t source, uint32_t bytes, uint32_t barrier) {
  emulation::bulk_copy(target, source, bytes, barrier);
}
inline void bulk_load(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  emulation::bulk_load(target, source, bytes, barrier);
}

inline void bulk_load_multicast(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier,
                                uint32_t ctas) {
  for (uint32_t rank = 0; rank < 16; ++rank)
    if ((ctas >> rank & 1) != 0)
      emulation::bulk_load(map_shared_rank(target, rank), source, bytes, map_shared_rank(barrier, rank));
}
inline void bulk_store(void* target, uint32_t source, uint32_t bytes) {
  for (uint32_t at = 0; at < bytes; at += 16)
    std::memcpy(static_cast<char*>(target) + at, emulation::deferred_pointer(source + at, 16), 16);
}
inline void bulk_store_commit() { emulation::commit_reads(); }
template <int kPending>
void bulk_store_wait_read() {
  emulation::finish_reads(kPending);
}
inline void copy_async_16(uint32_t target, const void* source, uint32_t bytes) {
  uint4 x{};
  if (bytes != 0) std::memcpy(&x, source, 16);
  store_shared(target, x);
}
inline void copy_async_commit() {}
// By whole warps: the barrier counts all lanes, and what they copied is ordered as one.
inline void copy_async_arrive(uint32_t barrier) {
  emulation::warp_barrier();
  emulation::mbarrier_arrive(barrier);
}
template <int kPending>
void copy_async_wait() {}
inline float load_shared_f1(uint32_t address) { return load_shared<float>(address); }
inline float2 load_shared_f2(uint32_t address) { return load_shared<float2>(address); }
inline float4 load_shared_f4(uint32_t address) { return load_shared<float4>(address); }
inline uint32_t load_shared_u32(uint32_t address) { return load_shared<uint32_t>(address); }
inline uint2 load_shared_u2(uint32_t address) { return load_shared<uint2>(address); }
inline uint4 load_shared_u4(uint32_t address) { return load_shared<uint4>(address); }
inline uint64_t load_shared_u64(uint32_t address) { return load_shared<uint64_t>(address); }
inline uint4 load_global_16(const void* p) { return *static_cast<const uint4*>(p); }
inline uint4 load_global_16_in_order(const void* p) { return *static_cast<const uint4*>(p); }
inline void prefetch_to_l2(const void*) {}
template <class T>
T* in_global(T* p) {
  return p;
}
inline void prefetch_block_to_l2(const void*, uint32_t) {}

// Rows of four 8x8 matrices: lane 8j + i names row i of matrix j.
inline void load_matrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  const LaneValues<uint32_t> rows(address);
  const int g = emulation::lane() / 4, c = emulation::lane() % 4;
  for (int j = 0; j < 4; ++j) {
    const uint32_t low = load_shared<uint16_t>(rows[8 * j + 2 * c] + 2 * g);
    r[j] = low | static_cast<uint32_t>(load_shared<uint16_t>(rows[8 * j + 2 * c + 1] + 2 * g)) << 16;
  }
  emulation::warp_meeting();
}
inline void store_matrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const LaneValues<uint32_t> rows(address);
  const int row = 2 * (emulation::lane() % 4), column = emulation::lane() / 4;
  const uint32_t x[4] = {a, b, c, d};
  for (int j = 0; j < 4; ++j) {
    store_shared(rows[8 * j + row] + 2 * column, static_cast<uint16_t>(x[j]));
    store_shared(rows[8 * j + row + 1] + 2 * column, static_cast<uint16_t>(x[j] >> 16));
  }
  emulation::warp_meeting();
}

// math.h
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float exp2_approx(float x) { return flushed(std::exp2(x)); }
inline float reciprocal_approx(float x) { return flushed(1.0f / flushed(x)); }
inline float rsqrt_approx(float x) { return 1.0f / std::sqrt(x); }
inline float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }
inline uint32_t max_nan_f16x2(uint32_t a, uint32_t b) {
  const auto one = [](uint32_t x, uint32_t y) {
    const float m = max_nan(from_f16(x), from_f16(y));
    return std::isnan(m) ? 0x7fffu : to_f16(m);
  };
  return one(a, b) | one(a >> 16, b >> 16) << 16;
}
inline uint32_t round_tf32(float x) { return __float_as_uint(x) + 0x1000u; }
inline uint32_t pack_f16(float lo, float hi) { return to_f16(lo) | to_f16(hi) << 16; }
inline uint32_t pack_f16_finite(float lo, float hi) {
  const auto one = [](float x) { return std::isnan(x) ? 65504.0f : std::fmin(std::fmax(x, -65504.0f), 65504.0f); };
  return pack_f16(one(lo), one(hi));
}
inline uint32_t pack_bf16(float lo, float hi) { return to_bf16(lo) | to_bf16(hi) << 16; }
inline float2 unpack_f16(uint32_t x) { return {from_f16(x), from_f16(x >> 16)}; }
inline float bf16_low(uint32_t x) { return __uint_as_float(x << 16); }
inline float bf16_high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
inline uint64_t multiply_add_wide(uint32_t a, uint32_t b, uint64_t c) { return static_cast<uint64_t>(a) * b + c; }

// A warp's operand registers, to be read by all its lanes until the next collective.
class WarpOperands {
 public:
  explicit WarpOperands(std::initializer_list<uint32_t> mine) : words_(emulation::warp_words()) {
    std::copy(mine.begin(), mine.end(), words_ + 8 * emulation::lane());
    emulation::warp_meeting();
  }
  uint32_t get(int lane, int i) const { return static_cast<uint32_t>(words_[8 * lane + i]); }

 private:
  uint64_t* words_;
};

// mma.h. Element (row, k) of A in registers a0..a3, and (k, n) of B in b0, b1 (words 4, 5), for 16-bit operands.
template <class Widen>
void mma_16bit(float (&d)[4], const WarpOperands& x, int k_steps, Widen widen) {
  const int g = emulation::lane() / 4, c = emulation::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int n = 2 * c + i % 2;
    for (int k = 0; k < 8 * k_steps; ++k) {
      const int lane = k % 8 / 2, half = k / 8, shift = 16 * (k % 2);
      d[i] += widen(x.get(4 * g + lane, 2 * half + i / 2) >> shift & 0xffffu) *
              widen(x.get(4 * n + lane, 4 + half) >> shift & 0xffffu);
    }
  }
}
inline void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                         uint32_t b1) {
  mma_16bit(d, WarpOperands({a0, a1, a2, a3, b0, b1}), 2, from_f16);
}
inline void mma_m16n8k8_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  mma_16bit(d, WarpOperands({a0, a1, 0, 0, b}), 1, from_bf16);
}
inline void mma_m16n8k8_tf32(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                             uint32_t b1) {
  const WarpOperands x({a0, a1, a2, a3, b0, b1});
  const int g = emulation::lane() / 4, c = emulation::lane() % 4;
  const auto cut = [](uint32_t bits) { return __uint_as_float(bits & 0xffffe000u); };
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 8; ++k)
      d[i] += cut(x.get(4 * g + k % 4, 2 * (k / 4) + i / 2)) * cut(x.get(4 * (2 * c + i % 2) + k % 4, 4 + k / 4));
  }
}

// wgmma.h. A warp makes its 16 rows.
enum class Swizzle : uint64_t { k128 = 1, k64 = 2 };
template <uint32_t kLeading, uint32_t kStride, Swizzle kSwizzle>
uint64_t matrix_descriptor(uint32_t address16) {
  const uint64_t high = (kStride >> 4) | static_cast<uint64_t>(kSwizzle) << 30;
  return address16 + ((kLeading >> 4) << 16) | high << 32;
}
inline void wgmma_fence() {}
inline void wgmma_commit() { emulation::commit_reads(); }
template <int kPending>
void wgmma_wait() {
  emulation::finish_reads(kPending);
}
template <int kSize>
void pin_registers(float (&)[kSize]) {}
template <int kFirst, int kCount, int kSize>
void pin_part(float (&)[kSize]) {}

// The bits that lie `at` bytes behind a descriptor's start before swizzling.
template <class Bits>
Bits wgmma_bits(uint64_t descriptor, uint32_t at) {
  const uint32_t address = (static_cast<uint32_t>(descriptor) & 0x3fffu) * 16 + at;
  const uint32_t mask = descriptor >> 62 == static_cast<uint64_t>(Swizzle::k128) ? 0x70u : 0x30u;
  const uint32_t physical = (address ^ (address >> 3 & mask)) | emulation::cta_rank() << 24;
  Bits bits;
  std::memcpy(&bits, emulation::deferred_pointer(physical, sizeof(Bits)), sizeof(Bits));
  return bits;
}
inline float wgmma_element(uint64_t descriptor, uint32_t at) {
  return from_f16(wgmma_bits<uint16_t>(descriptor, at));
}
template <class Element>
void wgmma_rows(float* d, int columns, const WarpOperands& a, bool accumulate, const Element& element) {
  const int g = emulation::lane() / 4, c = emulation::lane() % 4;
  for (int i = 0; i < columns / 2; ++i) {
    const int n = 8 * (i / 4) + 2 * c + i % 2;
    float sum = accumulate ? d[i] : 0.0f;
    for (int k = 0; k < 16; ++k)
      sum += from_f16(a.get(4 * g + k % 8 / 2, 2 * (k / 8) + i % 4 / 2) >> 16 * (k % 2)) * element(k, n);
    d[i] = sum;
  }
}
inline void wgmma_m64n32k16_kmajor(float (&d)[16], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b,
                                   int accumulate) {
  const uint32_t stride = static_cast<uint32_t>(b >> 32 & 0x3fffu) * 16;
  wgmma_rows(d, 32, WarpOperands({a0, a1, a2, a3}), accumulate != 0, [&](int k, int n) {
    return wgmma_element(b,
                         static_cast<uint32_t>(n / 8) * stride + static_cast<uint32_t>(n % 8) * (stride / 8) + 2 * k);
  });
}
template <int kFirst, int kSize>
void wgmma_m64n64k16_nmajor(float (&d)[kSize], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  const uint32_t stride = static_cast<uint32_t>(b >> 32 & 0x3fffu) * 16;
  wgmma_rows(d + kFirst, 64, WarpOperands({a0, a1, a2, a3}), true, [&](int k, int n) {
    return wgmma_element(b, static_cast<uint32_t>(k / 8) * stride + static_cast<uint32_t>(k % 8) * 128 + 2 * n);
  });
}

inline void wgmma_m64n128k8_tf32(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  const uint32_t stride = static_cast<uint32_t>(b >> 32 & 0x3fffu) * 16;
  const WarpOperands a({a0, a1, a2, a3});
  const auto cut = [](uint32_t bits) { return __uint_as_float(bits & 0xffffe000u); };
  const int g = emulation::lane() / 4, c = emulation::lane() % 4;
  for (int i = 0; i < 64; ++i) {
    const uint32_t n = static_cast<uint32_t>(8 * (i / 4) + 2 * c + i % 2);
    for (int k = 0; k < 8; ++k)
      d[i] += cut(a.get(4 * g + k % 4, 2 * (k / 4) + i % 4 / 2)) *
              cut(wgmma_bits<uint32_t>(b, n / 8 * stride + n % 8 * (stride / 8) + 4 * static_cast<uint32_t>(k)));
  }
}

}  // namespace kda::cuda::ptx

// Stands in for CUDA's header where kernels are compiled for the host: keywords, vector types, the built-in functions
// that the kernels name. Collectives of a warp go through threads.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "threads.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ thread_local  // one operating-system thread a CTA
#define __align__(n) __attribute__((aligned(n)))

using cudaError_t = int;
using cudaStream_t = void*;

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

// The running thread's place. Set by the scheduler.
struct EmulatedIndex {
  unsigned x = 0, y = 0, z = 0;
};
inline thread_local EmulatedIndex threadIdx, blockIdx, gridDim;
struct EmulatedBlockSize {
  // Threads of a block that is launched without a cluster's layout; set by whoever runs the kernel.
  unsigned x = 0;
};
inline thread_local EmulatedBlockSize blockDim;

template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a > b ? a : b;
}
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return a < b ? a : b;
}

template <class To, class From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(To));
  return y;
}
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }

// Every lane's value, until the next collective.
template <class T>
class LaneValues {
 public:
  explicit LaneValues(T mine) : words_(emulation::warp_words()) {
    uint64_t word = 0;
    std::memcpy(&word, &mine, sizeof(T));
    words_[8 * emulation::lane()] = word;
    emulation::warp_meeting();
  }
  T operator[](int lane) const {
    T x;
    std::memcpy(&x, words_ + 8 * lane, sizeof(T));
    return x;
  }

 private:
  uint64_t* words_;
};

template <class T>
T __shfl_sync(unsigned, T x, int from) {
  return LaneValues<T>(x)[from];
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return LaneValues<T>(x)[emulation::lane() ^ mask];
}
inline bool __any_sync(unsigned, bool x) {
  const LaneValues<bool> all(x);
  bool any = false;
  for (int i = 0; i < 32; ++i) any = any || all[i];
  return any;
}
template <class T>
T __reduce_max_sync(unsigned, T x) {
  const LaneValues<T> all(x);
  for (int i = 0; i < 32; ++i) x = all[i] > x ? all[i] : x;
  return x;
}
template <class T>
T __reduce_min_sync(unsigned, T x) {
  const LaneValues<T> all(x);
  for (int i = 0; i < 32; ++i) x = all[i] < x ? all[i] : x;
  return x;
}
template <class T>
T __reduce_add_sync(unsigned, T x) {
  const LaneValues<T> all(x);
  T sum = 0;
  for (int i = 0; i < 32; ++i) sum += all[i];
  return sum;
}
template <class T>
T __shfl_up_sync(unsigned, T x, int step) {
  const LaneValues<T> all(x);
  const int from = emulation::lane() - step;
  return from >= 0 ? all[from] : x;
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const LaneValues<bool> all(x);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (all[i] ? 1u : 0u) << i;
  return bits;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
// One thread runs at a time, so an addition is whole by itself.
template <class T, class U>
T atomicAdd(T* p, U x) {
  const T before = *p;
  *p += static_cast<T>(x);
  return before;
}
// Cache hints.
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, T x) {
  *p = x;
}
inline void __syncwarp() { emulation::warp_barrier(); }
inline void __syncthreads() { emulation::block_barrier(); }

// gather   packed[i] = pool[idx[i]], or zeros if idx[i] is not a row or flag[i] is false (C-1, C-5..C-8)
// scatter  pool[idx[i]] = cast(packed[i]) where idx[i] is a row (C-2, C-9, C-10)
//
// Grid       x: of a row, kCopySlice bytes a warp; y, z: selected rows (z * gridDim.y + y), surplus blocks return.
// Block      one warp or several, alike: four accesses of a thread at a time; no shared memory, no barrier. A block has
//            one row, so validity is one branch and no address is formed from an index that is not a row (C-9).
// Waiting    for the grid before, like every kernel here. Before that a short call asks the L2 for its source, in
//            gather of the row that the index has now, a guess: the index that counts is read after the wait, past the
//            L1, where nothing stale can be; so are the rows.
// Precision  equal dtypes: bits (C-17). Casts: widening exact, narrowing once to nearest even (C-16).
// Limits     products in 64 bits (C-15); lanes narrower than the plan's where a packed tensor is less aligned.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/kernels/common/math.cuh"
#include "cuda/kernels/state_copy/params.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/grid.h"

namespace kda::cuda {

template <class Index_, CopyDirectionTag kDirection, CopyCast kCast_>
struct StateCopyConfig {
  using Index = Index_;
  static constexpr bool kScatter = kDirection == CopyDirectionTag::kScatter;
  static constexpr CopyCast kCast = kCast_;
};

template <int kBytes>
struct LaneOf;
template <>
struct LaneOf<16> {
  using Type = uint4;
};
template <>
struct LaneOf<8> {
  using Type = uint2;
};
template <>
struct LaneOf<4> {
  using Type = uint32_t;
};
template <>
struct LaneOf<2> {
  using Type = uint16_t;
};
template <>
struct LaneOf<1> {
  using Type = uint8_t;
};
template <int kBytes>
using Lane = typename LaneOf<kBytes>::Type;

// Elements of 16 bits and as many of fp32.
template <CopyCast kCast, int kBytes>
__device__ __forceinline__ Lane<2 * kBytes> widen_lane(const Lane<kBytes>& x) {
  uint16_t in[kBytes / 2];
  float out[kBytes / 2];
  memcpy(in, &x, kBytes);
#pragma unroll
  for (int i = 0; i < kBytes / 2; ++i) {
    if constexpr (kCast == CopyCast::kBf16) out[i] = __uint_as_float(static_cast<uint32_t>(in[i]) << 16);
    else out[i] = __half2float(__ushort_as_half(in[i]));
  }
  Lane<2 * kBytes> y;
  memcpy(&y, out, 2 * kBytes);
  return y;
}
template <CopyCast kCast, int kBytes>
__device__ __forceinline__ Lane<kBytes> narrow_lane(const Lane<2 * kBytes>& x) {
  float in[kBytes / 2];
  uint16_t out[kBytes / 2];
  memcpy(in, &x, 2 * kBytes);
#pragma unroll
  for (int i = 0; i < kBytes / 2; ++i) {
    if constexpr (kCast == CopyCast::kBf16) out[i] = __bfloat16_as_ushort(__float2bfloat16_rn(in[i]));
    else out[i] = __half_as_ushort(__float2half_rn(in[i]));
  }
  Lane<kBytes> y;
  memcpy(&y, out, kBytes);
  return y;
}

// What stands beside a selected row, as it was read.
struct Selected {
  int64_t row;
  bool wanted;
  __device__ __forceinline__ bool live(const StateCopyParams& p) const { return wanted && row >= 0 && row < p.rows; }
  __device__ __forceinline__ bool operator==(const Selected&) const = default;
};

template <class C>
__device__ __forceinline__ const typename C::Index* index_of(const StateCopyParams& p, int64_t i) {
  return static_cast<const typename C::Index*>(p.indices) + i * p.index_stride;
}
template <class C>
__device__ __forceinline__ Selected read_selected(const StateCopyParams& p, int64_t i) {
  return {static_cast<int64_t>(__ldcg(index_of<C>(p, i))), p.flags == nullptr || __ldcg(p.flags + i) != 0};
}

// A thread's part of what its block copies between a row of the pool and packed row i, with lanes of kBytes on the
// pool's side: every blockDim.x-th lane.
template <class C, int kBytes>
class Slice {
  static constexpr bool kCasts = C::kCast != CopyCast::kNone;
  using PoolLane = Lane<kBytes>;
  using PackedLane = Lane<kCasts ? 2 * kBytes : kBytes>;
  using From = std::conditional_t<C::kScatter, PackedLane, PoolLane>;
  using To = std::conditional_t<C::kScatter, PoolLane, PackedLane>;
  static constexpr int kLanes = kCopySlice / 32 / static_cast<int>(sizeof(PackedLane)), kAtOnce = 4;

 public:
  __device__ __forceinline__ Slice(const StateCopyParams& p, int64_t i)
      : p_(p),
        i_(i),
        threads_(static_cast<int>(blockDim.x)),
        start_(int64_t{blockIdx.x} * (threads_ * kLanes)),
        left_(p.lanes - start_ - threadIdx.x) {}

  // Of a call bound by memory: four lanes at a time. A scatter's first ones are on their way while the index is.
  __device__ __forceinline__ void copy(const Selected& selected) const {
    From x[kAtOnce];
    if constexpr (C::kScatter) load(x, source(0), 0);
    if (!selected.live(p_)) return clear();
    const From* const from = source(selected.row);
    To* const to = target(selected.row);
    if constexpr (!C::kScatter) load(x, from, 0);
    store(to, x, 0);
#pragma unroll 1
    for (int at = kAtOnce; at < kLanes; at += kAtOnce) {
      load(x, from, at);
      store(to, x, at);
    }
  }

  // Of a short call: all lanes at once, and of the row that was guessed while the index that counts is on its way.
  __device__ __forceinline__ void copy_guessed(const Selected& guess, const Selected& selected) const {
    From x[kLanes];
    if (C::kScatter || guess.live(p_)) load(x, source(guess.row), 0);
    if (!selected.live(p_)) return clear();
    if (!C::kScatter && !(guess == selected)) load(x, source(selected.row), 0);
    store(target(selected.row), x, 0);
  }

  // The L2 is asked for the source, a line by each thread. A scatter has not read its index: that one too.
  __device__ __forceinline__ void ask(const Selected& guess) const {
    static_assert(kBytes < 16 || kLanes * sizeof(From) == 128);
    if (start_ + threadIdx.x * kLanes < p_.lanes) ptx::prefetch_to_l2(source(guess.row) + threadIdx.x * (kLanes - 1));
    if (C::kScatter && threadIdx.x == 0) ptx::prefetch_to_l2(index_of<C>(p_, i_));
  }

 private:
  // The thread's first lane; a scatter's source and a gather's target have no row.
  __device__ __forceinline__ const From* source(int64_t row) const { return first<const From>(C::kScatter, row); }
  __device__ __forceinline__ To* target(int64_t row) const { return first<To>(!C::kScatter, row); }
  template <class T>
  __device__ __forceinline__ T* first(bool packed, int64_t row) const {
    return reinterpret_cast<T*>(packed ? p_.packed + i_ * p_.packed_stride : p_.pool + row * p_.pool_stride) + start_ +
           threadIdx.x;
  }

  template <int kCount>
  __device__ __forceinline__ void load(From (&x)[kCount], const From* from, int at) const {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if ((at + u) * threads_ < left_) x[u] = __ldcg(from + (at + u) * threads_);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void store(To* to, const From (&x)[kCount], int at) const {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if ((at + u) * threads_ >= left_) continue;
      To* const place = to + (at + u) * threads_;
      if constexpr (!kCasts) __stcg(place, x[u]);
      else if constexpr (C::kScatter) __stcg(place, narrow_lane<C::kCast, kBytes>(x[u]));
      else __stcg(place, widen_lane<C::kCast, kBytes>(x[u]));
    }
  }

  // What a gather finds where no row is; a scatter leaves the pool as it is.
  __device__ __forceinline__ void clear() const {
    if constexpr (C::kScatter) return;
    To* const to = target(0);
#pragma unroll 4
    for (int u = 0; u < kLanes; ++u) {
      if (u * threads_ < left_) __stcg(to + u * threads_, To{});
    }
  }

  const StateCopyParams& p_;
  int64_t i_;
  int threads_;
  int64_t start_, left_;  // the block's first lane; lanes from the thread's first one on
};

template <class C>
__global__ void __launch_bounds__(32 * kCopyMiddleWarps) state_copy_kernel(const __grid_constant__ StateCopyParams p) {
  touch_parameters(p);
  ptx::launch_dependents();
  const int64_t i = int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  if (i >= p.n) return;
  if constexpr (C::kCast == CopyCast::kNone) {
    if (p.guesses) {
      const Slice<C, 16> slice(p, i);
      Selected guess{};
      if constexpr (!C::kScatter) guess = read_selected<C>(p, i);
      if (C::kScatter || guess.live(p)) slice.ask(guess);
      ptx::wait_for_prerequisites();
      return slice.copy_guessed(guess, read_selected<C>(p, i));
    }
  }
  ptx::wait_for_prerequisites();
  const Selected selected = read_selected<C>(p, i);
  if constexpr (C::kCast == CopyCast::kNone) {
    switch (p.lane) {
      case 16: return Slice<C, 16>(p, i).copy(selected);
      case 8: return Slice<C, 8>(p, i).copy(selected);
      case 4: return Slice<C, 4>(p, i).copy(selected);
      case 2: return Slice<C, 2>(p, i).copy(selected);
      default: return Slice<C, 1>(p, i).copy(selected);
    }
  } else {
    switch (p.lane) {
      case 8: return Slice<C, 8>(p, i).copy(selected);
      case 4: return Slice<C, 4>(p, i).copy(selected);
      default: return Slice<C, 2>(p, i).copy(selected);
    }
  }
}

}  // namespace kda::cuda

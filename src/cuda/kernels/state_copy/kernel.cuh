// gather   packed[i] = pool[idx[i]], or zeros if idx[i] is not a row or flag[i] is false (C-1, C-5..C-8)
// scatter  pool[idx[i]] = cast(packed[i]) where idx[i] is a row (C-2, C-9, C-10)
//
// Grid       x: slices of a row, kCopySlice lanes each; y, z: selected rows (z * gridDim.y + y), surplus blocks
//            return.
// Block      kThreads threads with kLanes accesses each; no shared memory, no barrier. A block has one row, so
//            validity is one branch and no address is formed from an index that is not a row (C-9).
// Waiting    for the grid before, like every kernel here; until then only hints to the L2 are given, which change
//            nothing: the source slice is asked for, in gather at the row that the index has now. The index that
//            counts is read after the wait, past the L1, where nothing stale can be; so are the rows.
// Precision  equal dtypes: bits (C-17). Casts: widening exact, narrowing once to nearest even (C-16).
// Limits     products in 64 bits (C-15); lanes narrower than the plan's where a packed tensor is less aligned.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/kernels/common/math.cuh"
#include "cuda/kernels/state_copy/params.h"
#include "cuda/ptx/copy.h"

namespace kda::cuda {

template <class Index_, CopyDirectionTag kDirection, CopyCast kCast_>
struct StateCopyConfig {
  using Index = Index_;
  static constexpr bool kScatter = kDirection == CopyDirectionTag::kScatter;
  static constexpr CopyCast kCast = kCast_;
  static constexpr int kThreads = kCopyThreads, kLanes = kCopyLanes;
  // A call of at most so many blocks is bound by latency: hints, and all loads of a thread at once (1 row of 2 MB on
  // an H200: 1.9 us; without hints 2.4). A larger one is bound by memory, which likes few loads in flight: two at a
  // time gather 256 rows at 98 % of the copy rate, four at once at 96 %; and hints disturb the stream of the grid
  // before.
  static constexpr int64_t kFewBlocks = 256;
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

template <class C>
__device__ __forceinline__ bool few_blocks(const StateCopyParams& p) {
  return p.n * gridDim.x <= C::kFewBlocks;
}

// One slice of a row with lanes of kBytes on the pool's side.
template <class C, int kBytes>
__device__ __forceinline__ void copy_slice(const StateCopyParams& p, char* pool, char* packed, bool live) {
  constexpr bool kCasts = C::kCast != CopyCast::kNone;
  using PoolLane = Lane<kBytes>;
  using PackedLane = Lane<kCasts ? 2 * kBytes : kBytes>;
  using From = std::conditional_t<C::kScatter, PackedLane, PoolLane>;
  using To = std::conditional_t<C::kScatter, PoolLane, PackedLane>;
  const int64_t first = int64_t{blockIdx.x} * (C::kThreads * C::kLanes) + threadIdx.x;
  auto* to = reinterpret_cast<To*>(C::kScatter ? pool : packed) + first;
  const int64_t left = p.lanes - first;
  if (!live) {  // gather only
#pragma unroll
    for (int i = 0; i < C::kLanes; ++i) {
      if (i * C::kThreads < left) __stcg(to + i * C::kThreads, To{});
    }
    return;
  }
  const auto* from = reinterpret_cast<const From*>(C::kScatter ? packed : pool) + first;
  const auto put = [&](int i, const From& x) {
    if constexpr (!kCasts) __stcg(to + i * C::kThreads, x);
    else if constexpr (C::kScatter) __stcg(to + i * C::kThreads, narrow_lane<C::kCast, kBytes>(x));
    else __stcg(to + i * C::kThreads, widen_lane<C::kCast, kBytes>(x));
  };
  if constexpr (sizeof(From) == 16 && sizeof(To) == 16) {
    if (!few_blocks<C>(p)) {
      static_assert(C::kLanes == 4);
      const auto get = [&](int i) {
        return i * C::kThreads < left ? ptx::load_global_16_in_order(from + i * C::kThreads) : From{};
      };
      const auto put_if = [&](int i, const From& x) {
        if (i * C::kThreads < left) put(i, x);
      };
      const From a = get(0), c = get(2);
      put_if(0, a);
      const From b = get(1), d = get(3);
      put_if(1, b), put_if(2, c), put_if(3, d);
      return;
    }
  }
  From x[C::kLanes];
#pragma unroll
  for (int i = 0; i < C::kLanes; ++i) {
    if (i * C::kThreads < left) x[i] = __ldcg(from + i * C::kThreads);
  }
#pragma unroll
  for (int i = 0; i < C::kLanes; ++i) {
    if (i * C::kThreads < left) put(i, x[i]);
  }
}

// Asks for the source of this block's slice while the grid before may still run. Whole 16-byte lanes only.
template <class C>
__device__ __forceinline__ void hint_slice(const StateCopyParams& p, int64_t i, const typename C::Index* index) {
  constexpr int64_t kSliceLanes = C::kThreads * C::kLanes;
  const char* from = p.packed + i * p.packed_stride;
  if constexpr (!C::kScatter) {
    const auto row = static_cast<int64_t>(__ldcg(index));
    const bool wanted = p.flags == nullptr || __ldcg(p.flags + i) != 0;
    if (!wanted || row < 0 || row >= p.rows) return;
    from = p.pool + row * p.pool_stride;
  }
  const int64_t first = int64_t{blockIdx.x} * kSliceLanes;
  const int64_t lanes = p.lanes - first < kSliceLanes ? p.lanes - first : kSliceLanes;
  ptx::prefetch_block_to_l2(from + first * 16, static_cast<uint32_t>(lanes * 16));
}

template <class C>
__global__ void __launch_bounds__(C::kThreads) state_copy_kernel(const __grid_constant__ StateCopyParams p) {
  touch_parameters(p);
  const int64_t i = int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  if (i >= p.n) return;
  const auto* index = static_cast<const typename C::Index*>(p.indices) + i * p.index_stride;
  if (C::kCast == CopyCast::kNone && p.lane == 16 && threadIdx.x == 0 && few_blocks<C>(p)) hint_slice<C>(p, i, index);
  wait_for_previous_grid();
  const auto row = static_cast<int64_t>(__ldcg(index));
  bool live = row >= 0 && row < p.rows;
  if (C::kScatter && !live) return;
  if (!C::kScatter && p.flags != nullptr) live = live && __ldcg(p.flags + i) != 0;
  char* pool = p.pool + (live ? row * p.pool_stride : 0);
  char* packed = p.packed + i * p.packed_stride;
  if constexpr (C::kCast == CopyCast::kNone) {
    switch (p.lane) {
      case 16: return copy_slice<C, 16>(p, pool, packed, live);
      case 8: return copy_slice<C, 8>(p, pool, packed, live);
      case 4: return copy_slice<C, 4>(p, pool, packed, live);
      case 2: return copy_slice<C, 2>(p, pool, packed, live);
      default: return copy_slice<C, 1>(p, pool, packed, live);
    }
  } else {
    switch (p.lane) {
      case 8: return copy_slice<C, 8>(p, pool, packed, live);
      case 4: return copy_slice<C, 4>(p, pool, packed, live);
      default: return copy_slice<C, 2>(p, pool, packed, live);
    }
  }
}

}  // namespace kda::cuda

// y = io(o * rsqrt(mean_v(o^2) + eps) * w_v * sigma(z)) (L-7.4)
//
// Grid       one block per 16 or 32 rows (token, value head); rows in order of memory.
// Block      four warps; sixteen lanes own a row, so a warp has two at a time and two pairs in flight. Loads and
//            stores have no hints: marked to leave the L2 first they take 6 to 9 % longer.
// Precision  fp32 between one load and one rounding; no shared memory, no waiting between warps.
// Limits     V <= 1024. Exact: V = 128 with aligned rows, 16-byte loads.
#pragma once

#include "cuda/kernels/common/octets.cuh"
#include "cuda/kernels/gated_norm/norm.cuh"
#include "cuda/kernels/gated_norm/params.h"

namespace kda::cuda {

// kElements: of a row in one lane, consecutive; a power of two.
template <class Io_, bool kExact_, int kElements_>
struct GatedNormConfig {
  using Io = Io_;
  static constexpr bool kExact = kExact_;
  static constexpr int kElements = kElements_;
  static constexpr int kPairs = kExact ? 2 : 1;  // rows of a half warp in flight
};

__device__ __forceinline__ int64_t row_offset(const GatedNormParams& p, const TokenRef& x, int32_t row) {
  if (p.dense) return static_cast<int64_t>(row) * p.values;
  const int32_t token = row / p.heads, head = row % p.heads;
  return x.offset(token / p.tokens, token % p.tokens, head);
}

template <class C>
__global__ void __launch_bounds__(128) gated_norm_kernel(const __grid_constant__ GatedNormParams p) {
  using Io = typename C::Io;
  constexpr int kElements = C::kElements;
  touch_parameters(p);
  const int lane = static_cast<int>(threadIdx.x % 16), first = lane * kElements;
  const int half = static_cast<int>(threadIdx.x / 16);
  const int32_t passes = p.block_rows / 8;
  const int32_t row0 = (static_cast<int32_t>(blockIdx.x) * 8 + half) * passes;
  wait_for_previous_grid();
  float w[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) w[i] = C::kExact || first + i < p.values ? p.weight[first + i] : 0.0f;
#pragma unroll 1
  for (int pass = 0; pass < passes; pass += C::kPairs) {
    if constexpr (C::kExact) {
      Octet<Io, false> o[C::kPairs], z[C::kPairs];
#pragma unroll
      for (int i = 0; i < C::kPairs; ++i) {
        const int32_t row = min(row0 + pass + i, p.rows - 1);  // rows behind the last repeat it and are not stored
        o[i].load(static_cast<const Io*>(p.o.data) + row_offset(p, p.o, row) + first);
        z[i].load(static_cast<const Io*>(p.z.data) + row_offset(p, p.z, row) + first);
      }
#pragma unroll
      for (int i = 0; i < C::kPairs; ++i) {
        float x[kElements], g[kElements];
        o[i].widen(x);
        z[i].widen(g);
        const float factor = norm_factor(tree_of_lanes<16>(tree_of_squares<kElements>(x)), p.values, p.eps);
#pragma unroll
        for (int e = 0; e < kElements; ++e) x[e] = gated_value(x[e], factor, w[e], g[e]);
        const int32_t row = row0 + pass + i;
        if (row < p.rows) {
          o[i].store(x, static_cast<Io*>(const_cast<void*>(p.out.data)) + row_offset(p, p.out, row) + first);
        }
      }
    } else {
      const int32_t row = row0 + pass;
      const bool exists = row < p.rows;
      float x[kElements];
      const Io* o = static_cast<const Io*>(p.o.data) + (exists ? row_offset(p, p.o, row) : 0);
      const Io* z = static_cast<const Io*>(p.z.data) + (exists ? row_offset(p, p.z, row) : 0);
      Io* out = static_cast<Io*>(const_cast<void*>(p.out.data)) + (exists ? row_offset(p, p.out, row) : 0);
#pragma unroll
      for (int e = 0; e < kElements; ++e) x[e] = exists && first + e < p.values ? to_fp32(o[first + e]) : 0.0f;
      const float factor = norm_factor(tree_of_lanes<16>(tree_of_squares<kElements>(x)), p.values, p.eps);
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        if (exists && first + e < p.values)
          from_fp32(gated_value(x[e], factor, w[e], to_fp32(z[first + e])), out[first + e]);
      }
    }
  }
}

}  // namespace kda::cuda

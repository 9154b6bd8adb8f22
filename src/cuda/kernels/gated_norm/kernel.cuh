// y = io(o * rsqrt(mean_v(o^2) + eps) * w_v * sigma(z)) (L-7.4)
//
// Grid       one block per 8 rows (token, value head); rows in order of memory.
// Block      four warps; sixteen lanes own a row. Nothing is looped over and nothing kept: memory likes many blocks with
//            few loads in flight, asked for in order. Loads and stores have no hints: marked to leave the L2 first they
//            take 6 to 9 % longer.
// Precision  fp32 between one load and one rounding; no shared memory, no waiting between warps.
// Limits     V <= 1024. Exact: V = 128 with rows and weights aligned to 16 bytes.
#pragma once

#include "cuda/kernels/common/octets.cuh"
#include "cuda/kernels/gated_norm/norm.cuh"
#include "cuda/kernels/gated_norm/params.h"
#include "cuda/ptx/grid.h"

namespace kda::cuda {

// kElements: of a row in one lane, consecutive; a power of two.
template <class Io_, bool kExact_, int kElements_>
struct GatedNormConfig {
  using Io = Io_;
  static constexpr bool kExact = kExact_;
  static constexpr int kElements = kElements_;
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
  ptx::launch_dependents();
  const int first = static_cast<int>(threadIdx.x % 16) * kElements;
  const int32_t own_row = static_cast<int32_t>(blockIdx.x) * kNormBlockRows + static_cast<int32_t>(threadIdx.x / 16);
  const bool exists = own_row < p.rows;
  const int32_t row = exists ? own_row : 0;  // of a row that is not there nothing is stored
  const Io* const o = static_cast<const Io*>(p.o.data) + row_offset(p, p.o, row) + first;
  const Io* const z = static_cast<const Io*>(p.z.data) + row_offset(p, p.z, row) + first;
  Io* const out = static_cast<Io*>(const_cast<void*>(p.out.data)) + row_offset(p, p.out, row) + first;
  ptx::wait_for_prerequisites();
  float x[kElements], w[kElements];
  if constexpr (C::kExact) {
    Octet<Io, false> values, gates;
    values.load(o);
    gates.load(z);
    static_assert(kElements == 8);
    const auto* const weight = reinterpret_cast<const float4*>(p.weight + first);
    const float4 low = weight[0], high = weight[1];
    w[0] = low.x, w[1] = low.y, w[2] = low.z, w[3] = low.w;
    w[4] = high.x, w[5] = high.y, w[6] = high.z, w[7] = high.w;
    float g[kElements];
    values.widen(x);
    gates.widen(g);
    const float factor = norm_factor(tree_of_lanes<16>(tree_of_squares<kElements>(x)), p.values, p.eps);
#pragma unroll
    for (int e = 0; e < kElements; ++e) x[e] = gated_value(x[e], factor, w[e], g[e]);
    if (exists) values.store(x, out);
  } else {
    const int32_t left = exists ? p.values - first : 0;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      x[e] = e < left ? to_fp32(o[e]) : 0.0f;
      w[e] = e < left ? p.weight[first + e] : 0.0f;
    }
    const float factor = norm_factor(tree_of_lanes<16>(tree_of_squares<kElements>(x)), p.values, p.eps);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (e < left) from_fp32(gated_value(x[e], factor, w[e], to_fp32(z[e])), out[e]);
    }
  }
}

}  // namespace kda::cuda

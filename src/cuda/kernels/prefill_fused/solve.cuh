// Producer warpgroup: scores of an item from the warps' partial sums, and the inverse of its triangular system (H-8).
//
// T = (I + diag(beta) A)^-1 in fp32: 16x16 diagonal blocks by substitution, the lower left block as -T11 N10 T00.
// T' = T diag(beta) goes to the stage in two fp16 terms, so that U = T' (V - K~ S). No entry of a row depends on
// later tokens, not even as 0 * NaN (H-9).
#pragma once

#include "cuda/kernels/prefill_fused/prepare_anchored.cuh"

namespace kda::cuda::prefill_fused {

__device__ __forceinline__ float4 sum_quad(uint32_t group_scratch, int quad, int lane) {
  float4 s = ptx::load_shared_f4(group_scratch + quad * 512 + lane * 16);
#pragma unroll
  for (int warp = 1; warp < 4; ++warp) {
    const float4 x = ptx::load_shared_f4(group_scratch + warp * 4096 + quad * 512 + lane * 16);
    s.x += x.x, s.y += x.y, s.z += x.z, s.w += x.w;
  }
  return s;
}

__device__ __forceinline__ uint32_t system_at(uint32_t area, int i, int j) {
  return area + GroupArea::kSystem + (i * GroupArea::kPitch + j) * 4;
}

// A_ij enters the system as beta_i A_ij; M_ij goes to the stage.
template <bool kTransposed>
__device__ __forceinline__ void put_key_score(uint32_t area, int i, int j, float x) {
  const float beta = ptx::load_shared_f1(area + GroupArea::kBeta + i * 4);
  ptx::store_shared(kTransposed ? system_at(area, j, i) : system_at(area, i, j), beta * x);
}
__device__ __forceinline__ void put_query_score(uint32_t stage, int i, int j, float x) {
  const uint32_t packed = ptx::pack_f16(x, 0.0f);
  ptx::store_shared(stage + Stage::kScores + swizzle_64(i, j >> 3) + (j & 7) * 2, static_cast<uint16_t>(packed));
}

// Sums the partial scores; each warp takes one diagonal quad and one off-diagonal quad.
template <Diagonal kDiagonal>
__device__ __forceinline__ void reduce_scores(const Params& p, uint32_t group_scratch, uint32_t area, uint32_t stage,
                                              const ProducerLane& me) {
  const int block = me.warp >> 1;
  const float4 sum = sum_quad(group_scratch, me.warp, me.lane);
#pragma unroll 1
  for (int e = 0; e < 2; ++e) {
    const float key = e == 0 ? sum.x : sum.y, query = e == 0 ? sum.z : sum.w;
    const int column_a = (e << 2) | me.c;  // token a of lane position 2c + e
    const bool lower = (me.warp & 1) != 0;
    const bool use_a = lower && me.token_a > column_a;
    const int i = 16 * block + (use_a ? me.token_a : me.token_b);
    const int j = 16 * block + (lower && !use_a ? 15 - column_a : column_a);
    if (!lower || me.token_a != column_a) {
      put_key_score<true>(area, i, j, key);
      put_query_score(stage, i, j, query);
    } else if (kDiagonal == Diagonal::kAnchored) {
      put_query_score(stage, 16 * block + me.token_a, 16 * block + me.token_a, key);
      put_query_score(stage, 16 * block + me.token_b, 16 * block + me.token_b, query);
    }
  }
  const float4 cross_sum = sum_quad(group_scratch, 4 + me.warp, me.lane);
  const float unscale = kDiagonal == Diagonal::kAnchored ? ptx::reciprocal_approx(anchor_scale(p)) : 1.0f;
  const int i = 16 + (me.warp < 2 ? me.token_a : me.token_b);
#pragma unroll 1
  for (int e = 0; e < 2; ++e) {
    const float key = e == 0 ? cross_sum.x : cross_sum.y, query = e == 0 ? cross_sum.z : cross_sum.w;
    const int column_a = (e << 2) | me.c;
    const int j = (me.warp & 1) == 0 ? column_a : 15 - column_a;
    put_key_score<false>(area, i, j, key * unscale);
    put_query_score(stage, i, j, query * unscale);
  }
  if (kDiagonal == Diagonal::kDyadic && me.warp == 0) {  // M's diagonal: no decay
    const int t = me.lane;
    const float scale = norm_factor(p, load_sum(area, kSumQ, t)) * norm_factor(p, load_sum(area, kSumK, t));
    put_query_score(stage, t, t, load_sum(area, kSumQK, t) * scale);
  }
}

// Entries 4*(i4)..15 of row m of a transposed diagonal block, those below the diagonal.
template <int kRow>
__device__ __forceinline__ void load_below(float (&below)[16], uint32_t system) {
#pragma unroll
  for (int i4 = (kRow + 1) / 4; i4 < 4; ++i4) {
    const float4 n = ptx::load_shared_f4(system + (kRow * GroupArea::kPitch + 4 * i4) * 4);
    below[4 * i4] = n.x, below[4 * i4 + 1] = n.y, below[4 * i4 + 2] = n.z, below[4 * i4 + 3] = n.w;
  }
}

// Row kRow, now final, is taken off all rows below it, which are independent of one another.
template <int kRow>
__device__ __forceinline__ void eliminate(float (&x)[16], const float (&below)[16], uint32_t system, int column) {
  float next[16];
  if constexpr (kRow < 14) load_below<kRow + 1>(next, system);
  x[kRow] = kRow < column ? 0.0f : x[kRow];  // selected: a later token's NaN may stand there
#pragma unroll
  for (int i = kRow + 1; i < 16; ++i) x[i] = fmaf(-below[i], x[kRow], x[i]);
  if constexpr (kRow < 14) eliminate<kRow + 1>(x, next, system, column);
}

// One warp: both 16x16 diagonal blocks; lanes 0..15 own the columns of the first, 16..31 of the second.
__device__ __forceinline__ void invert_diagonal_blocks(uint32_t group_scratch, uint32_t area, int lane) {
  const int first = lane & 16, column = lane & 15;
  const uint32_t system = system_at(area, first, first);
  const uint32_t target = group_scratch + GroupArea::kInverse + (first * GroupArea::kPitch + first + column) * 4;
  float x[16], below[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
  load_below<0>(below, system);
  eliminate<0>(x, below, system, column);
  x[15] = 15 < column ? 0.0f : x[15];
#pragma unroll
  for (int i = 0; i < 16; ++i) ptx::store_shared(target + i * GroupArea::kPitch * 4, x[i]);
}

__device__ __forceinline__ uint32_t inverse_at(uint32_t group_scratch, int i, int j) {
  return group_scratch + GroupArea::kInverse + (i * GroupArea::kPitch + j) * 4;
}

// Two fp16 terms of T'_ij, T'_i,j+1 in packed halves.
__device__ __forceinline__ void split_pair(float x0, float x1, uint32_t& high, uint32_t& low) {
  high = ptx::pack_f16(x0, x1);
  const float2 h = ptx::unpack_f16(high);
  low = ptx::pack_f16(x0 - h.x, x1 - h.y);
}

// Diagonal blocks of T' to the stage: four entries a thread.
__device__ __forceinline__ void publish_diagonal_blocks(uint32_t group_scratch, uint32_t area, uint32_t stage,
                                                        int index) {
  const int i = index >> 2, j = (i & 16) + (index & 3) * 4;
  const float4 t = ptx::load_shared_f4(inverse_at(group_scratch, i, j));
  const float4 beta = ptx::load_shared_f4(area + GroupArea::kBeta + j * 4);
  uint2 high, low;
  split_pair(t.x * beta.x, t.y * beta.y, high.x, low.x);
  split_pair(t.z * beta.z, t.w * beta.w, high.y, low.y);
  const bool zero0 = j > i, zero1 = j + 1 > i, zero2 = j + 2 > i, zero3 = j + 3 > i;
  auto mask = [](uint32_t x, bool lo, bool hi) { return (lo ? 0u : x & 0xffffu) | (hi ? 0u : x & 0xffff0000u); };
  high = {mask(high.x, zero0, zero1), mask(high.y, zero2, zero3)};
  low = {mask(low.x, zero0, zero1), mask(low.y, zero2, zero3)};
  const uint32_t in_column = (j & 4) * 2;
  ptx::store_shared(stage + Stage::kSolve + swizzle_128(i, j >> 3) + in_column, high);
  ptx::store_shared(stage + Stage::kSolve + swizzle_128(i, 4 + (j >> 3)) + in_column, low);
}

// D = N10 T00, two entries a thread.
__device__ __forceinline__ void multiply_lower_left(uint32_t group_scratch, uint32_t area, int index) {
  const int i = index >> 3, j = (index & 7) * 2;
  float d0 = 0.0f, d1 = 0.0f;
#pragma unroll
  for (int m4 = 0; m4 < 4; ++m4) {
    const float4 n = ptx::load_shared_f4(system_at(area, 16 + i, 4 * m4));
    const float row[4] = {n.x, n.y, n.z, n.w};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float2 t = ptx::load_shared_f2(inverse_at(group_scratch, 4 * m4 + r, j));
      d0 = fmaf(row[r], t.x, d0);
      d1 = fmaf(row[r], t.y, d1);
    }
  }
  ptx::store_shared(group_scratch + GroupArea::kProduct + (i * GroupArea::kProductPitch + j) * 4, float2{d0, d1});
}

// T10 = -T11 D to the stage, two entries a thread; rows m > i of D are left out by selection.
__device__ __forceinline__ void publish_lower_left(uint32_t group_scratch, uint32_t area, uint32_t stage, int warp,
                                                   int index) {
  const int i = index >> 3, j = (index & 7) * 2;
  float t0 = 0.0f, t1 = 0.0f;
  for (int m4 = 0; m4 <= warp; ++m4) {  // rows of warp w: 4w..4w+3
    const float4 n = ptx::load_shared_f4(inverse_at(group_scratch, 16 + i, 16 + 4 * m4));
    const float row[4] = {n.x, n.y, n.z, n.w};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int m = 4 * m4 + r;
      const float2 d =
          ptx::load_shared_f2(group_scratch + GroupArea::kProduct + (m * GroupArea::kProductPitch + j) * 4);
      t0 = m <= i ? fmaf(-row[r], d.x, t0) : t0;
      t1 = m <= i ? fmaf(-row[r], d.y, t1) : t1;
    }
  }
  const float2 beta = ptx::load_shared_f2(area + GroupArea::kBeta + j * 4);
  uint32_t high, low;
  split_pair(t0 * beta.x, t1 * beta.y, high, low);
  const uint32_t in_column = (j & 7) * 2;
  ptx::store_shared(stage + Stage::kSolve + swizzle_128(16 + i, j >> 3) + in_column, high);
  ptx::store_shared(stage + Stage::kSolve + swizzle_128(16 + i, 4 + (j >> 3)) + in_column, low);
}

}  // namespace kda::cuda::prefill_fused

// Producer warpgroup: scores of an item from the warps' partial sums, and the inverse of its triangular system (H-8).
//
// T = (I + diag(beta) A)^-1 in fp32 by 8x8 blocks: diagonal blocks T_bb by substitution, then down each block column
// J T_bJ = -T_bb sum_{J <= m < b} N_bm T_mJ. Warp J owns block column J and makes the four T_bb for itself, so that
// nothing crosses warps between the scores and the published stage. T' = T diag(beta) goes to the stage in two fp16
// terms, so that U = T' (V - K~ S). No entry of a row depends on later tokens, not even as 0 * NaN (H-9).
#pragma once

#include <utility>

#include "cuda/kernels/prefill_fused/prepare_anchored.cuh"
#include "cuda/ptx/predicated.h"

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

// Byte of M_ij in Stage::kScores. Bits of i and j enter by exclusive or: another entry's is that of the difference
// away.
__host__ __device__ constexpr uint32_t score_offset(uint32_t i, uint32_t j) {
  return swizzle_64(i, j >> 3) ^ (j & 7) * 2;
}
__device__ __forceinline__ void put_query_score(uint32_t address, float x) {
  ptx::store_shared(address, static_cast<uint16_t>(ptx::pack_f16(x, 0.0f)));
}
__device__ __forceinline__ float beta_of(uint32_t area, int token) {
  return ptx::load_shared_f1(area + GroupArea::kBeta + token * 4);
}
// A warp's diagonal quad: beta_i A_ij to the system, M_ij to the stage. The quad of the lower levels has entries of
// the a tokens, (token a, column), and of the b tokens, both mirrored, (15 - token a, 15 - column); that of level 8
// has (15 - token a, column).
template <Diagonal kDiagonal>
__device__ __forceinline__ void put_diagonal(const float4& sum, uint32_t area, uint32_t stage,
                                             const ProducerLane& me) {
  constexpr uint32_t kRow = GroupArea::kPitch * 4;
  const int first = 16 * (me.warp >> 1);
  const bool lower = (me.warp & 1) != 0;
  const float beta_a = beta_of(area, first + me.token_a), beta_b = beta_of(area, first + me.token_b);
  const uint32_t system = system_at(area, first, first), scores = stage + Stage::kScores + first * 64;
  const uint32_t system_a = me.token_a * kRow + me.c * 4;
  const uint32_t system_b = lower ? 15 * (kRow + 4) - system_a : me.token_b * kRow + me.c * 4;
  const uint32_t score_a = score_offset(me.token_a, first + me.c);
  const uint32_t score_b = score_a ^ (lower ? score_offset(15, 15) : score_offset(15, 0));
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float key = e == 0 ? sum.x : sum.y, query = e == 0 ? sum.z : sum.w;
    const int column = (e << 2) | me.c;  // token a of lane position 2c + e
    const bool is_a = lower && me.token_a > column, is_diagonal = lower && me.token_a == column;
    // The system's own diagonal is never read.
    ptx::store_shared(system + (is_a ? system_a + 16 * e : system_b + (lower ? -16 * e : 16 * e)),
                      key * (is_a ? beta_a : beta_b));
    const uint32_t score = scores + ((is_a ? score_a : score_b) ^ 8 * e);
    if (kDiagonal == Diagonal::kAnchored || !is_diagonal) put_query_score(score, query);
    if (kDiagonal == Diagonal::kAnchored && is_diagonal) put_query_score(scores + (score_a ^ 8 * e), key);
  }
}

// And one of block 1 x block 0: rows of the a tokens in warps 0 and 1, columns of the a tokens in even warps.
__device__ __forceinline__ void put_cross(const float4& sum, uint32_t area, uint32_t stage, const ProducerLane& me) {
  const bool mirrored = (me.warp & 1) != 0;
  const int i = 16 + (me.warp < 2 ? me.token_a : me.token_b), j = mirrored ? 15 - me.c : me.c;
  const float beta = beta_of(area, i);
  const uint32_t system = system_at(area, i, j), score = stage + Stage::kScores + score_offset(i, j);
  ptx::store_shared(system, sum.x * beta);
  ptx::store_shared(system + (mirrored ? -16 : 16), sum.y * beta);
  put_query_score(score, sum.z);
  put_query_score(score ^ 8, sum.w);
}

// Sums the partial scores; each warp takes one diagonal quad and one off-diagonal quad.
template <Diagonal kDiagonal>
__device__ __forceinline__ void reduce_scores(const Params& p, uint32_t group_scratch, uint32_t area, uint32_t stage,
                                              const ProducerLane& me) {
  const float4 sum = sum_quad(group_scratch, me.warp, me.lane);
  const float4 cross_sum = sum_quad(group_scratch, 4 + me.warp, me.lane);
  put_diagonal<kDiagonal>(sum, area, stage, me);
  put_cross(cross_sum, area, stage, me);
  if (kDiagonal == Diagonal::kDyadic && me.warp == 0) {  // M's diagonal: no decay
    const int t = me.lane;
    const float scale = norm_factor(p, load_sum(area, kSumQ, t)) * norm_factor(p, load_sum(area, kSumK, t));
    put_query_score(stage + Stage::kScores + score_offset(t, t), load_sum(area, kSumQK, t) * scale);
  }
}

// The four 8x8 diagonal blocks; lane 8b + j owns column j of block b. T_bb by rows to the warp's scratch.
__device__ __forceinline__ void invert_diagonal_blocks(float (&x)[8], uint32_t scratch, uint32_t area, int lane) {
  const int block = lane >> 3, column = lane & 7;
  const uint32_t system = system_at(area, 8 * block, 8 * block);
  const uint32_t target = scratch + SolveArea::kDiagonal + block * SolveArea::kBlockBytes + column * 4;
  float n[8][8];
#pragma unroll
  for (int i = 1; i < 8; ++i) {
#pragma unroll
    for (int r4 = 0; 4 * r4 < i; ++r4) {
      const float4 y = ptx::load_shared_f4(system + (i * GroupArea::kPitch + 4 * r4) * 4);
      n[i][4 * r4] = y.x, n[i][4 * r4 + 1] = y.y, n[i][4 * r4 + 2] = y.z, n[i][4 * r4 + 3] = y.w;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int r = 0; r < 8; ++r) {       // row r, now final, is taken off all rows below it
    x[r] = r < column ? 0.0f : x[r];  // selected: a later token's NaN may stand there
#pragma unroll
    for (int i = r + 1; i < 8; ++i) x[i] = fmaf(-n[i][r], x[r], x[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) ptx::store_shared(target + i * SolveArea::kRowBytes, x[i]);
}

// Two fp16 terms of T'_ij, T'_i,j+1 in packed halves.
__device__ __forceinline__ void split_pair(float x0, float x1, uint32_t& high, uint32_t& low) {
  high = ptx::pack_f16(x0, x1);
  const float2 h = ptx::unpack_f16(high);
  low = ptx::pack_f16(x0 - h.x, x1 - h.y);
}

struct Row8 {
  float x[8];
};
__device__ __forceinline__ Row8 load_row8(uint32_t address) {
  const float4 a = ptx::load_shared_f4(address), b = ptx::load_shared_f4(address + 16);
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

// acc (two columns) += N_bm T_mJ for this lane's row: n is its row of N_bm, t0 and t1 are the columns of T_mJ.
__device__ __forceinline__ void add_block(float2& acc, const Row8& n, const Row8& t0, const Row8& t1) {
#pragma unroll
  for (int r = 0; r < 8; ++r) acc.x = fmaf(n.x[r], t0.x[r], acc.x), acc.y = fmaf(n.x[r], t1.x[r], acc.y);
}

struct BlockPlace {
  uint32_t system;    // this lane's row of N in block row J, at block column J
  uint32_t diagonal;  // this lane's row of T_JJ
  uint32_t mine;      // its two columns of T
  uint32_t product;
  uint32_t high, low;  // this lane's two columns of both terms of T', row i of block row J
  int i, c;
};

// Block row b = J + kBelow of the block column from the finished sum, to the scratch and the stage.
template <int kBelow>
__device__ __forceinline__ void finish_block(const float2& sum, const BlockPlace& at, const float2& beta) {
  float2 t;
  if constexpr (kBelow == 0) {
    t = ptx::load_shared_f2(at.diagonal + 8 * at.c);
    t.x = 2 * at.c > at.i ? 0.0f : t.x;
    t.y = 2 * at.c + 1 > at.i ? 0.0f : t.y;
  } else {
    ptx::store_shared(at.product + at.i * 4, sum.x);
    ptx::store_shared(at.product + SolveArea::kRowBytes + at.i * 4, sum.y);
    __syncwarp();
    const Row8 n = load_row8(at.diagonal + kBelow * SolveArea::kBlockBytes);
    const Row8 y0 = load_row8(at.product), y1 = load_row8(at.product + SolveArea::kRowBytes);
    t = float2{0.0f, 0.0f};
    // Rows below this one are left out.
    [&]<int... kRow>(std::integer_sequence<int, kRow...>) {
      (ptx::multiply_add_from<kRow>(t.x, t.y, -n.x[kRow], y0.x[kRow], y1.x[kRow], at.i), ...);
    }
    (std::make_integer_sequence<int, 8>());
    ptx::store_shared(at.mine + (8 * kBelow + at.i) * 4, t.x);
    ptx::store_shared(at.mine + (GroupArea::kPitch + 8 * kBelow + at.i) * 4, t.y);
    __syncwarp();
  }
  uint32_t high, low;
  split_pair(t.x * beta.x, t.y * beta.y, high, low);
  ptx::store_shared(at.high + kBelow * 1024, high);
  ptx::store_shared(at.low + kBelow * 1024, low);
}

// Block column J of T' to the stage, block rows J, J+1, ...: each finished block is taken to the sums of all below
// it. Lane 4i + c has row i of a block, columns 2c and 2c + 1.
__device__ __forceinline__ void solve_block_column(uint32_t scratch, uint32_t area, uint32_t stage, int column,
                                                   int lane) {
  BlockPlace at;
  at.i = lane >> 2, at.c = lane & 3;
  const uint32_t columns = scratch + SolveArea::kColumns;
  {
    float x[8];
    invert_diagonal_blocks(x, scratch, area, lane);
    if (lane >> 3 == column) {
      const uint32_t target = columns + (lane & 7) * GroupArea::kPitch * 4 + column * 32;
      ptx::store_shared(target, float4{x[0], x[1], x[2], x[3]});
      ptx::store_shared(target + 16, float4{x[4], x[5], x[6], x[7]});
    }
  }
  __syncwarp();
  const float2 beta = ptx::load_shared_f2(area + GroupArea::kBeta + (8 * column + 2 * at.c) * 4);
  at.system = system_at(area, 8 * column + at.i, 8 * column);
  at.diagonal = scratch + SolveArea::kDiagonal + column * SolveArea::kBlockBytes + at.i * SolveArea::kRowBytes;
  at.mine = columns + 2 * at.c * GroupArea::kPitch * 4 + column * 32;
  at.product = scratch + SolveArea::kProduct + 2 * at.c * SolveArea::kRowBytes;
  at.high = stage + Stage::kSolve + column * 1024 + swizzle_128(at.i, column) + 4 * at.c;
  at.low = at.high ^ 64;                                 // 16-byte column 4 + J
  constexpr uint32_t kDown = 8 * GroupArea::kPitch * 4;  // to the next block row of N
  constexpr uint32_t kNext = GroupArea::kPitch * 4;      // to the lane's second column of T
  float2 sums[4] = {};
  finish_block<0>(sums[0], at, beta);
  if (column == 3) return;
  {
    const Row8 t0 = load_row8(at.mine), t1 = load_row8(at.mine + kNext);
    add_block(sums[1], load_row8(at.system + kDown), t0, t1);
    if (column < 2) add_block(sums[2], load_row8(at.system + 2 * kDown), t0, t1);
    if (column < 1) add_block(sums[3], load_row8(at.system + 3 * kDown), t0, t1);
  }
  finish_block<1>(sums[1], at, beta);
  if (column == 2) return;
  {
    const Row8 t0 = load_row8(at.mine + 32), t1 = load_row8(at.mine + kNext + 32);
    add_block(sums[2], load_row8(at.system + 2 * kDown + 32), t0, t1);
    if (column < 1) add_block(sums[3], load_row8(at.system + 3 * kDown + 32), t0, t1);
  }
  finish_block<2>(sums[2], at, beta);
  if (column == 1) return;
  add_block(sums[3], load_row8(at.system + 3 * kDown + 64), load_row8(at.mine + 64), load_row8(at.mine + kNext + 64));
  finish_block<3>(sums[3], at, beta);
}

}  // namespace kda::cuda::prefill_fused

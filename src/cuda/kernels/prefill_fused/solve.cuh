// Producer warpgroup: scores of an item from the warps' partial sums, and the inverse of its triangular system (H-8).
//
// T = (I + diag(beta) A)^-1 by 8x8 blocks: diagonal blocks T_bb by substitution in fp32, the others on the tensor
// cores, operands of two tf32 terms (class b16, N-6), fp32 sums: 2^-20 of a product at worst, where T' is kept in 22
// bits.
//   T_10 = -T_11 N_10 T_00, T_32 = -T_33 N_32 T_22;  lower left quarter: -[T_22 0; T_32 T_33] N [T_00 0; T_10 T_11]
// Two block columns share a product, as the halves of its rows; two warps do everything, each makes the four T_bb for
// itself, and one gives T_32 to the other. Held transposed, X = T_bJ^T, a product's accumulators are the next one's
// operand. T' = T diag(beta) goes to the stage in two fp16 terms, so that U = T' (V - K~ S). No entry of a row
// depends on later tokens, not even as 0 * NaN (H-9).
#pragma once

#include "cuda/kernels/prefill_fused/prepare_anchored.cuh"
#include "cuda/kernels/prefill_fused/terms.cuh"

namespace kda::cuda::prefill_fused {

// A quad's partial scores of all warps.
struct QuadParts {
  float4 x[4];
};
__device__ __forceinline__ QuadParts load_parts(uint32_t group_scratch, int quad, int lane) {
  QuadParts parts;
#pragma unroll
  for (int warp = 0; warp < 4; ++warp)
    parts.x[warp] = ptx::load_shared_f4(group_scratch + warp * 4096 + quad * 512 + lane * 16);
  return parts;
}
__device__ __forceinline__ float4 sum_parts(const QuadParts& parts) {
  float4 s = parts.x[0];
#pragma unroll
  for (int warp = 1; warp < 4; ++warp) {
    const float4& x = parts.x[warp];
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
__device__ __forceinline__ void put_diagonal(const float4& sum, float beta_a, float beta_b, uint32_t area,
                                             uint32_t stage, const ProducerLane& me) {
  constexpr uint32_t kRow = GroupArea::kPitch * 4;
  const int first = 16 * (me.warp >> 1);
  const bool lower = (me.warp & 1) != 0;
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
__device__ __forceinline__ int cross_row(const ProducerLane& me) {
  return 16 + (me.warp < 2 ? me.token_a : me.token_b);
}
__device__ __forceinline__ void put_cross(const float4& sum, float beta, uint32_t area, uint32_t stage,
                                          const ProducerLane& me) {
  const bool mirrored = (me.warp & 1) != 0;
  const int i = cross_row(me), j = mirrored ? 15 - me.c : me.c;
  const uint32_t system = system_at(area, i, j), score = stage + Stage::kScores + score_offset(i, j);
  ptx::store_shared(system, sum.x * beta);
  ptx::store_shared(system + (mirrored ? -16 : 16), sum.y * beta);
  put_query_score(score, sum.z);
  put_query_score(score ^ 8, sum.w);
}

// What a warp needs to sum its share of the scores, one diagonal quad and one off-diagonal quad, and of the solve
// what lies in places that the next item's first step writes: all asked for before any of it is used.
struct ScoreParts {
  QuadParts diagonal, cross;
  float beta_a, beta_b, beta_cross;
  float column_betas[2];  // of this lane's two columns of T, should its warp solve
};
__device__ __forceinline__ ScoreParts load_scores(uint32_t group_scratch, uint32_t area, const ProducerLane& me) {
  ScoreParts parts;
  parts.diagonal = load_parts(group_scratch, me.warp, me.lane);
  const int first = 16 * (me.warp >> 1), column = 16 * (me.duty() & 1) + me.g;
  parts.beta_a = beta_of(area, first + me.token_a), parts.beta_b = beta_of(area, first + me.token_b);
  parts.cross = load_parts(group_scratch, 4 + me.warp, me.lane);
  parts.beta_cross = beta_of(area, cross_row(me));
  parts.column_betas[0] = beta_of(area, column), parts.column_betas[1] = beta_of(area, column + 8);
  return parts;
}

// Sums the partial scores and puts them.
template <Diagonal kDiagonal>
__device__ __forceinline__ void reduce_scores(const Params& p, const ScoreParts& parts, uint32_t area, uint32_t stage,
                                              const ProducerLane& me) {
  put_diagonal<kDiagonal>(sum_parts(parts.diagonal), parts.beta_a, parts.beta_b, area, stage, me);
  put_cross(sum_parts(parts.cross), parts.beta_cross, area, stage, me);
  if (kDiagonal == Diagonal::kDyadic && me.warp == 0) {  // M's diagonal: no decay
    const int t = me.lane;
    const float scale = norm_factor(p, load_sum(area, kSumQ, t)) * norm_factor(p, load_sum(area, kSumK, t));
    put_query_score(stage + Stage::kScores + score_offset(t, t), load_sum(area, kSumQK, t) * scale);
  }
}

// The four 8x8 diagonal blocks: lane 8b + j owns column j of block b.
struct DiagonalBlock {
  float n[8][8];  // rows of N, below the diagonal
};
__device__ __forceinline__ DiagonalBlock load_diagonal_block(uint32_t area, int lane) {
  const uint32_t system = system_at(area, lane & ~7, lane & ~7);
  DiagonalBlock block;
#pragma unroll
  for (int i = 1; i < 8; ++i) {
#pragma unroll
    for (int r4 = 0; 4 * r4 < i; ++r4) {
      const float4 y = ptx::load_shared_f4(system + (i * GroupArea::kPitch + 4 * r4) * 4);
      float* n = block.n[i] + 4 * r4;
      n[0] = y.x, n[1] = y.y, n[2] = y.z, n[3] = y.w;
    }
  }
  return block;
}
// This lane's column of the block's inverse.
__device__ __forceinline__ void invert_diagonal_block(float (&x)[8], const DiagonalBlock& block, int lane) {
  const int column = lane & 7;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int r = 0; r < 8; ++r) {       // row r, now final, is taken off all rows below it
    x[r] = r < column ? 0.0f : x[r];  // selected: a later token's NaN may stand there
#pragma unroll
    for (int i = r + 1; i < 8; ++i) x[i] = fmaf(-block.n[i][r], x[r], x[i]);
  }
}
// To the warp's scratch, by columns and by rows.
__device__ __forceinline__ void put_columns(const float (&x)[8], uint32_t scratch, int lane) {
  const uint32_t mine =
      scratch + SolveArea::kColumns + (lane >> 3) * SolveArea::kBlockBytes + (lane & 7) * SolveArea::kRowBytes;
  ptx::store_shared(mine, float4{x[0], x[1], x[2], x[3]});
  ptx::store_shared(mine + 16, float4{x[4], x[5], x[6], x[7]});
}
__device__ __forceinline__ void put_rows(const float (&x)[8], uint32_t scratch, int lane) {
  const uint32_t mine = scratch + SolveArea::kRows + (lane >> 3) * SolveArea::kBlockBytes + (lane & 7) * 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) ptx::store_shared(mine + i * SolveArea::kRowBytes, x[i]);
}

constexpr float kLargest = 1e30f;  // for what must be finite

// X of two block columns: lane 4g + c has row g (a column of T) at columns 2c, 2c + 1 (rows of T), of the first in
// x[0], x[1], of the second in x[2], x[3].
struct ColumnPair {
  float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
};
// The same as an operand; a product's k are taken in the order 0, 2, 4, 6, 1, 3, 5, 7.
struct PairOperand {
  uint32_t high[4], low[4];
  __device__ explicit PairOperand(const ColumnPair& pair) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Terms t(pair.x[(i & 1) * 2 + (i >> 1)]);
      high[i] = t.high, low[i] = t.low;
    }
  }
};

// B of a product, from this lane's row g, columns 2c and 2c + 1 of an 8x8 block.
struct BlockOperand {
  Terms first, second;
  __device__ explicit BlockOperand(const float2& row) : first(row.x), second(row.y) {}
};
// sums[i] += x[i] B[i]^T, side by side: each product waits for the one before of its sum.
template <int kCount>
__device__ __forceinline__ void multiply_blocks(ColumnPair* const (&sums)[kCount],
                                                const PairOperand* const (&x)[kCount],
                                                const BlockOperand* const (&b)[kCount]) {
  const auto multiply = [&](ColumnPair& sum, const uint32_t(&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k8_tf32(sum.x, a[0], a[1], a[2], a[3], b0, b1);
  };
#pragma unroll
  for (int i = 0; i < kCount; ++i) multiply(*sums[i], x[i]->low, b[i]->first.high, b[i]->second.high);
#pragma unroll
  for (int i = 0; i < kCount; ++i) multiply(*sums[i], x[i]->high, b[i]->first.low, b[i]->second.low);
#pragma unroll
  for (int i = 0; i < kCount; ++i) multiply(*sums[i], x[i]->high, b[i]->first.high, b[i]->second.high);
}

// Where a warp finds block columns J and J + 1, for blocks b = J + 0, 1, ...: this lane's row of N_bJ, of T_bb and of
// T_bb^T, and the row of T' that it gives to a store.
struct PairPlace {
  uint32_t system, rows, columns, target;
  float beta[2];  // of its columns of T
  __device__ PairPlace(uint32_t scratch, uint32_t area, uint32_t stage, int first, const float (&betas)[2],
                       const ProducerLane& me) {
    system = system_at(area, 8 * first + me.g, 8 * first) + 8 * me.c;
    const uint32_t block = scratch + first * SolveArea::kBlockBytes + me.g * SolveArea::kRowBytes + 8 * me.c;
    rows = block + SolveArea::kRows, columns = block + SolveArea::kColumns;
    // Matrices of a store: high and low terms of J, then of J + 1.
    const int matrix = me.lane >> 3, row = me.lane & 7;
    target = stage + Stage::kSolve + first * 1024 + swizzle_128(row, (first + (matrix >> 1)) | (matrix & 1) << 2);
    // Finite, with NaN made large: a zero above the diagonal stays one, and its own row is the slow path's (N-7).
#pragma unroll
    for (int i = 0; i < 2; ++i) beta[i] = fmaxf(fminf(betas[i], kLargest), -kLargest);
  }
  // This lane's share of N_bm and of T_bb, b = J + kBelow, m = J + kColumn.
  template <int kBelow, int kColumn>
  __device__ float2 load_system() const {
    return ptx::load_shared_f2(system + kBelow * 8 * GroupArea::kPitch * 4 + kColumn * 32);
  }
  template <int kBelow>
  __device__ float2 load_row() const {
    return ptx::load_shared_f2(rows + kBelow * SolveArea::kBlockBytes);
  }
  template <int kBelow>
  __device__ float2 load_column() const {
    return ptx::load_shared_f2(columns + kBelow * SolveArea::kBlockBytes);
  }
};

// Block row J + kBelow of both columns of T' to the stage. Above the diagonal X is zero.
template <int kBelow>
__device__ __forceinline__ void store_pair(const ColumnPair& pair, const PairPlace& at) {
  uint32_t terms[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float x0 = pair.x[2 * i] * at.beta[i], x1 = pair.x[2 * i + 1] * at.beta[i];
    terms[2 * i] = ptx::pack_f16(x0, x1);
    const float2 high = ptx::unpack_f16(terms[2 * i]);
    terms[2 * i + 1] = ptx::pack_f16(x0 - high.x, x1 - high.y);
  }
  ptx::store_matrix_x4_trans(at.target + kBelow * 1024, terms[0], terms[1], terms[2], terms[3]);
}

// -X, finite: what a later token's NaN left there must not reach the rows above it through the zeros of T_bb; its own
// and later rows are the slow path's (N-7).
__device__ __forceinline__ PairOperand negated(const ColumnPair& sum) {
  ColumnPair finite;
#pragma unroll
  for (int i = 0; i < 4; ++i) finite.x[i] = fminf(fmaxf(-sum.x[i], -kLargest), kLargest);
  return PairOperand(finite);
}

// Block columns J = 0 and 1 (Duty::kSolves) or 2 and 3 (kSolvesLast) of T' to the stage, by a warp each. Of the lower
// left quarter,
//   [T_2J; T_3J] = -[T_22 0; T_32 T_33] [Y_2; Y_3],  Y_b = sum_{m < 2} N_bm T_mJ,
// the first warp makes all once the second has left T_32 in its scratch. Loads go ahead of the products, and stores
// wait until later products are under way: this chain is what a group's other warps wait for. Answers whether all
// of T' is there.
__device__ __forceinline__ bool solve_block_columns(const float (&betas)[2], uint32_t scratch, uint32_t area,
                                                    uint32_t stage, const ProducerLane& me) {
  constexpr uint32_t kPairBarrier = 8;
  const bool is_first = me.duty() == kSolves;
  const PairPlace at(scratch, area, stage, is_first ? 0 : 2, betas, me);
  const DiagonalBlock block = load_diagonal_block(area, me.lane);
  const float2 n10 = at.load_system<1, 0>();
  float2 n20 = {}, n30 = {}, n21 = {}, n31 = {};
  if (is_first) {
    n20 = at.load_system<2, 0>(), n30 = at.load_system<3, 0>();
    n21 = at.load_system<2, 1>(), n31 = at.load_system<3, 1>();
  }
  float column[8];
  invert_diagonal_block(column, block, me.lane);
  put_columns(column, scratch, me.lane);
  __syncwarp();
  const float2 diagonal = at.load_column<0>(), second = at.load_column<1>();
  put_rows(column, scratch, me.lane);
  __syncwarp();
  const BlockOperand t11(at.load_row<1>());
  ColumnPair pair, sum, sum2, sum3, next;
  pair.x[0] = diagonal.x, pair.x[1] = diagonal.y;
  const PairOperand x0(pair);
  {
    const BlockOperand b1(n10), b2(n20), b3(n30);
    multiply_blocks<3>({&sum, &sum2, &sum3}, {&x0, &x0, &x0}, {&b1, &b2, &b3});
  }
  const PairOperand y1 = negated(sum);
  multiply_blocks<1>({&next}, {&y1}, {&t11});
  store_pair<0>(pair, at);
  next.x[2] = second.x, next.x[3] = second.y;  // the second column starts here
  if (!is_first) {
    const uint32_t target = scratch - 4096 + SolveArea::kLast + 2 * me.c * SolveArea::kRowBytes + me.g * 4;
    ptx::store_shared(target, next.x[0]);
    ptx::store_shared(target + SolveArea::kRowBytes, next.x[1]);
    store_pair<1>(next, at);
    ptx::named_barrier_arrive(kPairBarrier + me.group, 64);
    return false;
  }
  const BlockOperand t22(at.load_row<2>()), t33(at.load_row<3>());
  const PairOperand x1(next);
  {
    const BlockOperand b2(n21), b3(n31);
    multiply_blocks<2>({&sum2, &sum3}, {&x1, &x1}, {&b2, &b3});
  }
  store_pair<1>(next, at);
  const PairOperand y2 = negated(sum2), y3 = negated(sum3);
  ColumnPair pair2, pair3, rest3;
  ptx::named_barrier(kPairBarrier + me.group, 64);
  const BlockOperand t32(ptx::load_shared_f2(scratch + SolveArea::kLast + me.g * SolveArea::kRowBytes + 8 * me.c));
  multiply_blocks<3>({&pair2, &pair3, &rest3}, {&y2, &y3, &y2}, {&t22, &t33, &t32});
  store_pair<2>(pair2, at);
#pragma unroll
  for (int i = 0; i < 4; ++i) pair3.x[i] += rest3.x[i];
  store_pair<3>(pair3, at);
  return true;
}

}  // namespace kda::cuda::prefill_fused

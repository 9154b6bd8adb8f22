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

// The four 8x8 diagonal blocks; lane 8b + j owns column j of block b. To the warp's scratch by rows and by columns.
__device__ __forceinline__ void invert_diagonal_blocks(uint32_t scratch, uint32_t area, int lane) {
  const int block = lane >> 3, column = lane & 7;
  const uint32_t system = system_at(area, 8 * block, 8 * block);
  const uint32_t target = scratch + block * SolveArea::kBlockBytes;
  float n[8][8], x[8];
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
  for (int i = 0; i < 8; ++i)
    ptx::store_shared(target + SolveArea::kRows + i * SolveArea::kRowBytes + column * 4, x[i]);
  const uint32_t mine = target + SolveArea::kColumns + column * SolveArea::kRowBytes;
  ptx::store_shared(mine, float4{x[0], x[1], x[2], x[3]});
  ptx::store_shared(mine + 16, float4{x[4], x[5], x[6], x[7]});
}

constexpr float kLargest = 1e30f;  // for what must be finite

// fp32 in two tf32 terms: the first cut, the second rounded.
struct Terms {
  uint32_t high, low;
  __device__ explicit Terms(float x) {
    high = __float_as_uint(x) & 0xffffe000u;
    low = ptx::round_tf32(x - __uint_as_float(high));
  }
};

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

// sum += X B^T for the 8x8 block whose row g, columns 2c and 2c + 1, lie at `row`.
__device__ __forceinline__ void multiply_block(ColumnPair& sum, const PairOperand& x, uint32_t row) {
  const float2 b = ptx::load_shared_f2(row);
  const Terms b0(b.x), b1(b.y);
  ptx::mma_m16n8k8_tf32(sum.x, x.low[0], x.low[1], x.low[2], x.low[3], b0.high, b1.high);
  ptx::mma_m16n8k8_tf32(sum.x, x.high[0], x.high[1], x.high[2], x.high[3], b0.low, b1.low);
  ptx::mma_m16n8k8_tf32(sum.x, x.high[0], x.high[1], x.high[2], x.high[3], b0.high, b1.high);
}

// Where a warp finds block columns J and J + 1, for blocks b = J + 0, 1, ...: this lane's row of N_bJ, of T_bb and of
// T_bb^T, and the row of T' that it gives to a store.
struct PairPlace {
  uint32_t system, rows, columns, target;
  float beta[2];  // of its columns of T
  __device__ PairPlace(uint32_t scratch, uint32_t area, uint32_t stage, int first, const ProducerLane& me) {
    system = system_at(area, 8 * first + me.g, 8 * first) + 8 * me.c;
    const uint32_t block = scratch + first * SolveArea::kBlockBytes + me.g * SolveArea::kRowBytes + 8 * me.c;
    rows = block + SolveArea::kRows, columns = block + SolveArea::kColumns;
    // Matrices of a store: high and low terms of J, then of J + 1.
    const int matrix = me.lane >> 3, row = me.lane & 7;
    target = stage + Stage::kSolve + first * 1024 + swizzle_128(row, (first + (matrix >> 1)) | (matrix & 1) << 2);
    // Finite, with NaN made large: a zero above the diagonal stays one, and its own row is the slow path's (N-7).
#pragma unroll
    for (int i = 0; i < 2; ++i) beta[i] = fmaxf(fminf(beta_of(area, 8 * (first + i) + me.g), kLargest), -kLargest);
  }
  static constexpr uint32_t kDown = 8 * GroupArea::kPitch * 4;  // to the next block row of N
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

// Block columns J = `first` and J + 1 of T' to the stage, J 0 or 2, by a warp each. Of the lower left quarter,
//   [T_2J; T_3J] = -[T_22 0; T_32 T_33] [Y_2; Y_3],  Y_b = sum_{m < 2} N_bm T_mJ,
// the first warp makes all once the second has left T_32 where the norms' sums were.
__device__ __forceinline__ void solve_block_columns(uint32_t scratch, uint32_t area, uint32_t stage, int first,
                                                    const ProducerLane& me) {
  constexpr uint32_t kBlock = SolveArea::kBlockBytes;
  constexpr uint32_t kPairBarrier = 8;
  invert_diagonal_blocks(scratch, area, me.lane);
  __syncwarp();
  const PairPlace at(scratch, area, stage, first, me);
  ColumnPair pair;
  const float2 diagonal = ptx::load_shared_f2(at.columns);
  pair.x[0] = diagonal.x, pair.x[1] = diagonal.y;
  store_pair<0>(pair, at);
  const PairOperand x0(pair);
  ColumnPair sum, next;
  multiply_block(sum, x0, at.system + PairPlace::kDown);
  multiply_block(next, negated(sum), at.rows + kBlock);
  const float2 second = ptx::load_shared_f2(at.columns + kBlock);  // the second column starts here
  next.x[2] = second.x, next.x[3] = second.y;
  store_pair<1>(next, at);
  const uint32_t quarter = area + GroupArea::kSums;  // T_32 by rows
  ColumnPair pair3, sum2;
  if (first != 0) {
    const uint32_t target = quarter + 2 * me.c * SolveArea::kRowBytes + me.g * 4;
    ptx::store_shared(target, next.x[0]);
    ptx::store_shared(target + SolveArea::kRowBytes, next.x[1]);
  } else {
    const PairOperand x1(next);
    ColumnPair sum3, pair2;
    multiply_block(sum2, x0, at.system + 2 * PairPlace::kDown);
    multiply_block(sum3, x0, at.system + 3 * PairPlace::kDown);
    multiply_block(sum2, x1, at.system + 2 * PairPlace::kDown + 32);
    multiply_block(sum3, x1, at.system + 3 * PairPlace::kDown + 32);
    multiply_block(pair2, negated(sum2), at.rows + 2 * kBlock);
    multiply_block(pair3, negated(sum3), at.rows + 3 * kBlock);
    store_pair<2>(pair2, at);
  }
  ptx::named_barrier(kPairBarrier + me.group, 64);
  if (first != 0) return;
  multiply_block(pair3, negated(sum2), quarter + me.g * SolveArea::kRowBytes + 8 * me.c);
  store_pair<3>(pair3, at);
}

}  // namespace kda::cuda::prefill_fused

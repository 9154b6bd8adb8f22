// Producer warps, second half of an item: operands with their decay factors, partial scores.
//
// Factors (in-block prefix sums P, block totals B0, B1; f(x, y) = 2^-|x - y|, every exponent <= 0, H-2):
//   level b of the dyadic diagonal (H-5a)  f(P_t, P_m) with m the last token before the upper half of t's pair of
//                                          b-token groups: the row factor for t > m, the column factor for t <= m
//   off-diagonal (H-4)   rows of block 1: 2^P_t; columns of block 0: f(B0, P_t)
//   K~, Q~               2^P_t (block 0), 2^P_t * 2^B0 (block 1)
//   K^                   f(B0, P_t) * 2^B1 (block 0), f(B1, P_t) (block 1)
// All products in fp32, one rounding to fp16 (N-3, N-6); K^ in two terms.
#pragma once

#include "cuda/kernels/prefill_fused/prepare_rows.cuh"
#include "cuda/ptx/mma.h"

namespace kda::cuda::prefill_fused {

struct Quad {
  float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
};

__device__ __forceinline__ float decay_between(float x, float y) { return ptx::exp2_approx(-fabsf(x - y)); }

__device__ __forceinline__ void unpack_scaled(float (&x)[4], uint32_t lo, uint32_t hi, float factor) {
  x[0] = ptx::bf16_low(lo) * factor;
  x[1] = ptx::bf16_high(lo) * factor;
  x[2] = ptx::bf16_low(hi) * factor;
  x[3] = ptx::bf16_high(hi) * factor;
}

struct Packed {
  uint32_t lo, hi;  // four channels in fp16
};

__device__ __forceinline__ Packed pack_product(const float (&x)[4], const float (&f)[4]) {
  return {ptx::pack_f16(x[0] * f[0], x[1] * f[1]), ptx::pack_f16(x[2] * f[2], x[3] * f[3])};
}
__device__ __forceinline__ Packed pack_four(const float (&x)[4]) {
  return {ptx::pack_f16(x[0], x[1]), ptx::pack_f16(x[2], x[3])};
}

// hi + lo of four values.
__device__ __forceinline__ void pack_two_terms(const float (&x)[4], Packed& high, Packed& low) {
  high = pack_four(x);
  const float2 a = ptx::unpack_f16(high.lo), b = ptx::unpack_f16(high.hi);
  low = {ptx::pack_f16(x[0] - a.x, x[1] - a.y), ptx::pack_f16(x[2] - b.x, x[3] - b.y)};
}

__device__ __forceinline__ void load_prefix4(float (&x)[4], uint32_t address) {
  const float4 y = ptx::load_shared_f4(address);
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

// Addresses of prefix rows of this lane's channels (16-byte column 2c) in a block, 0 at first; block 1 lies 2048
// bytes on. The swizzle only decides which half of 32 bytes k-step 0 is: a row with bit 2 set holds it second.
struct PrefixView {
  uint32_t column;          // row 0 without swizzle
  uint32_t a, b;            // own rows
  uint32_t a2, b2, a1, b1;  // anchors of levels 2 and 1
  __device__ PrefixView(uint32_t scratch, const ProducerLane& me) {
    column = scratch + 2 * me.c * 16;
    a = scratch + prefix_offset(me.token_a, 2 * me.c);
    b = scratch + prefix_offset(me.token_b, 2 * me.c);
    a2 = scratch + prefix_offset((me.token_a & ~3) + 1, 2 * me.c);
    b2 = scratch + prefix_offset((me.token_b & ~3) + 1, 2 * me.c);
    a1 = scratch + prefix_offset(me.token_a & ~1, 2 * me.c);
    b1 = scratch + prefix_offset(me.token_b & ~1, 2 * me.c);
  }
  __device__ void to_next_block() {
    for (uint32_t* x : {&column, &a, &b, &a2, &b2, &a1, &b1}) *x += 2048;
  }
  // Row `kRow` of the block, k-step kStep.
  template <int kRow, int kStep>
  __device__ uint32_t fixed() const {
    return column + kRow * 128 + (kStep ^ ((kRow >> 2) & 1)) * 16;
  }
  template <int kStep>
  __device__ static uint32_t at(uint32_t row) {
    return kStep == 0 ? row : row ^ 16;
  }
};

__device__ __forceinline__ void decays4(float (&f)[4], const float (&x)[4], const float (&y)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) f[i] = decay_between(x[i], y[i]);
}

// Four channels (k-step) of both tokens of a lane.
struct Step {
  float ka[4], kb[4], qa[4], qb[4];  // normalised
  float pa[4], pb[4];                // prefix sums
};

__device__ __forceinline__ void multiply_rows(Quad& d, const Packed& k, const Packed& q, const Packed& columns) {
  ptx::mma_m16n8k16(d.x, k.lo, q.lo, k.hi, q.hi, columns.lo, columns.hi);
}

// A level below 8: the a tokens of all lanes among themselves, and the b tokens.
__device__ __forceinline__ void accumulate_level(Quad& da, Quad& db, const Step& s, uint32_t anchor_a,
                                                 uint32_t anchor_b) {
  float anchor[4], f[4];
  load_prefix4(anchor, anchor_a);
  decays4(f, s.pa, anchor);
  const Packed ka = pack_product(s.ka, f);
  multiply_rows(da, ka, pack_product(s.qa, f), ka);
  load_prefix4(anchor, anchor_b);
  decays4(f, s.pb, anchor);
  const Packed kb = pack_product(s.kb, f);
  multiply_rows(db, kb, pack_product(s.qb, f), kb);
}

struct Levels {
  Quad a4, b4, a2, b2, a1, b1;
};

template <int kStep>
__device__ __forceinline__ void accumulate_diagonal(Quad& top, Levels& levels, const Step& s,
                                                    const PrefixView& view) {
  float anchor[4], f[4];
  load_prefix4(anchor, view.fixed<7, kStep>());
  decays4(f, s.pa, anchor);
  const Packed columns = pack_product(s.ka, f);
  decays4(f, s.pb, anchor);
  multiply_rows(top, pack_product(s.kb, f), pack_product(s.qb, f), columns);
  accumulate_level(levels.a4, levels.b4, s, view.fixed<3, kStep>(), view.fixed<11, kStep>());
  accumulate_level(levels.a2, levels.b2, s, view.at<kStep>(view.a2), view.at<kStep>(view.b2));
  accumulate_level(levels.a1, levels.b1, s, view.at<kStep>(view.a1), view.at<kStep>(view.b1));
}

// Rows g, columns 2c + e (as lane positions): the highest bit in which their a tokens differ is the level; the row
// has that bit set in token a or in token b, and the column is the same kind of token.
__device__ __forceinline__ Quad merge_levels(const Levels& levels, const ProducerLane& me) {
  Quad merged;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int differ = me.token_a ^ ((e << 2) | me.c);
    const bool is4 = (differ & 4) != 0, is2 = (differ & 2) != 0;
    const bool use_a = (me.token_a & (is4 ? 4 : (is2 ? 2 : 1))) != 0;
#pragma unroll
    for (int i = e; i < 4; i += 2) {
      const float a = is4 ? levels.a4.x[i] : (is2 ? levels.a2.x[i] : levels.a1.x[i]);
      const float b = is4 ? levels.b4.x[i] : (is2 ? levels.b2.x[i] : levels.b1.x[i]);
      merged.x[i] = use_a ? a : b;
    }
  }
  return merged;
}

// 16 bytes (8 channels) of each operand for one token.
struct OperandRow {
  Packed key[2], query[2], high[2], low[2];  // [k-step]
};

__device__ __forceinline__ void store_operands(const OperandRow& row, uint32_t at) {
  auto put = [&](uint32_t part, const Packed(&x)[2]) {
    ptx::store_shared(at + part, uint4{x[0].lo, x[0].hi, x[1].lo, x[1].hi});
  };
  put(Stage::kKeys, row.key);
  put(Stage::kQueries, row.query);
  put(Stage::kUpdateHigh, row.high);
  put(Stage::kUpdateLow, row.low);
}

// Where this lane's 16 bytes of block 0 lie in an operand; block 1 lies 2048 bytes on.
__device__ __forceinline__ uint32_t operand_offset(int token, const ProducerLane& me) {
  return (me.warp >> 1) * Stage::kHalf + swizzle_128(token, (me.warp & 1) * 4 + me.c);
}

struct Norms {
  float qa, qb, ka, kb;
};

template <int kStep>
__device__ __forceinline__ void diagonal_step(Quad& top, Levels& levels, const uint4 (&q)[2], const uint4 (&k)[2],
                                              const Norms& norms, const PrefixView& view) {
  Step s;
  unpack_scaled(s.qa, kStep == 0 ? q[0].x : q[0].z, kStep == 0 ? q[0].y : q[0].w, norms.qa);
  unpack_scaled(s.qb, kStep == 0 ? q[1].x : q[1].z, kStep == 0 ? q[1].y : q[1].w, norms.qb);
  unpack_scaled(s.ka, kStep == 0 ? k[0].x : k[0].z, kStep == 0 ? k[0].y : k[0].w, norms.ka);
  unpack_scaled(s.kb, kStep == 0 ? k[1].x : k[1].z, kStep == 0 ? k[1].y : k[1].w, norms.kb);
  load_prefix4(s.pa, view.at<kStep>(view.a));
  load_prefix4(s.pb, view.at<kStep>(view.b));
  accumulate_diagonal<kStep>(top, levels, s, view);
}

// Two quads of partial scores of a block.
__device__ __forceinline__ void diagonal_scores(Quad& top, Quad& lower, const uint4 (&q)[2], const uint4 (&k)[2],
                                                const Norms& norms, const PrefixView& view, const ProducerLane& me) {
  Levels levels;
  diagonal_step<0>(top, levels, q, k, norms, view);
  __syncwarp();  // keeps the second step's loads out of the first: registers
  diagonal_step<1>(top, levels, q, k, norms, view);
  lower = merge_levels(levels, me);
}

// What the off-diagonal block takes from a block's tokens: column operands (block 0) or k rows (block 1).
struct Edges {
  Packed a[2], b[2];  // [k-step]
};

// Chunk-level operands of one token and k-step.
template <int kStep>
__device__ __forceinline__ void chunk_operands(OperandRow& row, Packed& k_edge, Packed& q_edge, const uint4& raw_q,
                                               const uint4& raw_k, float q_norm, float k_norm, uint32_t prefix_row,
                                               const PrefixView& view, uint32_t other_total, int block) {
  float q[4], k[4], prefix[4], own[4], other[4];
  unpack_scaled(q, kStep == 0 ? raw_q.x : raw_q.z, kStep == 0 ? raw_q.y : raw_q.w, q_norm);
  unpack_scaled(k, kStep == 0 ? raw_k.x : raw_k.z, kStep == 0 ? raw_k.y : raw_k.w, k_norm);
  load_prefix4(prefix, view.at<kStep>(prefix_row));
  load_prefix4(own, view.fixed<15, kStep>());
  load_prefix4(other, kStep == 0 ? other_total : other_total ^ 16);
  float key[4], query[4], update[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float rise = ptx::exp2_approx(prefix[i]);
    key[i] = k[i] * rise;
    query[i] = q[i] * rise;
    update[i] = k[i] * decay_between(own[i], prefix[i]);
    other[i] = ptx::exp2_approx(other[i]);
  }
  if (block == 0) {
    k_edge = pack_four(update);
#pragma unroll
    for (int i = 0; i < 4; ++i) update[i] *= other[i];
  } else {
    k_edge = pack_four(key);
    q_edge = pack_four(query);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      key[i] *= other[i];
      query[i] *= other[i];
    }
  }
  row.key[kStep] = pack_four(key);
  row.query[kStep] = pack_four(query);
  pack_two_terms(update, row.high[kStep], row.low[kStep]);
}

__device__ __forceinline__ void cross_scores(Quad (&cross)[4], const Edges& columns, const Edges& k, const Edges& q) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    multiply_rows(cross[0], k.a[step], q.a[step], columns.a[step]);
    multiply_rows(cross[1], k.a[step], q.a[step], columns.b[step]);
    multiply_rows(cross[2], k.b[step], q.b[step], columns.a[step]);
    multiply_rows(cross[3], k.b[step], q.b[step], columns.b[step]);
  }
}

// A quad of partial scores to this warp's scratch (`quads`: that plus 16 bytes a lane). Quads: block 0 level 8 and
// lower levels, block 1 the same (x[e]: k row g, column 2c + e; x[2 + e]: q row), then block 1 x block 0 as (rows a,
// columns a), (a, b), (b, a), (b, b).
__device__ __forceinline__ void write_quad(const Quad& q, int quad, uint32_t quads) {
  ptx::store_shared(quads + quad * 512, float4{q.x[0], q.x[1], q.x[2], q.x[3]});
}

// Sums of squares of this lane's tokens.
struct NormView {
  uint32_t a, b;
  __device__ NormView(uint32_t area, const ProducerLane& me)
      : a(area + GroupArea::kSums + me.token_a * 16), b(area + GroupArea::kSums + me.token_b * 16) {}
  template <int kBlock>
  __device__ Norms load(const Params& p) const {
    const auto factor = [&](uint32_t at, int kind) {
      const float4 x = ptx::load_shared_f4(at + kind * 512 + kBlock * 256);
      return norm_factor(p, (x.x + x.y) + (x.z + x.w));
    };
    return {factor(a, kSumQ), factor(b, kSumQ), factor(a, kSumK), factor(b, kSumK)};
  }
  __device__ void to_next_block() { a += 256, b += 256; }
};

// Both blocks of an item: operands to the stage, partial scores to the warp's scratch.
__device__ __forceinline__ void build_dyadic(const RawRows& raw, const Params& p, const ProducerLane& me,
                                             uint32_t scratch, uint32_t area, uint32_t stage) {
  PrefixView view(scratch, me);
  NormView sums(area, me);
  uint32_t quads = scratch + me.lane * 16;
  const uint32_t total0 = view.fixed<15, 0>(), total1 = total0 + 2048;
  uint32_t at_a = stage + operand_offset(me.token_a, me), at_b = stage + operand_offset(me.token_b, me);
  uint4 q[2] = {raw.q[0][0][0], raw.q[0][1][0]}, k[2] = {raw.k[0][0][0], raw.k[0][1][0]};
  Edges columns, k_edges, q_edges;
#pragma unroll 1
  for (int block = 0; block < 2; ++block) {
    const Norms norms = sums.load<0>(p);
    sums.to_next_block();
    const uint32_t other = block == 0 ? total1 : total0;
    Quad top, lower;
    diagonal_scores(top, lower, q, k, norms, view, me);
    OperandRow row;
    chunk_operands<0>(row, k_edges.a[0], q_edges.a[0], q[0], k[0], norms.qa, norms.ka, view.a, view, other, block);
    chunk_operands<1>(row, k_edges.a[1], q_edges.a[1], q[0], k[0], norms.qa, norms.ka, view.a, view, other, block);
    store_operands(row, at_a);
    chunk_operands<0>(row, k_edges.b[0], q_edges.b[0], q[1], k[1], norms.qb, norms.kb, view.b, view, other, block);
    chunk_operands<1>(row, k_edges.b[1], q_edges.b[1], q[1], k[1], norms.qb, norms.kb, view.b, view, other, block);
    store_operands(row, at_b);
    __syncwarp();  // block 0: prefix rows 0..7 are read no more; block 1: none is
    write_quad(top, 0, quads);
    write_quad(lower, 1, quads);
    quads += 1024;
    if (block == 0) columns = k_edges;
    q[0] = raw.q[1][0][0], q[1] = raw.q[1][1][0], k[0] = raw.k[1][0][0], k[1] = raw.k[1][1][0];
    view.to_next_block();
    at_a += 2048, at_b += 2048;
  }
  Quad cross[4];
  cross_scores(cross, columns, k_edges, q_edges);
#pragma unroll
  for (int i = 0; i < 4; ++i) write_quad(cross[i], i, quads);
}

}  // namespace kda::cuda::prefill_fused

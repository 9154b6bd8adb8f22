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

// Addresses of prefix rows of this lane's channels (16-byte column 2c) in a block and k-step, those of block 0 and
// k-step 0 at first; block 1 lies 2048 bytes on. The swizzle only decides which half of 32 bytes a k-step is: a row
// with bit 2 set holds k-step 0 second.
struct PrefixView {
  uint32_t low, high;       // row 0 of the block as rows with bit 2 clear and with bit 2 set hold their columns
  uint32_t a, b;            // own rows
  uint32_t a2, b2, a1, b1;  // anchors of levels 2 and 1
  __device__ PrefixView(uint32_t scratch, const ProducerLane& me) {
    low = scratch + 2 * me.c * 16, high = low + 16;
    a = scratch + prefix_offset(me.token_a, 2 * me.c);
    b = scratch + prefix_offset(me.token_b, 2 * me.c);
    a2 = scratch + prefix_offset((me.token_a & ~3) + 1, 2 * me.c);
    b2 = scratch + prefix_offset((me.token_b & ~3) + 1, 2 * me.c);
    a1 = scratch + prefix_offset(me.token_a & ~1, 2 * me.c);
    b1 = scratch + prefix_offset(me.token_b & ~1, 2 * me.c);
  }
  // To k-step 1, or from there to k-step 0 of block 1.
  __device__ void to_next(int step) {
    const uint32_t rows = step == 0 ? 0 : 2048;
    for (uint32_t* x : {&low, &high, &a, &b, &a2, &b2, &a1, &b1}) *x = (*x ^ 16) + rows;
  }
  template <int kRow>
  __device__ uint32_t fixed() const {
    return ((kRow & 4) == 0 ? low : high) + kRow * 128;
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

__device__ __forceinline__ void accumulate_diagonal(Quad& top, Levels& levels, const Step& s,
                                                    const PrefixView& view) {
  float anchor[4], f[4];
  load_prefix4(anchor, view.fixed<7>());
  decays4(f, s.pa, anchor);
  const Packed columns = pack_product(s.ka, f);
  decays4(f, s.pb, anchor);
  multiply_rows(top, pack_product(s.kb, f), pack_product(s.qb, f), columns);
  accumulate_level(levels.a4, levels.b4, s, view.fixed<3>(), view.fixed<11>());
  accumulate_level(levels.a2, levels.b2, s, view.a2, view.b2);
  accumulate_level(levels.a1, levels.b1, s, view.a1, view.b1);
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

// A token's chunk operands of one k-step, four channels: K~, Q~ and the two terms of K^.
struct TokenOperands {
  Packed key, query, high, low;
};

// Where the operands of a stage go, a k-step's to byte `at` of each: to shared memory at once,
struct SharedSink {
  uint32_t stage;
  template <int kSide>
  __device__ void put(uint32_t at, int, const TokenOperands& x) {
    const auto store = [&](uint32_t part, const Packed& y) {
      ptx::store_shared(stage + part + at, uint2{y.lo, y.hi});
    };
    store(Stage::kKeys, x.key);
    store(Stage::kQueries, x.query);
    store(Stage::kUpdateHigh, x.high);
    store(Stage::kUpdateLow, x.low);
  }
};
// or to memory, 16 bytes of two k-steps at a time.
struct PairedSink {
  char* stage;
  TokenOperands held[2];
  template <int kSide>
  __device__ void put(uint32_t at, int step, const TokenOperands& x) {
    const TokenOperands first = held[kSide];
    held[kSide] = x;
    if (step == 0) return;
    const auto store = [&](uint32_t part, const Packed& y, const Packed& z) {
      *reinterpret_cast<uint4*>(stage + part + (at ^ 8)) = uint4{y.lo, y.hi, z.lo, z.hi};
    };
    store(Stage::kKeys, first.key, x.key);
    store(Stage::kQueries, first.query, x.query);
    store(Stage::kUpdateHigh, first.high, x.high);
    store(Stage::kUpdateLow, first.low, x.low);
  }
};

// Where this lane's 16 bytes of block 0 lie in an operand; block 1 lies 2048 bytes on.
__device__ __forceinline__ uint32_t operand_offset(int token, const ProducerLane& me) {
  return (me.warp >> 1) * Stage::kHalf + swizzle_128(token, (me.warp & 1) * 4 + me.c);
}

struct Norms {
  float qa, qb, ka, kb;
};

// Raw rows of a k-step: [q of token a, of token b, k of a, of b], four channels.
struct StepRows {
  uint2 x[4];
};
__device__ __forceinline__ StepRows step_rows(const RawRows& raw, int block, int step) {
  const uint4 rows[4] = {raw.q[block][0][0], raw.q[block][1][0], raw.k[block][0][0], raw.k[block][1][0]};
  StepRows s;
#pragma unroll
  for (int i = 0; i < 4; ++i) s.x[i] = step == 0 ? uint2{rows[i].x, rows[i].y} : uint2{rows[i].z, rows[i].w};
  return s;
}

// What the off-diagonal block takes from a token: a column (block 0), or a k and a q row (block 1).
struct Edge {
  Packed k, q;
};

// Chunk-level operands of one token and k-step. own: log2 total of the block; other: 2^total of the other.
__device__ __forceinline__ TokenOperands chunk_operands(Edge& edge, const float (&q)[4], const float (&k)[4],
                                                        const float (&prefix)[4], const float (&own)[4],
                                                        const float (&other)[4], int block) {
  float key[4], query[4], update[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float rise = ptx::exp2_approx(prefix[i]);
    key[i] = k[i] * rise;
    query[i] = q[i] * rise;
    update[i] = k[i] * decay_between(own[i], prefix[i]);
  }
  edge.q = pack_four(query);
  if (block == 0) {
    edge.k = pack_four(update);
#pragma unroll
    for (int i = 0; i < 4; ++i) update[i] *= other[i];
  } else {
    edge.k = pack_four(key);
#pragma unroll
    for (int i = 0; i < 4; ++i) key[i] *= other[i], query[i] *= other[i];
  }
  TokenOperands operands = {pack_four(key), pack_four(query), {}, {}};
  pack_two_terms(update, operands.high, operands.low);
  return operands;
}

// A quad of partial scores to this warp's scratch (`quads`: that plus 16 bytes a lane). Quads: block 0 level 8 and
// lower levels, block 1 the same (x[e]: k row g, column 2c + e; x[2 + e]: q row), then block 1 x block 0 as (rows a,
// columns a), (a, b), (b, a), (b, b).
__device__ __forceinline__ void write_quad(const Quad& q, int quad, uint32_t quads) {
  ptx::store_shared(quads + quad * 512, float4{q.x[0], q.x[1], q.x[2], q.x[3]});
}

// Norm factors of all tokens, {q, k} each, to the warp's part of the system's place, which is free until scores are
// summed: a lane makes those of one token. A __syncwarp must follow.
__device__ __forceinline__ void write_norms(bool normalize, uint32_t area, const ProducerLane& me) {
  ptx::store_shared(area + GroupArea::kNorms + me.warp * 256 + me.lane * 8,
                    float2{norm_factor(normalize, load_sum(area, kSumQ, me.lane)),
                           norm_factor(normalize, load_sum(area, kSumK, me.lane))});
}

// Those of this lane's tokens.
struct NormView {
  uint32_t a, b;
  __device__ NormView(uint32_t area, const ProducerLane& me)
      : a(area + GroupArea::kNorms + me.warp * 256 + me.token_a * 8), b(a + (me.token_b - me.token_a) * 8) {}
  __device__ float2 load_a() const { return ptx::load_shared_f2(a); }
  __device__ float2 load_b() const { return ptx::load_shared_f2(b); }
  __device__ Norms load() const {
    const float2 x = load_a(), y = load_b();
    return {x.x, y.x, x.y, y.y};
  }
  __device__ void to_next_block() { a += 128, b += 128; }
};

// Columns of the off-diagonal block, a queue of two k-steps: block 0 fills it, block 1 empties it.
struct DyadicEdges {
  Packed a[2] = {}, b[2] = {};
};

// A k-step of a block: its share of the scores, its operands.
template <class Sink>
__device__ __forceinline__ void dyadic_step(Quad& top, Levels& levels, Quad (&cross)[4], DyadicEdges& columns,
                                            const StepRows& raw, const Norms& norms, const PrefixView& view,
                                            uint32_t other_total, uint32_t at_a, uint32_t at_b, int block, int step,
                                            Sink& sink) {
  Step s;
  unpack_scaled(s.qa, raw.x[0].x, raw.x[0].y, norms.qa);
  unpack_scaled(s.qb, raw.x[1].x, raw.x[1].y, norms.qb);
  unpack_scaled(s.ka, raw.x[2].x, raw.x[2].y, norms.ka);
  unpack_scaled(s.kb, raw.x[3].x, raw.x[3].y, norms.kb);
  load_prefix4(s.pa, view.a);
  load_prefix4(s.pb, view.b);
  accumulate_diagonal(top, levels, s, view);
  float own[4], other[4];
  load_prefix4(own, view.fixed<15>());
  load_prefix4(other, other_total);
  Edge a, b;
  sink.template put<0>(at_a + step * 8, step, chunk_operands(a, s.qa, s.ka, s.pa, own, other, block));
  sink.template put<1>(at_b + step * 8, step, chunk_operands(b, s.qb, s.kb, s.pb, own, other, block));
  if (block == 1) {
    multiply_rows(cross[0], a.k, a.q, columns.a[0]);
    multiply_rows(cross[1], a.k, a.q, columns.b[0]);
    multiply_rows(cross[2], b.k, b.q, columns.a[0]);
    multiply_rows(cross[3], b.k, b.q, columns.b[0]);
  }
  columns.a[0] = columns.a[1], columns.b[0] = columns.b[1];
  columns.a[1] = a.k, columns.b[1] = b.k;
}

// Both blocks of an item: operands to the sink, partial scores to the warp's scratch. kUnroll 1, one rolled loop over
// the four k-steps, beside the consumers' code: copies of its body would not stay in the instruction cache.
template <int kUnroll, class Sink>
__device__ __forceinline__ void build_dyadic(const RawRows& raw, const ProducerLane& me, uint32_t scratch,
                                             uint32_t area, Sink sink) {
  PrefixView view(scratch, me);
  NormView sums(area, me);
  uint32_t quads = scratch + me.lane * 16;
  uint32_t at_a = operand_offset(me.token_a, me), at_b = operand_offset(me.token_b, me);
  const uint32_t totals = area + GroupArea::kTotals + me.warp * ChannelTotals::kBytes + me.c * 32;
  Quad top, cross[4];
  Levels levels;
  DyadicEdges columns;
  StepRows rows = step_rows(raw, 0, 0);
  Norms norms = sums.load();
#pragma unroll kUnroll
  for (int it = 0; it < 4; ++it) {
    const int block = it >> 1, step = it & 1;
    dyadic_step(top, levels, cross, columns, rows, norms, view,
                totals + (block == 0 ? ChannelTotals::kAfter1 : ChannelTotals::kBefore) + step * 16, at_a, at_b,
                block, step, sink);
    view.to_next(step);
    at_a += step * 2048, at_b += step * 2048;
    if (step == 0) {
      const StepRows first = step_rows(raw, 0, 1), second = step_rows(raw, 1, 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) rows.x[i] = block == 0 ? first.x[i] : second.x[i];
      continue;
    }
    __syncwarp();  // block 0: prefix rows 0..7 are read no more; block 1: none is
    write_quad(top, 0, quads);
    write_quad(merge_levels(levels, me), 1, quads);
    quads += 1024;
    top = Quad();
    levels = Levels();
    if (it == 3) break;
    rows = step_rows(raw, 1, 0);
    sums.to_next_block();
    norms = sums.load();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) write_quad(cross[i], i, quads);
}

}  // namespace kda::cuda::prefill_fused

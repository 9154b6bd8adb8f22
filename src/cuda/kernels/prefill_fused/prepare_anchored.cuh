// The second half of an item for bounded gates: diagonal blocks anchored at their first row (H-5b), tf32 operands.
//
// Rows 2^P_t q, 2^P_t k, columns 2^-P_t k, 0 >= P_t >= -120: every row and column factor lies in its past. H-5b's two
// halves of 2^c, which keep flushed rows away, are left out: neither these multiplications nor the tensor cores flush
// subnormals, and tf32's reach down to 2^-136, so that a row's rounding adds at most 2^-17 (2^-21 at a bound of -5)
// of its token's largest factor to an entry of A or M, below what tf32 and fp16 round off anyway. Keys are of length
// 1 at most (diagonal_for), so columns stay finite. The off-diagonal block reuses the rows with columns f(B0, P_t) of
// block 0. K~, Q~ are the rows, in block 1 times 2^B0. Rounded once each (N-3).
#pragma once

#include "cuda/kernels/prefill_fused/prepare_operands.cuh"

namespace kda::cuda::prefill_fused {

// tf32 operands of one token, four channels.
struct AnchoredRow {
  uint32_t k[4], q[4], column[4];
};

// Four channels of one token: tf32 operands, `edge` (block 0: column of the off-diagonal block), stage operands.
// `before` is 2^B0, `after` brings columns to the chunk's end.
__device__ __forceinline__ TokenOperands anchored_token(AnchoredRow& rows, uint32_t (&edge)[4], uint2 raw_q,
                                                        uint2 raw_k, float q_norm, float k_norm,
                                                        const float (&prefix)[4], const float (&before)[4],
                                                        const float (&after)[4], int block) {
  float q[4], k[4];
  unpack_scaled(q, raw_q.x, raw_q.y, q_norm);
  unpack_scaled(k, raw_k.x, raw_k.y, k_norm);
  float key[4], query[4], update[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float up = ptx::exp2_approx(prefix[i]);
    key[i] = k[i] * up;
    query[i] = q[i] * up;
    update[i] = k[i] * ptx::reciprocal_approx(up);
    rows.k[i] = ptx::round_tf32(key[i]);
    rows.q[i] = ptx::round_tf32(query[i]);
    rows.column[i] = ptx::round_tf32(update[i]);
  }
  if (block == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) edge[i] = ptx::round_tf32(update[i] * before[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) key[i] *= before[i], query[i] *= before[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) update[i] *= after[i];
  TokenOperands operands = {pack_four(key), pack_four(query), {}, {}};
  pack_two_terms(update, operands.high, operands.low);
  return operands;
}

__device__ __forceinline__ void multiply_anchored(Quad& d, const AnchoredRow& rows, const uint32_t (&column)[4],
                                                  int i) {
  ptx::mma_m16n8k8_tf32(d.x, rows.k[i], rows.q[i], rows.k[i + 1], rows.q[i + 1], column[i], column[i + 1]);
}

struct AnchoredScores {
  Quad top, aa, bb, cross[4];
};

// Columns of the off-diagonal block. Block 0 makes `last`, block 1 takes `first`; between the k-steps of either the
// last become the first.
struct AnchoredEdges {
  uint32_t first_a[4] = {}, first_b[4] = {}, last_a[4] = {}, last_b[4] = {};
  __device__ void to_second_step() {
#pragma unroll
    for (int i = 0; i < 4; ++i) first_a[i] = last_a[i], first_b[i] = last_b[i];
  }
};

// Where a lane reads and writes.
struct AnchoredPlace {
  uint32_t row_a, row_b, at_a, before, after;
  __device__ uint32_t at_b() const { return at_a ^ 0x7f0; }  // token b is 15 - token a: row and swizzle, all bits
  // To a block's other k-step: the swizzle decides which half of 32 bytes of a prefix row that is.
  __device__ void to_other_step() { row_a ^= 16, row_b ^= 16, before ^= 16, after ^= 16, at_a ^= 8; }
  __device__ void to_next_block() {
    row_a += 2048, row_b += 2048, at_a += 2048;
    after += ChannelTotals::kAfter1 - ChannelTotals::kAfter;
  }
};

// A k-step of a block: its share of the scores, its operands.
template <class Sink>
__device__ __forceinline__ void anchored_step(AnchoredScores& scores, AnchoredEdges& edges, const StepRows& raw,
                                              const Norms& norms, const AnchoredPlace& place, int block, int step,
                                              Sink& sink) {
  float prefix_a[4], prefix_b[4], before[4], after[4];
  load_prefix4(prefix_a, place.row_a);
  load_prefix4(prefix_b, place.row_b);
  load_prefix4(before, place.before);
  load_prefix4(after, place.after);
  AnchoredRow a;
  sink.template put<0>(
      place.at_a, step,
      anchored_token(a, edges.last_a, raw.x[0], raw.x[2], norms.qa, norms.ka, prefix_a, before, after, block));
  // All products of a's rows before b's are made: registers are short.
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    multiply_anchored(scores.aa, a, a.column, i);
    if (block == 0) continue;
    multiply_anchored(scores.cross[0], a, edges.first_a, i);
    multiply_anchored(scores.cross[1], a, edges.first_b, i);
  }
  AnchoredRow b;
  sink.template put<1>(
      place.at_b(), step,
      anchored_token(b, edges.last_b, raw.x[1], raw.x[3], norms.qb, norms.kb, prefix_b, before, after, block));
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    multiply_anchored(scores.top, b, a.column, i);
    multiply_anchored(scores.bb, b, b.column, i);
    if (block == 0) continue;
    multiply_anchored(scores.cross[2], b, edges.first_a, i);
    multiply_anchored(scores.cross[3], b, edges.first_b, i);
  }
}

// Position (row g, column 2c + e) of the a tokens holds the lower triangle, that of the b tokens mirrored is free:
// one quad takes both. On the mirror line x[e], x[2 + e] are M's diagonal for tokens a and b.
__device__ __forceinline__ Quad merge_anchored(const Quad& aa, const Quad& bb, const ProducerLane& me) {
  Quad merged;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int column_a = (e << 2) | me.c;
    const bool use_a = me.token_a > column_a;
    merged.x[e] = me.token_a == column_a ? aa.x[2 + e] : (use_a ? aa.x[e] : bb.x[e]);
    merged.x[2 + e] = use_a ? aa.x[2 + e] : bb.x[2 + e];
  }
  return merged;
}

// Both blocks of an item: operands to the sink, partial scores to the warp's scratch. kUnroll 1, one rolled loop over
// the four k-steps, beside the consumers' code: copies of its body would not stay in the instruction cache.
template <int kUnroll, class Sink>
__device__ __forceinline__ void build_anchored(const RawRows& raw, const ProducerLane& me, uint32_t scratch,
                                               uint32_t area, Sink sink) {
  AnchoredPlace place;
  place.row_a = scratch + prefix_offset(me.token_a, 2 * me.c);
  place.row_b = scratch + prefix_offset(me.token_b, 2 * me.c);
  place.at_a = operand_offset(me.token_a, me);
  const uint32_t totals = area + GroupArea::kTotals + me.warp * ChannelTotals::kBytes + me.c * 32;
  place.before = totals + ChannelTotals::kBefore, place.after = totals + ChannelTotals::kAfter;
  NormView view(area, me);
  uint32_t quads = scratch + me.lane * 16;
  AnchoredScores scores;
  AnchoredEdges edges;
  StepRows rows = step_rows(raw, 0, 0);
  Norms norms = view.load();
#pragma unroll kUnroll
  for (int it = 0; it < 4; ++it) {
    const int block = it >> 1, step = it & 1;
    anchored_step(scores, edges, rows, norms, place, block, step, sink);
    place.to_other_step();
    if (step == 0) {
      edges.to_second_step();
      const StepRows first = step_rows(raw, 0, 1), second = step_rows(raw, 1, 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) rows.x[i] = block == 0 ? first.x[i] : second.x[i];
      continue;
    }
    __syncwarp();  // block 0: prefix rows 0..7 are read no more; block 1: none is
    write_quad(scores.top, 0, quads);
    write_quad(merge_anchored(scores.aa, scores.bb, me), 1, quads);
    quads += 1024;
    if (it == 3) break;
    scores.top = scores.aa = scores.bb = Quad();
    rows = step_rows(raw, 1, 0);
    place.to_next_block();
    view.to_next_block();
    norms = view.load();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) write_quad(scores.cross[i], i, quads);
}

}  // namespace kda::cuda::prefill_fused

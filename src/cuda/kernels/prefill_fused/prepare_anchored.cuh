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
                                                        uint2 raw_k, float q_norm, float k_norm, uint32_t prefix_row,
                                                        const float (&before)[4], const float (&after)[4],
                                                        int block) {
  float q[4], k[4], prefix[4];
  unpack_scaled(q, raw_q.x, raw_q.y, q_norm);
  unpack_scaled(k, raw_k.x, raw_k.y, k_norm);
  load_prefix4(prefix, prefix_row);
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

// Half of 16 bytes: the four channels of a k-step.
template <int kStep>
__device__ __forceinline__ uint2 step_half(const uint4& x) {
  return kStep == 0 ? uint2{x.x, x.y} : uint2{x.z, x.w};
}

__device__ __forceinline__ void multiply_anchored(Quad& d, const AnchoredRow& rows, const uint32_t (&column)[4],
                                                  int i) {
  ptx::mma_m16n8k8_tf32(d.x, rows.k[i], rows.q[i], rows.k[i + 1], rows.q[i + 1], column[i], column[i + 1]);
}

struct AnchoredScores {
  Quad top, aa, bb, cross[4];
};

// Columns of the off-diagonal block: block 0 leaves them for block 1.
struct AnchoredEdges {
  uint32_t a[2][4], b[2][4];
};

// Where a lane reads and writes; block 1 lies 2048 bytes on.
struct AnchoredPlace {
  uint32_t row_a, row_b, at_a, totals;
  __device__ uint32_t at_b() const { return at_a ^ 0x7f0; }  // token b is 15 - token a: row and swizzle, all bits
  __device__ void to_next_block() { row_a += 2048, row_b += 2048, at_a += 2048; }
};

template <int kStep, class Sink>
__device__ __forceinline__ void anchored_step(AnchoredScores& scores, AnchoredEdges& edges, const BlockRows& raw,
                                              const Norms& norms, const AnchoredPlace& place, int block, Sink& sink) {
  const uint32_t totals = place.totals + kStep * 16;
  float before[4], after[4];
  load_prefix4(before, totals + ChannelTotals::kBefore);
  load_prefix4(after, totals + ChannelTotals::kAfter + block * 128);
  // The swizzle decides which half of 32 bytes k-step 0 of a prefix row is.
  const uint32_t row_a = kStep == 0 ? place.row_a : place.row_a ^ 16;
  const uint32_t row_b = kStep == 0 ? place.row_b : place.row_b ^ 16;
  AnchoredRow a;
  sink.template put<0>(place.at_a, kStep,
                       anchored_token(a, edges.a[kStep], step_half<kStep>(raw.q[0]), step_half<kStep>(raw.k[0]),
                                      norms.qa, norms.ka, row_a, before, after, block));
  // All products of a's rows before b's are made: registers are short.
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    multiply_anchored(scores.aa, a, a.column, i);
    if (block == 0) continue;
    multiply_anchored(scores.cross[0], a, edges.a[kStep], i);
    multiply_anchored(scores.cross[1], a, edges.b[kStep], i);
  }
  AnchoredRow b;
  sink.template put<1>(place.at_b(), kStep,
                       anchored_token(b, edges.b[kStep], step_half<kStep>(raw.q[1]), step_half<kStep>(raw.k[1]),
                                      norms.qb, norms.kb, row_b, before, after, block));
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    multiply_anchored(scores.top, b, a.column, i);
    multiply_anchored(scores.bb, b, b.column, i);
    if (block == 0) continue;
    multiply_anchored(scores.cross[2], b, edges.a[kStep], i);
    multiply_anchored(scores.cross[3], b, edges.b[kStep], i);
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

// Both blocks of an item: operands to the sink, partial scores to the warp's scratch. kUnroll 1, a loop over the
// blocks, beside the consumers' code: two copies of its body would not stay in the instruction cache.
template <int kUnroll, class Sink>
__device__ __forceinline__ void build_anchored(const RawRows& raw, const ProducerLane& me, uint32_t scratch,
                                               uint32_t area, Sink sink) {
  AnchoredPlace place;
  place.row_a = scratch + prefix_offset(me.token_a, 2 * me.c);
  place.row_b = scratch + prefix_offset(me.token_b, 2 * me.c);
  place.at_a = operand_offset(me.token_a, me);
  place.totals = area + GroupArea::kTotals + me.warp * ChannelTotals::kBytes + me.c * 32;
  NormView view(area, me);
  uint32_t quads = scratch + me.lane * 16;
  AnchoredScores scores;
  AnchoredEdges edges;
  BlockRows rows = block_rows(raw, 0);
#pragma unroll kUnroll
  for (int block = 0; block < 2; ++block) {
    const Norms norms = view.load();
    view.to_next_block();
    scores.top = scores.aa = scores.bb = Quad();
    anchored_step<0>(scores, edges, rows, norms, place, block, sink);
    anchored_step<1>(scores, edges, rows, norms, place, block, sink);
    __syncwarp();  // block 0: prefix rows 0..7 are read no more; block 1: none is
    write_quad(scores.top, 0, quads);
    write_quad(merge_anchored(scores.aa, scores.bb, me), 1, quads);
    quads += 1024;
    place.to_next_block();
    if (block == 0) rows = block_rows(raw, 1);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) write_quad(scores.cross[i], i, quads);
}

}  // namespace kda::cuda::prefill_fused

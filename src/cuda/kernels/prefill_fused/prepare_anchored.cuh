// The second half of an item for bounded gates: diagonal blocks anchored at their first row (H-5b), tf32 operands.
//
// With c = floor(16 |lb| log2(e) / 2): rows 2^c 2^P_t, columns 2^-c 2^-P_t, both at most 2^60 in size; every row and
// column factor lies in its past. The off-diagonal block reuses the rows (so its sums carry 2^c) with columns
// f(B0, P_t) of block 0. K~, Q~ are the rows times 2^-c (block 0) or 2^(B0 - c) (block 1). Rounded once each (N-3).
#pragma once

#include "cuda/kernels/prefill_fused/prepare_operands.cuh"

namespace kda::cuda::prefill_fused {

// 2^c of H-5b; at most 2^60 for the bounds that this form serves (kMaxAnchoredLog2).
__device__ __forceinline__ float anchor_scale(const Params& p) {
  const int c = static_cast<int>(8.0f * fabsf(p.lower_bound) * kLog2e);
  return __int_as_float((127 + c) << 23);
}

// tf32 operands of one token, four channels.
struct AnchoredRow {
  uint32_t k[4], q[4], column[4];
};

// Per-channel factors of a k-step: what turns rows into K~, Q~ and f into K^.
struct ChannelFactors {
  float own[4];   // total of the own block, log2
  float rise[4];  // 2^-c (block 0), 2^(B0 - c) (block 1)
  float fall[4];  // 2^B1 (block 0), 1 (block 1)
};

template <int kStep>
__device__ __forceinline__ void anchored_token(AnchoredRow& rows, uint32_t (&edge)[4], OperandRow& out,
                                               const uint4& raw_q, const uint4& raw_k, float q_norm, float k_norm,
                                               uint32_t prefix_row, const ChannelFactors& channel, float scale,
                                               int block) {
  float q[4], k[4], prefix[4];
  unpack_scaled(q, kStep == 0 ? raw_q.x : raw_q.z, kStep == 0 ? raw_q.y : raw_q.w, q_norm);
  unpack_scaled(k, kStep == 0 ? raw_k.x : raw_k.z, kStep == 0 ? raw_k.y : raw_k.w, k_norm);
  load_prefix4(prefix, kStep == 0 ? prefix_row : prefix_row ^ 16);
  float key[4], query[4], update[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float up = ptx::exp2_approx(prefix[i]) * scale;
    key[i] = k[i] * up;
    query[i] = q[i] * up;
    rows.k[i] = ptx::round_tf32(key[i]);
    rows.q[i] = ptx::round_tf32(query[i]);
    rows.column[i] = ptx::round_tf32(k[i] * ptx::reciprocal_approx(up));
    update[i] = k[i] * decay_between(channel.own[i], prefix[i]);
    key[i] *= channel.rise[i];
    query[i] *= channel.rise[i];
  }
  if (block == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      edge[i] = ptx::round_tf32(update[i]);
      update[i] *= channel.fall[i];
    }
  }
  out.key[kStep] = pack_four(key);
  out.query[kStep] = pack_four(query);
  pack_two_terms(update, out.high[kStep], out.low[kStep]);
}

__device__ __forceinline__ void multiply_anchored(Quad& d, const AnchoredRow& rows, const uint32_t (&column)[4],
                                                  int i) {
  ptx::mma_m16n8k8_tf32(d.x, rows.k[i], rows.q[i], rows.k[i + 1], rows.q[i + 1], column[i], column[i + 1]);
}

struct AnchoredScores {
  Quad top, aa, bb, cross[4];
};

struct AnchoredEdges {
  uint32_t a[2][4], b[2][4];  // [k-step]
};

template <int kStep>
__device__ __forceinline__ void anchored_step(AnchoredScores& scores, AnchoredEdges& edges, OperandRow& out_a,
                                              OperandRow& out_b, const uint4 (&q)[2], const uint4 (&k)[2],
                                              const Norms& norms, uint32_t row_a, uint32_t row_b, uint32_t own_total,
                                              uint32_t other_total, float scale, int block) {
  ChannelFactors channel;
  load_prefix4(channel.own, kStep == 0 ? own_total : own_total ^ 16);
  float other[4];
  load_prefix4(other, kStep == 0 ? other_total : other_total ^ 16);
  const float down = ptx::reciprocal_approx(scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float f = ptx::exp2_approx(other[i]);
    channel.rise[i] = block == 0 ? down : f * down;
    channel.fall[i] = f;
  }
  AnchoredRow a, b;
  uint32_t edge_a[4], edge_b[4];
  anchored_token<kStep>(a, edge_a, out_a, q[0], k[0], norms.qa, norms.ka, row_a, channel, scale, block);
  anchored_token<kStep>(b, edge_b, out_b, q[1], k[1], norms.qb, norms.kb, row_b, channel, scale, block);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    multiply_anchored(scores.aa, a, a.column, i);
    multiply_anchored(scores.top, b, a.column, i);
    multiply_anchored(scores.bb, b, b.column, i);
  }
  if (block == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) edges.a[kStep][i] = edge_a[i], edges.b[kStep][i] = edge_b[i];
  } else {
    // Zeroed here, not before the loop over blocks: in block 0 these registers are needed for the rows of block 1.
    if (kStep == 0)
      for (Quad& x : scores.cross) x = Quad();
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      multiply_anchored(scores.cross[0], a, edges.a[kStep], i);
      multiply_anchored(scores.cross[1], a, edges.b[kStep], i);
      multiply_anchored(scores.cross[2], b, edges.a[kStep], i);
      multiply_anchored(scores.cross[3], b, edges.b[kStep], i);
    }
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

// Both blocks of an item: operands to the stage, partial scores to the warp's scratch.
__device__ __forceinline__ void build_anchored(const RawRows& raw, const Params& p, const ProducerLane& me,
                                               uint32_t scratch, uint32_t area, uint32_t stage) {
  const float scale = anchor_scale(p);
  const uint32_t column = scratch + 2 * me.c * 16;
  const uint32_t total0 = column + 15 * 128 + 16, total1 = total0 + 2048;  // bit 2 of row 15 swaps the k-steps
  uint32_t row_a = scratch + prefix_offset(me.token_a, 2 * me.c);
  uint32_t row_b = scratch + prefix_offset(me.token_b, 2 * me.c);
  uint32_t at_a = stage + operand_offset(me.token_a, me), at_b = stage + operand_offset(me.token_b, me);
  uint4 q[2] = {raw.q[0][0], raw.q[0][1]}, k[2] = {raw.k[0][0], raw.k[0][1]};
  NormView sums(area, me);
  uint32_t quads = scratch + me.lane * 16;
  AnchoredScores scores;
  AnchoredEdges edges;
#pragma unroll 1
  for (int block = 0; block < 2; ++block) {
    const Norms norms = sums.load(p);
    sums.to_next_block();
    OperandRow out_a, out_b;
    const uint32_t own = block == 0 ? total0 : total1, other = block == 0 ? total1 : total0;
    anchored_step<0>(scores, edges, out_a, out_b, q, k, norms, row_a, row_b, own, other, scale, block);
    __syncwarp();  // keeps the second step's loads out of the first: registers
    anchored_step<1>(scores, edges, out_a, out_b, q, k, norms, row_a, row_b, own, other, scale, block);
    store_operands(out_a, at_a);
    store_operands(out_b, at_b);
    __syncwarp();  // block 0: prefix rows 0..7 are read no more; block 1: none is
    write_quad(scores.top, 0, quads);
    write_quad(merge_anchored(scores.aa, scores.bb, me), 1, quads);
    quads += 1024;
    scores.top = scores.aa = scores.bb = Quad();
    q[0] = raw.q[1][0], q[1] = raw.q[1][1], k[0] = raw.k[1][0], k[1] = raw.k[1][1];
    row_a += 2048, row_b += 2048, at_a += 2048, at_b += 2048;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) write_quad(scores.cross[i], i, quads);
}

}  // namespace kda::cuda::prefill_fused

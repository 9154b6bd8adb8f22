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

// Four channels of one token: tf32 operands, `edge` (block 0: column of the off-diagonal block), stage operands.
__device__ __forceinline__ void anchored_token(AnchoredRow& rows, uint32_t (&edge)[4], uint32_t at,
                                               const uint2& raw_q, const uint2& raw_k, float q_norm, float k_norm,
                                               uint32_t prefix_row, const ChannelFactors& channel, float scale,
                                               int block) {
  float q[4], k[4], prefix[4];
  unpack_scaled(q, raw_q.x, raw_q.y, q_norm);
  unpack_scaled(k, raw_k.x, raw_k.y, k_norm);
  load_prefix4(prefix, prefix_row);
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
  Packed high, low;
  pack_two_terms(update, high, low);
  const auto put = [&](uint32_t part, const Packed& x) { ptx::store_shared(at + part, uint2{x.lo, x.hi}); };
  put(Stage::kKeys, pack_four(key));
  put(Stage::kQueries, pack_four(query));
  put(Stage::kUpdateHigh, high);
  put(Stage::kUpdateLow, low);
}

__device__ __forceinline__ void multiply_anchored(Quad& d, const AnchoredRow& rows, const uint32_t (&column)[4],
                                                  int i) {
  ptx::mma_m16n8k8_tf32(d.x, rows.k[i], rows.q[i], rows.k[i + 1], rows.q[i + 1], column[i], column[i + 1]);
}

struct AnchoredScores {
  Quad top, aa, bb, cross[4];
};

// Columns of the off-diagonal block, a queue of two k-steps: block 0 fills it, block 1 empties it.
struct AnchoredEdges {
  uint32_t a[2][4], b[2][4];
};

// Where a lane reads and writes in a k-step; `next` goes on to the following one.
struct AnchoredPlace {
  uint32_t row_a, row_b, own_total, other_total, at_a, at_b;
  __device__ void to_step(int step) {
    row_a ^= 16, row_b ^= 16, own_total ^= 16, other_total ^= 16;  // which half of 32 bytes: the swizzle's choice
    at_a += step == 1 ? 8 : -8, at_b += step == 1 ? 8 : -8;
  }
};

__device__ __forceinline__ void anchored_step(AnchoredScores& scores, AnchoredEdges& edges, const uint4 (&q)[2],
                                              const uint4 (&k)[2], const Norms& norms, const AnchoredPlace& place,
                                              float scale, int block, int step) {
  ChannelFactors channel;
  load_prefix4(channel.own, place.own_total);
  float other[4];
  load_prefix4(other, place.other_total);
  const float down = ptx::reciprocal_approx(scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float f = ptx::exp2_approx(other[i]);
    channel.rise[i] = block == 0 ? down : f * down;
    channel.fall[i] = f;
  }
  AnchoredRow a, b;
  uint32_t edge_a[4], edge_b[4];
  anchored_token(a, edge_a, place.at_a, uint2{q[0].x, q[0].y}, uint2{k[0].x, k[0].y}, norms.qa, norms.ka, place.row_a,
                 channel, scale, block);
  anchored_token(b, edge_b, place.at_b, uint2{q[1].x, q[1].y}, uint2{k[1].x, k[1].y}, norms.qb, norms.kb, place.row_b,
                 channel, scale, block);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    multiply_anchored(scores.aa, a, a.column, i);
    multiply_anchored(scores.top, b, a.column, i);
    multiply_anchored(scores.bb, b, b.column, i);
  }
  if (block == 1) {
    // Zeroed here, not before the loops: in block 0 these registers are needed for the rows of block 1.
    if (step == 0)
      for (Quad& x : scores.cross) x = Quad();
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      multiply_anchored(scores.cross[0], a, edges.a[0], i);
      multiply_anchored(scores.cross[1], a, edges.b[0], i);
      multiply_anchored(scores.cross[2], b, edges.a[0], i);
      multiply_anchored(scores.cross[3], b, edges.b[0], i);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    edges.a[0][i] = edges.a[1][i], edges.b[0][i] = edges.b[1][i];
    edges.a[1][i] = edge_a[i], edges.b[1][i] = edge_b[i];
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
  const uint32_t total0 = column + 15 * 128 + 16;  // bit 2 of row 15 swaps the k-steps
  AnchoredPlace place;
  place.row_a = scratch + prefix_offset(me.token_a, 2 * me.c);
  place.row_b = scratch + prefix_offset(me.token_b, 2 * me.c);
  place.at_a = stage + operand_offset(me.token_a, me), place.at_b = stage + operand_offset(me.token_b, me);
  place.own_total = total0, place.other_total = total0 + 2048;
  uint4 q[2] = {raw.q[0][0], raw.q[0][1]}, k[2] = {raw.k[0][0], raw.k[0][1]};
  NormView sums(area, me);
  uint32_t quads = scratch + me.lane * 16;
  AnchoredScores scores;
  AnchoredEdges edges = {};
#pragma unroll 1
  for (int block = 0; block < 2; ++block) {
    const Norms norms = sums.load(p);
    sums.to_next_block();
    scores.top = scores.aa = scores.bb = Quad();
#pragma unroll 1
    for (int step = 0; step < 2; ++step) {
      anchored_step(scores, edges, q, k, norms, place, scale, block, step);
      place.to_step(step ^ 1);
#pragma unroll
      for (int side = 0; side < 2; ++side)
        q[side].x = q[side].z, q[side].y = q[side].w, k[side].x = k[side].z, k[side].y = k[side].w;
    }
    __syncwarp();  // block 0: prefix rows 0..7 are read no more; block 1: none is
    write_quad(scores.top, 0, quads);
    write_quad(merge_anchored(scores.aa, scores.bb, me), 1, quads);
    quads += 1024;
    q[0] = raw.q[1][0], q[1] = raw.q[1][1], k[0] = raw.k[1][0], k[1] = raw.k[1][1];
    place.row_a += 2048, place.row_b += 2048, place.at_a += 2048, place.at_b += 2048;
    const uint32_t own = place.own_total;
    place.own_total = place.other_total, place.other_total = own;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) write_quad(scores.cross[i], i, quads);
}

}  // namespace kda::cuda::prefill_fused

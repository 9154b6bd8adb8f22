// What the recurrent operators (decode, verify, commit, decode_step) have in common at the kernel boundary.
#pragma once

#include "cuda/kernels/common/rows.h"

namespace kda::cuda {

// Head sizes a kernel is built for. Exact: K = V = 128, rows of 16-byte pieces. Masked: up to 128 or 256 keys, any
// values, any alignment; the sums of a 128-key head are the same in both.
enum class Shape : int32_t { kExact128, kMasked128, kMasked256 };

// The problem's form; the same for every run of a plan.
struct AttentionForm {
  int32_t heads = 1;        // H
  int32_t value_heads = 1;  // HV
  int32_t keys = 128;       // K
  int32_t values = 128;     // V
  float scale = 1;
  int32_t qk_norm = 1;
  int32_t beta_logits = 1;
  int32_t beta_doubled = 0;
  Dtype io = Dtype::kBf16;  // of q, k, v
};

// How a head's value rows are spread: block b of a head has rows [b * rows_per_block, ...), its first `row_warps`
// warps hold them. Warps behind those only prepare tokens.
struct HeadSplit {
  int32_t slices = 1;
  int32_t rows_per_block = 128;
  int32_t row_warps = 8;
  int32_t chunk = 1;      // tokens prepared at once
  int32_t heads = 1;      // of one block, one after the other
  int32_t clustered = 0;  // several blocks form a cluster
  int64_t wave = 0;       // blocks that run at once, at least
};

constexpr int32_t kMostSlices = 8;  // of a head: they may have to form a cluster

// Fewer rows a block than it could hold where the heads alone would leave multiprocessors without one.
inline HeadSplit split_head(int64_t heads_in_all, int32_t values, int32_t warp_rows, int32_t most_row_warps,
                            int32_t multiprocessors, int32_t most_slices = kMostSlices) {
  HeadSplit split;
  split.row_warps = most_row_warps;
  const auto slices = [&] { return (values + split.row_warps * warp_rows - 1) / (split.row_warps * warp_rows); };
  while (split.row_warps > 1 && slices() <= most_slices / 2 && heads_in_all * slices() < multiprocessors * 3 / 4)
    split.row_warps /= 2;
  split.rows_per_block = split.row_warps * warp_rows;
  split.slices = slices();
  return split;
}

// How many heads of a row a block takes: as many as keep all places that run at once busy to the end. A block's start
// costs about a third of a head's time.
inline int32_t heads_of_block(int64_t rows, int32_t value_heads, int32_t slices, int64_t wave) {
  int32_t best = 1;
  double least = 1e300;
  for (int32_t heads = 1; heads <= value_heads && heads <= 32; ++heads) {
    const int64_t blocks = rows * slices * ((value_heads + heads - 1) / heads);
    const double time = static_cast<double>((blocks + wave - 1) / wave) * (heads + 0.35);
    if (time < least) least = time, best = heads;
  }
  return best;
}

}  // namespace kda::cuda

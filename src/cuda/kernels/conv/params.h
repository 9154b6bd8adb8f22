// Short causal convolution with windows in a pool (spec W): arguments of its kernels.
#pragma once

#include "cuda/kernels/common/kernel_info.h"
#include "cuda/kernels/common/rows.h"

namespace kda::cuda {

constexpr int32_t kMostConvWidth = 8;  // W

// Raw inputs, taps and windows of neighbouring channels; in decode_step those of one of q, k, v.
struct ConvChannels {
  const void* x = nullptr;  // [T, channels] or [B, T, channels]
  int64_t x_batch = 0, x_row = 0;
  int32_t x_vectors = 0;          // as WindowRef
  const float* weight = nullptr;  // [channels, W]
  const float* bias = nullptr;    // [channels]; null: 0
  WindowRef window;
};

struct ConvPart {
  ConvChannels in;
  void* out = nullptr;  // as x
  int64_t out_batch = 0, out_row = 0;
  int32_t channels = 0;
  int32_t groups = 0;  // of a warp's channels
};

struct ConvParams {
  int32_t parts = 1, width = 4;  // W
  int32_t groups = 0;            // of all parts
  int32_t has_pool = 1;
  int32_t activation = 1;
  Dtype io = Dtype::kBf16;
  SequenceRef sequences;
  ConvRule rule;
  RecordRef records;  // count and record_rows alone
  IndexRef out_rows;
  int64_t out_count = 0;
  int32_t taps_aligned = 0;  // a channel's four taps lie at a multiple of 16 bytes
  // Prefill: rows of a sequence that one warp goes through; checkpoints (K-2).
  int32_t tile_rows = 32;
  int32_t checkpoints = 0;
  IndexRef checkpoint_offsets, checkpoint_slots;
  ConvPart part[3];
};

// Prefill. `vectors`: W = 4 and all rows are whole, aligned groups of four. A warp's channels: 32 * warp_rows.
KernelInfo conv_prefill_kernel_info(Dtype io, bool vectors);
// Columns and records; `vectors` as above, with windows of the io dtype.
KernelInfo conv_step_kernel_info(Dtype io, bool vectors);

}  // namespace kda::cuda

// The common call of decode_step: one token a row, K = V = 128, W = 4, as many value as query heads, 16-bit io in
// whole, aligned pieces, states by columns, gated norm. Kernels of its own, with the general one's sums and bits.
#pragma once

#include "cuda/kernels/decode_step/params.h"

namespace kda::cuda {

struct LeanStepParams {
  AttentionForm form;
  SequenceRef sequences;
  DecodeRule rule;  // width 1, no write slots
  GateRef gate_rule;
  TokenRef gate, beta, z;
  PoolRef pool;
  OutRef out;            // rows in order
  ConvChannels conv[3];  // of q, k, v; windows of the io dtype, channels side by side
  const float* norm_weight = nullptr;
  float eps = 1e-5f;
  int64_t wave = 0;  // blocks that run at once, at least
  // Ring: heads b, b + lists, ... of block b < lists, at most `list`; the others in runs of the blocks behind.
  uint32_t lists = 0, list = 0, run = 0;
};

// Blocks that take a head after another. `blocks`: on a multiprocessor, 1 or 2; 16-bit states have 2.
KernelInfo step_ring_kernel_info(Dtype pool, Dtype io, int32_t blocks);
// Short calls: x = (head, slice of its value rows), a cluster a head; y, z = sequence. `slices`: 2 or 4.
KernelInfo step_slices_kernel_info(Dtype pool, Dtype io, int32_t slices);

// Per pool dtype, each in a file of its own.
KernelInfo lean_step_kernel_fp32(Dtype io, int32_t slices);  // -1, -2: the ring, so many blocks
KernelInfo lean_step_kernel_bf16(Dtype io, int32_t slices);
KernelInfo lean_step_kernel_fp16(Dtype io, int32_t slices);

}  // namespace kda::cuda

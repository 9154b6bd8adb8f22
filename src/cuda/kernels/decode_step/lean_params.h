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

// The built kernels. Slices: x = (head, slice of its value rows), a cluster a head; y, z = sequence. Rings: blocks
// that take a head after another, one or two on a multiprocessor; 16-bit states always have two.
enum class LeanStepForm : int32_t {
  kFourSlices,  // of sixteen warps
  kTwoSlices,
  kManySlices,  // two of eight warps; 16-bit states
  kRing,
  kTwoRings,
};

KernelInfo lean_step_kernel_info(Dtype pool, Dtype io, LeanStepForm form);

// Per pool dtype, each in a file of its own.
KernelInfo lean_step_kernel_fp32(Dtype io, LeanStepForm form);
KernelInfo lean_step_kernel_bf16(Dtype io, LeanStepForm form);
KernelInfo lean_step_kernel_fp16(Dtype io, LeanStepForm form);

}  // namespace kda::cuda

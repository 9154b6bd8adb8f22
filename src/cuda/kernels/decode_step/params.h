// decode_step (spec V-15): conv + SiLU + gate + recurrence + gated norm.
#pragma once

#include "cuda/kernels/common/kernel_info.h"
#include "cuda/kernels/conv/params.h"
#include "cuda/kernels/decode/params.h"

namespace kda::cuda {

struct DecodeStepParams : DecodeParams {  // q, k, v are absent
  ConvRule conv_rule;
  ConvChannels conv[3];  // of q, k, v
  int32_t conv_width = 4;
  int32_t taps_aligned = 0;  // a channel's four taps lie at a multiple of 16 bytes
  int32_t norm = 1;
  float eps = 1e-5f;
  TokenRef z;                          // [T, HV, V]
  const float* norm_weight = nullptr;  // [V]
};

// The fused kernel: K = V = 128, W = 4, 16-byte state rows. `records`: verify_record.
KernelInfo decode_step_kernel_info(Dtype pool, bool records);
KernelInfo decode_step_kernel_fp32(bool records);
KernelInfo decode_step_kernel_bf16(bool records);
KernelInfo decode_step_kernel_fp16(bool records);

// Pieces of the unfused chain that the operators alone do not give: in records mode which rows are active, before
// counts change, and the norm of exactly the rows of active sequences.
struct StepRowsParams {
  DecodeParams decode;        // rule, records, sequences, form; out: the step's
  uint8_t* active = nullptr;  // [N]; null: the rule still says it
  TokenRef o;                 // [T, HV, V] of the chain
  TokenRef z;
  const float* norm_weight = nullptr;
  float eps = 1e-5f;
};
KernelInfo step_active_kernel_info();  // one thread a sequence
KernelInfo step_norm_kernel_info();    // x = value heads, rest = sequences

}  // namespace kda::cuda

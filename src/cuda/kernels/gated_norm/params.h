// Gated RMS norm per value head (spec L-7.4).
#pragma once

#include "cuda/kernels/common/kernel_info.h"
#include "cuda/kernels/common/views.h"

namespace kda::cuda {

struct GatedNormParams {
  TokenRef o, z;                  // [T, HV, V]
  TokenRef out;                   // [T, HV, V]; written
  const float* weight = nullptr;  // [V]
  int32_t rows = 0;               // of all samples and heads
  int32_t tokens = 0;             // of one sample
  int32_t heads = 1, values = 128;
  float eps = 1e-5f;
  int32_t dense = 0;  // row r of all three tensors starts at r * V
};

constexpr int32_t kMostNormValues = 1024, kNormBlockRows = 8;

// `exact`: V = 128, weights at a multiple of 16 bytes and every row whole, aligned 16-byte pieces; else any `values`.
KernelInfo gated_norm_kernel_info(Dtype io, int32_t values, bool exact);

}  // namespace kda::cuda

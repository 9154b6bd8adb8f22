// Residual sum and RMS norm of token rows (kda/residual_norm.h).
#pragma once

#include "cuda/kernels/common/kernel_info.h"
#include "cuda/kernels/common/views.h"

namespace kda::cuda {

struct ResidualNormParams {
  void* residual = nullptr;                            // [T, D]; written if there is an `add`
  const void* add = nullptr;                           // [T, D], or null
  const float* weight = nullptr;                       // [D], or null: 1
  void* out = nullptr;                                 // [T, D]
  int64_t residual_row = 0, add_row = 0, out_row = 0;  // elements from row to row
  int32_t cols = 0;                                    // D
  float eps = 1e-5f;
};

constexpr int32_t kResidualNormThreads = 128;
constexpr int32_t kMostHeldColumns = 8192;

// `held`: D <= kMostHeldColumns and every row is whole, aligned groups of eight; else any D.
KernelInfo residual_norm_kernel_info(Dtype io, bool held);

}  // namespace kda::cuda

// Rows of a projection between two dtypes (spec L-7, L-11): what a matrix product cannot do in one rounding.
#pragma once

#include "cuda/kernels/common/kernel_info.h"
#include "cuda/kernels/common/views.h"

namespace kda::cuda {

struct ProjectionRowsParams {
  const void* from = nullptr;  // [rows, cols], row stride in elements; null: zeros
  void* to = nullptr;          // [rows, cols]; may be `from` itself if the dtypes are equal
  int64_t from_stride = 0, to_stride = 0;
  const float* bias = nullptr;  // [cols], or null
  int64_t rows = 0;
  int32_t cols = 0;
  Dtype from_dtype = Dtype::kFp32, to_dtype = Dtype::kFp32;
};

KernelInfo projection_rows_kernel_info();
constexpr int32_t kProjectionRowsColumns = 512;  // of one block

}  // namespace kda::cuda

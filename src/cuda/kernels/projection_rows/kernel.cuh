// to = round(from + bias), row by row (L-7 step 1, L-11); zeros without `from` (L-12)
//
// Grid       x: 512 columns a block; y and z: rows.
// Block      128 threads, each four columns that lie 128 apart; every load of a warp is whole lines.
// Precision  widened exactly, added in fp32, rounded once.
// Limits     element by element, for the forms of a projection that are rare: weights that its io dtype cannot hold,
//            and FLA's bias.
#pragma once

#include "cuda/kernels/common/math.cuh"
#include "cuda/kernels/projection_rows/params.h"

namespace kda::cuda {

__global__ void __launch_bounds__(128) projection_rows_kernel(const __grid_constant__ ProjectionRowsParams p) {
  touch_parameters(p);
  const int64_t row = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kProjectionRowsColumns + static_cast<int32_t>(threadIdx.x);
  wait_for_previous_grid();
  if (row >= p.rows) return;
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t column = first + i * 128;
    x[i] = column < p.cols && p.from != nullptr ? load_element(p.from, row * p.from_stride + column, p.from_dtype) : 0.0f;
    if (p.bias != nullptr && column < p.cols) x[i] = __fadd_rn(x[i], p.bias[column]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t column = first + i * 128;
    if (column < p.cols) store_element(p.to, row * p.to_stride + column, p.to_dtype, x[i]);
  }
}

}  // namespace kda::cuda

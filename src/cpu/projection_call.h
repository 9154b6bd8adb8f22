// The boundary between the portable projection's packing and tasks (cpu/projection.cc) and its kernel.
#pragma once

#include <cstdint>

#include "base/tensor.h"
#include "cpu/isa.h"

namespace kda::cpu {

// Weight rows (columns of y) of a packed panel: two vectors of AVX-512.
constexpr int64_t kProjectionPanel = 32;
// x rows that a task converts and multiplies at a time.
constexpr int64_t kProjectionRows = 24;

// Panels: [panel][cols][kProjectionPanel], zero behind a part's last row.
struct ProjectionPanels {
  const void* data = nullptr;
  kda_dtype dtype = KDA_FP32;  // fp32 or bf16
  int64_t cols = 0;
};

struct ProjectionFunctions {
  // out[r][c] = sum over k of x[r][k] * panel[k][c] for r < rows; x rows `stride` apart; out rows kProjectionPanel
  // apart. Each element is one chain of fused multiply-adds over each block of 512 k, the blocks' sums added in
  // order.
  void (*multiply)(const float* x, int64_t stride, int64_t rows, const ProjectionPanels& panels, int64_t panel,
                   float* out);
  void (*load)(kda_dtype dtype, const void* from, int64_t n, float* to);
  // to = from + bias (may be null), rounded once.
  void (*store)(kda_dtype dtype, const float* from, const float* bias, int64_t n, void* to);
};
const ProjectionFunctions& projection_functions(Isa isa);

}  // namespace kda::cpu

// Segment maps (spec S-9): arguments of the kernels for any shape.
#pragma once

#include "cuda/kernels/common/kernel_info.h"
#include "cuda/kernels/recurrence/params.h"

namespace kda::cuda {

struct SummaryParams {
  AttentionForm form;  // its values are the rows of a map: V + K
  HeadSplit split;
  SequenceRef sequences;
  GateRef gate_rule;
  int32_t values = 0;        // V
  TokenRef k;                // [T, H, K]
  TokenRef v;                // [T, HV, V]
  TokenRef gate;             // [T, HV, K] raw
  TokenRef beta;             // [T, HV]
  float* summary = nullptr;  // [N, HV, V + K, K]
  int64_t stride = 0;        // of a sequence
};

struct MergeParams {
  int32_t heads = 0, keys = 0, values = 0;  // HV, K, V
  int64_t segments = 0;                     // P
  const float* initial = nullptr;           // [HV, V, K]; absent: zero
  const float* summaries = nullptr;         // [P, HV, V + K, K]
  int64_t summary_stride = 0;               // of a segment
  const uint8_t* present = nullptr;         // [P]; absent: all are
  int64_t present_stride = 0;
  float* starts = nullptr;  // [P, HV, V, K] or absent
  int64_t start_stride = 0;
  float* final = nullptr;  // [HV, V, K] or absent
};

constexpr int32_t kMergeRows = 8;  // value rows of a block
// The kernel of merges whose maps come by bulk copies: K, and value rows of a block.
constexpr int32_t kMapDim = 128, kMapRows = 16;

KernelInfo summarize_segment_kernel_info(Shape shape);
KernelInfo merge_summaries_kernel_info(Shape shape);
KernelInfo merge_maps_kernel_info();  // K = 128, V a multiple of 16; rows and maps at multiples of 16 bytes

}  // namespace kda::cuda

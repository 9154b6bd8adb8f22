// The small kernels behind verify_record and commit: what every head of a row reads is changed one launch later.
#include "cuda/kernels/common/math.cuh"
#include "cuda/kernels/decode/commit_row.cuh"
#include "cuda/kernels/decode/launch.h"

namespace kda::cuda {
namespace {

// Counts of the rows that verify_record wrote (V-10). A thread reads and writes its own row's count alone.
__global__ void __launch_bounds__(128) set_counts_kernel(const __grid_constant__ DecodeParams p) {
  wait_for_previous_grid();
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= active_sequences(p.sequences)) return;
  const DecodeRow row = decode_row(p.rule, p.records, p.sequences, n);
  if (!row.active) return;
  p.records.count[row.record * p.records.count_stride] = static_cast<int32_t>(row.span.length);
}

template <class T>
__device__ void shift_window(const WindowRef& w, int64_t slot, int channel, int from, int columns) {
  T* p = static_cast<T*>(w.data) + slot * w.slot_stride + channel * w.channel_stride;
#pragma unroll 1
  for (int i = 0; i < columns; ++i) p[i * w.column_stride] = p[(from + i) * w.column_stride];
}

// Moves a committed row's windows (W-4), then drops its records.
__global__ void __launch_bounds__(512) end_commit_kernel(const __grid_constant__ CommitParams p) {
  wait_for_previous_grid();
  const int64_t n = blockIdx.x;
  if (n >= committing_sequences(p)) return;
  const CommitRow row = commit_row(p, n);
  if (row.tokens < 0) return;
#pragma unroll 1
  for (int part = 0; part < p.conv_parts && row.tokens > 0; ++part) {
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x); c < p.channels[part]; c += static_cast<int>(blockDim.x)) {
      const auto from = static_cast<int>(row.tokens);
      if (p.window[part].dtype == Dtype::kFp32)
        shift_window<uint32_t>(p.window[part], row.slot, c, from, p.conv_width - 1);
      else shift_window<uint16_t>(p.window[part], row.slot, c, from, p.conv_width - 1);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) p.records.count[row.record * p.records.count_stride] = 0;
}

}  // namespace

KernelInfo decode_kernel_info(Dtype pool, Shape shape, Flow flow) {
  if (pool == Dtype::kBf16) return decode_kernel_bf16(shape, flow);
  if (pool == Dtype::kFp16) return decode_kernel_fp16(shape, flow);
  return decode_kernel_fp32(shape, flow);
}

KernelInfo lean_kernel_info(Dtype pool, LeanCall call) {
  if (pool == Dtype::kBf16) return lean_kernel_bf16(call);
  if (pool == Dtype::kFp16) return lean_kernel_fp16(call);
  return lean_kernel_fp32(call);
}

KernelInfo set_counts_kernel_info() {
  return {reinterpret_cast<const void*>(set_counts_kernel), "set_counts_kernel", 128};
}
KernelInfo end_commit_kernel_info() {
  return {reinterpret_cast<const void*>(end_commit_kernel), "end_commit_kernel", 512};
}

}  // namespace kda::cuda

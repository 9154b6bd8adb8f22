// The choice of the fused kernel, and the pieces of the unfused chain.
#include "cuda/kernels/decode_step/lean_params.h"
#include "cuda/kernels/gated_norm/norm.cuh"

namespace kda::cuda {
namespace {

// Before the chain: records counts change under it.
__global__ void __launch_bounds__(128) step_active_kernel(const __grid_constant__ StepRowsParams p) {
  wait_for_previous_grid();
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= active_sequences(p.decode.sequences)) return;
  p.active[n] = decode_row(p.decode.rule, p.decode.records, p.decode.sequences, n).active;
}

// The chain's last step: gated norm of the rows of active sequences, zeros for inactive ones (P-5). A warp takes a
// token; lanes own eight consecutive elements of up to 256, in gated_norm's tree.
__global__ void __launch_bounds__(128) step_norm_kernel(const __grid_constant__ StepRowsParams p) {
  constexpr int kElements = 8;
  wait_for_previous_grid();
  const SequenceRef& sequences = p.decode.sequences;
  const int64_t n = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  if (n >= sequences.count || n >= active_sequences(sequences)) return;
  const int32_t head = static_cast<int32_t>(blockIdx.x), values = p.decode.form.values;
  const Span span = sequence_span(sequences, n);
  const bool active =
      p.active != nullptr ? p.active[n] != 0 : decode_row(p.decode.rule, p.decode.records, sequences, n).active;
  const int first = static_cast<int>(threadIdx.x % 32) * kElements;
  const OutRef& out = p.decode.out;
  for (int64_t t = threadIdx.x / 32; t < span.length; t += blockDim.x / 32) {
    const int64_t row = out.row(span.begin + t);
    float x[kElements];
    const int64_t from = p.o.offset(span.batch, span.begin + t, head);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      x[e] = active && first + e < values ? load_element(p.o.data, from + first + e, p.o.dtype) : 0.0f;
    }
    const float factor = norm_factor(tree_of_lanes<32>(tree_of_squares<kElements>(x)), values, p.eps);
    if (row < 0) continue;
    const int64_t z = p.z.offset(span.batch, span.begin + t, head), to = out.offset(span.batch, row, head);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (first + e >= values) break;
      float y = 0.0f;
      if (active)
        y = gated_value(x[e], factor, p.norm_weight[first + e], load_element(p.z.data, z + first + e, p.z.dtype));
      store_element(out.data, to + first + e, out.dtype, y);
    }
  }
}

}  // namespace

KernelInfo decode_step_kernel_info(Dtype pool, bool records) {
  if (pool == Dtype::kBf16) return decode_step_kernel_bf16(records);
  if (pool == Dtype::kFp16) return decode_step_kernel_fp16(records);
  return decode_step_kernel_fp32(records);
}
KernelInfo lean_step_kernel_info(Dtype pool, Dtype io, LeanStepForm form) {
  if (pool == Dtype::kBf16) return lean_step_kernel_bf16(io, form);
  if (pool == Dtype::kFp16) return lean_step_kernel_fp16(io, form);
  return lean_step_kernel_fp32(io, form);
}
KernelInfo step_active_kernel_info() {
  return {reinterpret_cast<const void*>(step_active_kernel), "step_active_kernel", 128};
}
KernelInfo step_norm_kernel_info() {
  return {reinterpret_cast<const void*>(step_norm_kernel), "step_norm_kernel", 128};
}

}  // namespace kda::cuda

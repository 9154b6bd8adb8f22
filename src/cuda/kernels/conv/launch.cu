#include "cuda/kernels/conv/kernel.cuh"

namespace kda::cuda {
namespace {

// Columns and records mode: few rows, one thread a channel. History is read before the channel's window is written.
__global__ void __launch_bounds__(128) conv_step_kernel(const __grid_constant__ ConvParams p) {
  touch_parameters(p);
  int32_t channel = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  int part = 0;
  while (part + 1 < p.parts && channel >= p.part[part].channels) channel -= p.part[part++].channels;
  const ConvPart& where = p.part[part];
  const int64_t n = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  wait_for_previous_grid();
  if (n >= p.sequences.count || n >= active_sequences(p.sequences) || channel >= where.channels) return;
  ConvRow row = conv_row(p.rule, p.records, p.has_pool != 0, p.sequences, n);
  if (row.active && p.rule.mode == ConvMode::kRecords && row.offset > 0)
    fold_window(where.in.window, row, p.width, channel);
  for (int64_t t = 0; t < row.span.length; ++t) {
    float y = 0.0f;
    if (row.active) y = conv_value_at(where.in, row, p.rule, p.io, p.width, channel, t, p.activation != 0);
    const int64_t to = conv_out_row(p, row.span.begin + t);
    if (to >= 0) store_element(where.out, row.span.batch * where.out_batch + to * where.out_row + channel, p.io, y);
  }
  if (row.active) store_window(where.in, row, p.rule, p.io, p.width, channel);
}

template <class C>
KernelInfo prefill_info() {
  KernelInfo info{reinterpret_cast<const void*>(conv_prefill_kernel<C>), "conv_prefill_kernel", 128, C::kChannels};
  info.blocks = C::kBlocks;
  return info;
}

template <class Io>
KernelInfo prefill_info(bool vectors) {
  return vectors ? prefill_info<ConvConfig<Io, true>>() : prefill_info<ConvConfig<Io, false>>();
}

}  // namespace

KernelInfo conv_prefill_kernel_info(Dtype io, bool vectors) {
  if (io == Dtype::kBf16) return prefill_info<__nv_bfloat16>(vectors);
  if (io == Dtype::kFp16) return prefill_info<__half>(vectors);
  return prefill_info<float>(vectors);
}
KernelInfo conv_step_kernel_info() {
  return {reinterpret_cast<const void*>(conv_step_kernel), "conv_step_kernel", 128, 1};
}

}  // namespace kda::cuda

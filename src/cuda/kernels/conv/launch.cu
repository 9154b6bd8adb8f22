#include "cuda/kernels/conv/kernel.cuh"

namespace kda::cuda {
namespace {

// One channel of an active row. The history and four tokens at a time are asked for at once; what the window takes is
// stored from registers, once all of the history is read.
template <int kWidth>
__device__ __forceinline__ void step_channel(const ConvParams& p, const ConvPart& part, const ConvRow& row,
                                             int32_t channel) {
  constexpr int kHistory = kWidth - 1, kTokens = 4;
  const auto element = [&](int64_t i) { return stream_at(part.in, row, p.rule, p.io, kWidth, channel, i); };
  StreamElement history[kHistory];
  float w[kWidth], x[kWidth];
#pragma unroll
  for (int i = 0; i < kHistory; ++i) history[i] = element(i);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) w[j] = part.in.weight[static_cast<int64_t>(channel) * kWidth + j];
  const bool has_bias = part.in.bias != nullptr;
  const float bias = has_bias ? part.in.bias[channel] : 0.0f;
  const WindowMove move = window_move(row, p.rule, kWidth);
  const auto keep = [&](int64_t i, const StreamElement& e) {
    if (i < move.from || i >= move.from + move.count) return;
    store_in_window(part.in.window, row.write_slot, channel, move.to + i - move.from, e);
  };
  for (int64_t t = 0; t < row.span.length || t == 0; t += kTokens) {
    StreamElement tokens[kTokens];
#pragma unroll
    for (int r = 0; r < kTokens; ++r) {
      if (t + r < row.span.length) tokens[r] = element(kHistory + t + r);
    }
    if (t == 0) {
#pragma unroll
      for (int i = 0; i < kHistory; ++i) {
        x[i] = element_value(history[i].bits, history[i].dtype);
        keep(i, history[i]);
      }
    }
#pragma unroll
    for (int r = 0; r < kTokens; ++r) {
      if (t + r >= row.span.length) break;
      x[kHistory] = element_value(tokens[r].bits, tokens[r].dtype);
      const float y = conv_value<kWidth>(w, x, has_bias, bias, p.activation != 0);
      const int64_t to = conv_out_row(p, row.span.begin + t + r);
      if (to >= 0) store_element(part.out, row.span.batch * part.out_batch + to * part.out_row + channel, p.io, y);
      keep(kHistory + t + r, tokens[r]);
#pragma unroll
      for (int i = 0; i < kHistory; ++i) x[i] = x[i + 1];
    }
  }
}

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
  if (row.active && p.width == 4) return step_channel<4>(p, where, row, channel);
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

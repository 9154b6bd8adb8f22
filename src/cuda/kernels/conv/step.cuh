// Columns and records mode (spec W-3, W-4): few tokens a row.
//
// conv_step_kernel
// Grid       x = groups of a warp's channels, four a block; y, z = sequence.
// Warp       lanes own 4 channels; their history, taps and four tokens are asked for at once. What the window takes
// is
//            stored from registers, once all of the history is read (W-5).
// Limits     W = 4, rows of whole, aligned groups of four, windows of the inputs' dtype in any layout.
// conv_step_scalars_kernel
// Thread     a channel, element by element. Any W, alignment and dtype of windows.
// Both: fp32 sums in the order of the taps and SiLU, one rounding; windows are copied as bits.
#pragma once

#include "cuda/kernels/conv/kernel.cuh"

namespace kda::cuda {

template <class C>
struct ConvStep {
  using Io = typename C::Io;
  static constexpr int kChannels = C::kChannels, kHistory = C::kWidth - 1, kTokens = 4;
  const ConvWarp<C>& work;

  __device__ __forceinline__ Io* column(int64_t slot, int64_t column) const {
    const WindowRef& w = work.part.in.window;
    return static_cast<Io*>(w.data) + window_offset(w, slot, work.channel, column);
  }
  __device__ __forceinline__ void load(ConvVector<C>& x, int64_t slot, int64_t at) const {
    const WindowRef& w = work.part.in.window;
    const Io* from = column(slot, at);
    if (w.vectors) return x.load(from);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) x.element[c] = from[c * w.channel_stride];
  }
  __device__ __forceinline__ void store(const ConvVector<C>& x, int64_t slot, int64_t at) const {
    const WindowRef& w = work.part.in.window;
    Io* to = column(slot, at);
    if (w.vectors) return x.store(to);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) to[c * w.channel_stride] = x.element[c];
  }

  // The row's history; in records mode the window is folded on the way.
  __device__ __forceinline__ void load_history(ConvVector<C> (&history)[kHistory]) const {
    const ConvRow& row = work.row;
    const bool folds = work.p.rule.mode == ConvMode::kRecords && row.offset > 0;
    const int64_t first = folds || work.p.rule.mode == ConvMode::kColumns ? row.offset : 0;
    if (folds || !row.fresh) {
#pragma unroll
      for (int i = 0; i < kHistory; ++i) load(history[i], row.read_slot, first + i);
    }
    if (folds) {
#pragma unroll
      for (int i = 0; i < kHistory; ++i) store(history[i], row.read_slot, i);
    }
    if (!row.fresh) return;
#pragma unroll
    for (int i = 0; i < kHistory; ++i) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) from_fp32(0.0f, history[i].element[c]);
    }
  }

  __device__ __forceinline__ void run() const {
    const ConvRow& row = work.row;
    const int64_t length = row.span.length;
    const WindowMove move = window_move(row, work.p.rule, C::kWidth);
    const auto keep = [&](int64_t i, const ConvVector<C>& x) {
      if (i >= move.from && i < move.from + move.count) store(x, row.write_slot, move.to + i - move.from);
    };
    ConvVector<C> history[kHistory], tokens[kTokens];
    float w[kChannels][C::kWidth], past[kHistory][kChannels];
    const auto load_tokens = [&](int64_t t) {
#pragma unroll
      for (int r = 0; r < kTokens; ++r) {
        if (t + r < length) tokens[r].load(work.input(t + r));
      }
    };
    work.load_taps(w, C::kWidth);
    load_tokens(0);
    load_history(history);
#pragma unroll
    for (int i = 0; i < kHistory; ++i) {
      keep(i, history[i]);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) past[i][c] = to_fp32(history[i].element[c]);
    }
    for (int64_t t = 0; t < length; t += kTokens) {
      if (t > 0) load_tokens(t);
#pragma unroll
      for (int r = 0; r < kTokens; ++r) {
        if (t + r >= length) break;
        keep(kHistory + t + r, tokens[r]);
        ConvVector<C> y;
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          const float x = to_fp32(tokens[r].element[c]);
          from_fp32(work.template advance<false>(w[c], past, c, x, C::kWidth), y.element[c]);
        }
        if (Io* to = work.output(t + r)) y.store(to);
      }
    }
  }
};

template <class C>
__global__ void __launch_bounds__(128) conv_step_kernel(const __grid_constant__ ConvParams p) {
  touch_parameters(p);
  int32_t group = static_cast<int32_t>(blockIdx.x * 4 + threadIdx.x / 32);
  int part = 0;
  while (part + 1 < p.parts && group >= p.part[part].groups) group -= p.part[part++].groups;
  const ConvPart& where = p.part[part];
  const int32_t channel = (group * 32 + static_cast<int32_t>(threadIdx.x % 32)) * C::kChannels;
  const int64_t n = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  wait_for_previous_grid();
  if (n >= p.sequences.count || n >= active_sequences(p.sequences) || channel >= where.channels) return;
  const ConvRow row = conv_row(p.rule, p.records, p.has_pool != 0, p.sequences, n);
  const ConvWarp<C> work{p, where, row, channel, 0, row.span.length};
  if (!row.active) return work.zero();
  ConvStep<C>{work}.run();
}

inline __global__ void __launch_bounds__(128) conv_step_scalars_kernel(const __grid_constant__ ConvParams p) {
  touch_parameters(p);
  int32_t channel = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  int part = 0;
  while (part + 1 < p.parts && channel >= p.part[part].channels) channel -= p.part[part++].channels;
  const ConvPart& where = p.part[part];
  const int64_t n = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  wait_for_previous_grid();
  if (n >= p.sequences.count || n >= active_sequences(p.sequences) || channel >= where.channels) return;
  const ConvRow row = conv_row(p.rule, p.records, p.has_pool != 0, p.sequences, n);
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

}  // namespace kda::cuda

// Columns and records mode (spec W-3, W-4): few tokens a row.
//
// conv_step_kernel
// Grid       x = groups of a warp's channels, four a block; y, z = sequence.
// Warp       lanes own 4 channels; their history, taps and four tokens are asked for at once. What the window
//            takes is stored from registers, once all of the history is read (W-5). Loops are rolled: a call lasts
//            a few microseconds, and every 128 bytes of code are fetched once by each multiprocessor.
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
  __device__ __forceinline__ void load(ConvVector<C>& x, const Io* from) const {
    const WindowRef& w = work.part.in.window;
    if (w.vectors) return x.load(from);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) x.element[c] = from[c * w.channel_stride];
  }
  __device__ __forceinline__ void store(const ConvVector<C>& x, Io* to) const {
    const WindowRef& w = work.part.in.window;
    if (w.vectors) return x.store(to);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) to[c * w.channel_stride] = x.element[c];
  }

  __device__ __forceinline__ void load_tokens(ConvVector<C> (&tokens)[kTokens], int64_t t) const {
    const Io* from = work.input(t);
#pragma unroll
    for (int r = 0; r < kTokens; ++r, from += work.part.in.x_row) {
      if (t + r < work.row.span.length) tokens[r].load(from);
    }
  }

  __device__ __forceinline__ void load_history(ConvVector<C> (&history)[kHistory]) const {
    const Io* from = column(work.row.read_slot, work.row.offset);
#pragma unroll
    for (int i = 0; i < kHistory; ++i, from += work.part.in.window.column_stride) load(history[i], from);
  }

  // The first of some values; the others move up.
  template <int kCount>
  __device__ static __forceinline__ ConvVector<C> take(ConvVector<C> (&x)[kCount]) {
    const ConvVector<C> first = x[0];
#pragma unroll
    for (int i = 0; i + 1 < kCount; ++i) x[i] = x[i + 1];
    return first;
  }

  __device__ __forceinline__ void run() const {
    const ConvRow& row = work.row;
    const int64_t length = row.span.length, columns = work.part.in.window.column_stride;
    WindowMove move = window_move(row, work.p.rule, C::kWidth);
    Io* kept = column(row.write_slot, move.to);
    const auto keep = [&](const ConvVector<C>& x) {
      if (move.from-- > 0 || move.count-- <= 0) return;
      store(x, kept);
      kept += columns;
    };
    ConvVector<C> history[kHistory], tokens[kTokens];
    float w[kChannels][C::kWidth], past[kHistory][kChannels];
    work.load_taps(w, C::kWidth);
    load_tokens(tokens, 0);
    // In records mode the window is folded on the way.
    const bool folds = work.p.rule.mode == ConvMode::kRecords && row.offset > 0;
    if (folds || !row.fresh) load_history(history);
    Io* folded = column(row.read_slot, 0);
#pragma unroll 1
    for (int i = 0; i < kHistory; ++i, folded += columns) {
      ConvVector<C> x = take(history);
      if (folds) store(x, folded);
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
        if (row.fresh) from_fp32(0.0f, x.element[c]);
      keep(x);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
#pragma unroll
        for (int j = 0; j + 1 < kHistory; ++j) past[j][c] = past[j + 1][c];
        past[kHistory - 1][c] = to_fp32(x.element[c]);
      }
    }
#pragma unroll 1
    for (int64_t t = 0; t < length; ++t) {
      if (t > 0 && t % kTokens == 0) load_tokens(tokens, t);
      const ConvVector<C> x = take(tokens);
      keep(x);
      ConvVector<C> y;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        from_fp32(work.template advance<false>(w[c], past, c, to_fp32(x.element[c]), C::kWidth), y.element[c]);
      }
      if (Io* to = work.output(t)) y.store(to);
    }
  }
};

template <class C>
__global__ void __launch_bounds__(128, sizeof(typename C::Io) == 2 ? 8 : 6)
    conv_step_kernel(const __grid_constant__ ConvParams p) {
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

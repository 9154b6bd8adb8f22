// The stream of a channel: the W-1 entries of its history, then its raw inputs (spec W). Shared by the conv kernels
// and decode_step, which therefore agree bit for bit (L-8).
#pragma once

#include "cuda/kernels/common/math.cuh"
#include "cuda/kernels/conv/params.h"

namespace kda::cuda {

// Element bits of a window or an input with their dtype; none: a fresh row's zero.
struct StreamElement {
  unsigned bits = 0;
  Dtype dtype = Dtype::kFp32;
};

__device__ __forceinline__ unsigned element_bits(const void* p, int64_t i, Dtype dtype) {
  return dtype == Dtype::kFp32 ? static_cast<const unsigned*>(p)[i] : static_cast<const unsigned short*>(p)[i];
}
__device__ __forceinline__ float element_value(unsigned bits, Dtype dtype) {
  if (dtype == Dtype::kBf16) return __uint_as_float(bits << 16);
  if (dtype == Dtype::kFp16) return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  return __uint_as_float(bits);
}

__device__ __forceinline__ int64_t window_offset(const WindowRef& w, int64_t slot, int64_t channel, int64_t column) {
  return slot * w.slot_stride + channel * w.channel_stride + column * w.column_stride;
}

// stream[i] of a channel, i in [0, W-1 + length).
__device__ __forceinline__ StreamElement stream_at(const ConvChannels& c, const ConvRow& row, const ConvRule& rule,
                                                   Dtype io, int32_t width, int64_t channel, int64_t i) {
  if (i >= width - 1) {
    const int64_t t = row.span.begin + i - (width - 1);
    return {element_bits(c.x, row.span.batch * c.x_batch + t * c.x_row + channel, io), io};
  }
  if (row.fresh) return {0u, c.window.dtype};
  const int64_t first = rule.mode == ConvMode::kColumns ? row.offset : 0;
  return {element_bits(c.window.data, window_offset(c.window, row.read_slot, channel, first + i), c.window.dtype),
          c.window.dtype};
}

// Stores an element into a window: the same bits, or widened from the io dtype (P-2).
__device__ __forceinline__ void store_in_window(const WindowRef& w, int64_t slot, int64_t channel, int64_t column,
                                                const StreamElement& e) {
  const int64_t to = window_offset(w, slot, channel, column);
  if (w.dtype == Dtype::kFp32) static_cast<unsigned*>(w.data)[to] = __float_as_uint(element_value(e.bits, e.dtype));
  else static_cast<unsigned short*>(w.data)[to] = static_cast<unsigned short>(e.bits);
}

// window[to + i] := stream[from + i], i < count, of one channel. Columns move down, so in place ascending order is
// safe.
__device__ __forceinline__ void copy_stream(const ConvChannels& c, const ConvRow& row, const ConvRule& rule, Dtype io,
                                            int32_t width, int64_t channel, int64_t from, int64_t slot, int64_t to,
                                            int64_t count) {
#pragma unroll 1
  for (int64_t i = 0; i < count; ++i) {
    store_in_window(c.window, slot, channel, to + i, stream_at(c, row, rule, io, width, channel, from + i));
  }
}

// What of a channel's stream the window after the row's tokens takes (W-2, W-3, W-4): stream[from + i] becomes column
// to + i, i < count. Rows of no tokens that are kept have nothing to store: their bits stay (P-11).
struct WindowMove {
  int64_t from = 0, to = 0, count = 0;
};
__device__ __forceinline__ WindowMove window_move(const ConvRow& row, const ConvRule& rule, int32_t width) {
  const int64_t length = row.span.length, history = width - 1;
  if (row.write_slot < 0) return {};
  if (rule.mode == ConvMode::kRecords) return {history, history, length};
  if (length == 0 && !row.fresh && rule.mode == ConvMode::kColumns) return {};
  if (rule.mode == ConvMode::kPrefill || rule.final_window || length == 0) return {length, 0, history};
  return {1, 0, history - 1 + length};
}

__device__ __forceinline__ void store_window(const ConvChannels& c, const ConvRow& row, const ConvRule& rule,
                                             Dtype io, int32_t width, int64_t channel) {
  const WindowMove move = window_move(row, rule, width);
  copy_stream(c, row, rule, io, width, channel, move.from, row.write_slot, move.to, move.count);
}

// Records mode with fold: columns [offset, offset + W-1) of the window become its first (W-4).
__device__ __forceinline__ void fold_window(const WindowRef& w, const ConvRow& row, int32_t width, int64_t channel) {
#pragma unroll 1
  for (int i = 0; i < width - 1; ++i) {
    const int64_t from = window_offset(w, row.read_slot, channel, row.offset + i);
    store_in_window(w, row.read_slot, channel, i, {element_bits(w.data, from, w.dtype), w.dtype});
  }
}

// W-1: the sum in order of the taps, the bias if there is one, SiLU.
template <int kWidth>
__device__ __forceinline__ float conv_value(const float* w, const float* x, bool has_bias, float bias,
                                            bool activation) {
  float sum = __fmul_rn(w[0], x[0]);
#pragma unroll
  for (int j = 1; j < kWidth; ++j) sum = __fmaf_rn(w[j], x[j], sum);
  if (has_bias) sum = __fadd_rn(sum, bias);
  return activation ? silu(sum) : sum;
}

// The same for a width known at run time.
__device__ __forceinline__ float conv_value_at(const ConvChannels& c, const ConvRow& row, const ConvRule& rule,
                                               Dtype io, int32_t width, int64_t channel, int64_t t, bool activation) {
  const float* w = c.weight + channel * width;
  float sum = 0.0f;
#pragma unroll 1
  for (int j = 0; j < width; ++j) {
    const StreamElement e = stream_at(c, row, rule, io, width, channel, t + j);
    const float x = element_value(e.bits, e.dtype);
    sum = j == 0 ? __fmul_rn(w[0], x) : __fmaf_rn(w[j], x, sum);
  }
  if (c.bias != nullptr) sum = __fadd_rn(sum, c.bias[channel]);
  return activation ? silu(sum) : sum;
}

}  // namespace kda::cuda

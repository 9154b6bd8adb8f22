// The short convolution over a tile of channels (spec W-1..W-5), shared by conv and decode_step.
//
// y_t = io(silu(Σ_j w_j·x_{t-W+1+j} [+ bias])): lanes are channels, taps are added in ascending j, all in fp32.
// Every channel is computed on its own, so tiles, parts and modes give the same bits (L-9, W-5).
// With `stream` = the context of W-1 inputs followed by the row's inputs: rows t..t+W-1 of it make y_t. The first
// W-1 outputs go through fp32 copies of context and inputs, all others read the inputs in place, kTokens rows at a
// time so that a converted input serves several outputs.
// Windows move after the outputs that need them (W-5); columns move as bits (W-1), in ascending order, which is safe
// in place because every column moves down.
#if defined(KDA_CPU_SIMD_CONV_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_SIMD_CONV_INL_H_
#undef KDA_CPU_SIMD_CONV_INL_H_
#else
#define KDA_CPU_SIMD_CONV_INL_H_
#endif

#include <hwy/cache_control.h>

#include <algorithm>

#include "cpu/conv_call.h"
#include "cpu/simd/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// ---- Sums -----------------------------------------------------------------------------------------------

// Rows that the next group reads and writes, asked for while this one computes; `count` may be 0.
template <class In, class Out>
struct NextRows {
  const In* const* in;
  Out* const* out;
  int count;

  HWY_INLINE void prefetch(int64_t c) const {
    for (int i = 0; i < count; ++i) {
      hwy::Prefetch(in[i] + c);
      hwy::Prefetch(out[i] + c);
    }
  }
};

// Outputs of kTokens neighbouring tokens from stream rows rows[0 .. kTokens + W - 2]. kWidth 0: W at run time.
template <int kTokens, int kWidth, class In, class Out>
HWY_INLINE void convolve_group(const ConvForm& form, const float* taps, bool bias, int64_t n, const In* const* rows,
                               Out* const* out, const NextRows<In, Out>& next) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int kMaxRows = kTokens - 1 + (kWidth > 0 ? kWidth : static_cast<int>(kMaxConvWidth));
  const int width = kWidth > 0 ? kWidth : static_cast<int>(form.width);
  const bool activation = form.activation;
  const auto block = [&](int64_t c, int64_t left) HWY_ATTR {
    const bool whole = left >= lanes;
    VF x[kMaxRows], y[kTokens];
    for (int r = 0; r < kTokens - 1 + width; ++r) {
      x[r] = whole ? load(d, rows[r] + c) : load_n(d, rows[r] + c, static_cast<size_t>(left));
    }
    const auto first = hn::LoadU(d, taps + c);
    for (int t = 0; t < kTokens; ++t) y[t] = hn::Mul(first, x[t]);
    for (int j = 1; j < width; ++j) {
      const auto tap = hn::LoadU(d, taps + j * kConvTile + c);
      for (int t = 0; t < kTokens; ++t) y[t] = hn::MulAdd(tap, x[t + j], y[t]);
    }
    if (bias) {
      const auto b = hn::LoadU(d, taps + width * kConvTile + c);
      for (int t = 0; t < kTokens; ++t) y[t] = hn::Add(y[t], b);
    }
    for (int t = 0; t < kTokens; ++t) {
      if (activation) y[t] = silu(d, y[t]);
      if (whole) store(d, y[t], out[t] + c);
      else store_n(d, y[t], out[t] + c, static_cast<size_t>(left));
    }
  };
  constexpr int64_t kLine = 64 / sizeof(In);
  int64_t c = 0;
  for (; c + lanes <= n; c += lanes) {
    if (c % kLine == 0) next.prefetch(c);
    block(c, lanes);
  }
  if (c < n) block(c, n - c);
}

// `count` outputs over channels [0, n) of the rows given; out[t] may be null: that row is skipped.
template <int kWidth, class In, class Out>
HWY_INLINE void convolve_rows(const ConvForm& form, const float* taps, bool bias, int64_t n, const In* const* rows,
                              Out* const* out, int64_t count) {
  constexpr int kTokens = 4;
  int64_t t = 0;
  for (; t + kTokens <= count; t += kTokens) {
    if (std::find(out + t, out + t + kTokens, nullptr) != out + t + kTokens) break;
    const int ahead = static_cast<int>(std::min<int64_t>(kTokens, count - t - kTokens));
    const NextRows<In, Out> next{rows + t + kTokens + form.width - 1, out + t + kTokens, ahead};
    convolve_group<kTokens, kWidth>(form, taps, bias, n, rows + t, out + t, next);
  }
  for (; t < count; ++t) {
    const NextRows<In, Out> none{nullptr, nullptr, 0};
    if (out[t] != nullptr) convolve_group<1, kWidth>(form, taps, bias, n, rows + t, out + t, none);
  }
}

template <class In, class Out>
HWY_NOINLINE void convolve(const ConvForm& form, const float* taps, bool bias, int64_t n, const In* const* rows,
                           Out* const* out, int64_t count) {
  if (form.width == 4) convolve_rows<4>(form, taps, bias, n, rows, out, count);
  else convolve_rows<0>(form, taps, bias, n, rows, out, count);
}

// Taps of channels [c0, c0 + n), turned from [channel][j] to [j][channel].
HWY_INLINE void load_taps(const ConvForm& form, const ConvPart& part, int64_t c0, int64_t n, float* taps) {
  const auto* weight = static_cast<const float*>(part.weight.data) + c0 * form.width;
  int64_t c = 0;
#if HWY_TARGET != HWY_SCALAR
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; form.width == 4 && c + lanes <= n; c += lanes) {
    VF a, b, e, f;
    hn::LoadInterleaved4(d, weight + c * 4, a, b, e, f);
    hn::StoreU(a, d, taps + c);
    hn::StoreU(b, d, taps + kConvTile + c);
    hn::StoreU(e, d, taps + 2 * kConvTile + c);
    hn::StoreU(f, d, taps + 3 * kConvTile + c);
  }
#endif
  for (; c < n; ++c) {
    for (int64_t j = 0; j < form.width; ++j) taps[j * kConvTile + c] = weight[c * form.width + j];
  }
  float* bias = taps + form.width * kConvTile;
  if (present(part.bias))
    std::memcpy(bias, static_cast<const float*>(part.bias.data) + c0, static_cast<size_t>(n) * 4);
}

// ---- Windows --------------------------------------------------------------------------------------------

HWY_INLINE const char* input_row(const ConvForm& form, const ConvPart& part, const ConvRow& row, int64_t c0,
                                 int64_t t) {
  return token_row(part.x, row.span, 2, t) + c0 * static_cast<int64_t>(dtype_size(form.io_dtype));
}

template <class T>
HWY_INLINE void load_strided(const char* from, int64_t stride, int64_t n, float* to) {
  for (int64_t c = 0; c < n; ++c) to[c] = to_float(reinterpret_cast<const T*>(from)[c * stride]);
}

// One column of a pool, channels [c0, c0 + n), as floats.
HWY_INLINE void load_column(const ConvPool& pool, int64_t slot, int64_t column, int64_t c0, int64_t n, float* to) {
  const char* from = pool.at(slot, column, c0);
  if (pool.channel_stride == 1) return load_any(pool.dtype, from, n, to);
  switch (pool.dtype) {
    case KDA_FP32: return load_strided<float>(from, pool.channel_stride, n, to);
    case KDA_BF16: return load_strided<bf16>(from, pool.channel_stride, n, to);
    default: return load_strided<fp16>(from, pool.channel_stride, n, to);
  }
}

// Column := input t. Inputs of the pool's dtype are copied as bits, others are widened (to fp32, exactly).
HWY_INLINE void store_input(const ConvForm& form, const ConvPart& part, const ConvPool& pool, const ConvRow& row,
                            int64_t t, int64_t slot, int64_t column, int64_t c0, int64_t n) {
  const char* from = input_row(form, part, row, c0, t);
  char* to = pool.at(slot, column, c0);
  if (pool.dtype == form.io_dtype) return ConvPool::copy(from, 1, to, pool.channel_stride, n, pool.size);
  const auto size = static_cast<int64_t>(dtype_size(form.io_dtype));
  auto* wide = reinterpret_cast<float*>(to);
  for (int64_t c = 0; c < n; ++c) wide[c * pool.channel_stride] = load_one(form.io_dtype, from + c * size);
}

// Columns column .. column + count - 1 of `slot` := stream[first ..] of the row.
HWY_INLINE void store_stream(const ConvForm& form, const ConvPart& part, const ConvPool& pool, const ConvRow& row,
                             int64_t first, int64_t slot, int64_t column, int64_t count, int64_t c0, int64_t n) {
  const int64_t context = form.width - 1;
  const int64_t offset = form.mode == KDA_CONV_COLUMNS ? row.offset : 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t s = first + i;
    if (s >= context) store_input(form, part, pool, row, s - context, slot, column + i, c0, n);
    else if (row.fresh) pool.zero_column(slot, column + i, c0, n);
    else pool.copy_column(row.read_slot, offset + s, slot, column + i, c0, n);
  }
}

// The window after the row's inputs (W-2, W-3, W-4), for channels [c0, c0 + n).
HWY_INLINE void store_window(const ConvForm& form, const ConvPart& part, const ConvPool& pool, const ConvRow& row,
                             int64_t c0, int64_t n) {
  if (row.write_slot < 0) return;
  const int64_t context = form.width - 1, length = row.span.length;
  if (form.mode == KDA_CONV_RECORDS) {
    return store_stream(form, part, pool, row, context, row.write_slot, context, length, c0, n);
  }
  if (length == 0 && !row.fresh && form.mode == KDA_CONV_COLUMNS) return;  // P-11
  if (form.keeps_tail() || length == 0) {
    return store_stream(form, part, pool, row, length, row.write_slot, 0, context, c0, n);
  }
  store_stream(form, part, pool, row, 1, row.write_slot, 0, context - 1 + length, c0, n);
}

// Records mode with fold: the committed window moves to the front first (W-4).
HWY_INLINE void fold_window(const ConvForm& form, const ConvPool& pool, const ConvRow& row, int64_t c0, int64_t n) {
  if (form.mode != KDA_CONV_RECORDS || row.offset == 0) return;
  for (int64_t i = 0; i < form.width - 1; ++i) {
    pool.copy_column(row.read_slot, row.offset + i, row.read_slot, i, c0, n);
  }
}

// ---- Rows of a tile -------------------------------------------------------------------------------------

// The context of a row's channels [c0, c0 + n) as floats in scratch rows 0 .. W-2.
HWY_INLINE void load_context(const ConvForm& form, const ConvPool* pool, const ConvRow& row, int64_t c0, int64_t n,
                             float* history) {
  const int64_t offset = form.mode == KDA_CONV_COLUMNS ? row.offset : 0;
  for (int64_t i = 0; i < form.width - 1; ++i) {
    float* to = history + i * kConvTile;
    if (row.fresh || pool == nullptr) std::memset(to, 0, static_cast<size_t>(n) * sizeof(float));
    else load_column(*pool, row.read_slot, offset + i, c0, n, to);
  }
}

// Outputs of the first min(W - 1, t1) tokens, through fp32 copies of the context and the inputs; returns their
// number.
template <class Io>
HWY_INLINE int64_t convolve_first(const ConvForm& form, const ConvPart& part, const ConvPool* pool,
                                  const ConvRow& row, int64_t c0, int64_t n, int64_t t1, const ConvScratch& s,
                                  Io* const* out) {
  const int64_t context = form.width - 1, first = std::min(t1, context);
  load_context(form, pool, row, c0, n, s.history);
  const float* rows[2 * (kMaxConvWidth - 1)];
  for (int64_t i = 0; i < context + first; ++i) {
    float* at = s.history + i * kConvTile;
    if (i >= context) load_any(form.io_dtype, input_row(form, part, row, c0, i - context), n, at);
    rows[i] = at;
  }
  convolve(form, s.taps, present(part.bias), n, rows, out, first);
  return first;
}

// Outputs of tokens [t0, t1), t1 - t0 <= kConvChunk, into out[t - t0]. With t0 = 0 the context comes from the pool,
// which may not have moved yet; null: the context is zero.
template <class Io>
HWY_INLINE void convolve_tokens(const ConvForm& form, const ConvPart& part, const ConvPool* pool, const ConvRow& row,
                                int64_t c0, int64_t n, int64_t t0, int64_t t1, const ConvScratch& s, Io* const* out) {
  const int64_t context = form.width - 1;
  // Columns of the pool serve as stream rows where they lie if they are rows of io elements.
  const bool in_place = pool != nullptr && !row.fresh && pool->dtype == form.io_dtype && pool->channel_stride == 1;
  const int64_t offset = form.mode == KDA_CONV_COLUMNS ? row.offset : 0;
  const int64_t t = t0 == 0 && !in_place ? convolve_first(form, part, pool, row, c0, n, t1, s, out) : t0;
  if (t >= t1) return;
  const Io* rows[kConvChunk + kMaxConvWidth - 1];
  for (int64_t i = 0; i < t1 - t + context; ++i) {
    const int64_t from = t - context + i;
    const char* at =
        from < 0 ? pool->at(row.read_slot, offset + context + from, c0) : input_row(form, part, row, c0, from);
    rows[i] = reinterpret_cast<const Io*>(at);
  }
  convolve(form, s.taps, present(part.bias), n, rows, out + (t - t0), t1 - t);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_SIMD_CONV_INL_H_

// Column panels: the prefill kernels' form of a state, and the ways in and out of it.
//
// A state St [V, K] lives in scratch as panels of kPanel value columns; panel p holds St[p*kPanel + c, k] at
// [k * kPanel + c]: value columns fill the vector lanes, so that every product with the state is a chain of
// fused multiply-adds over k with a broadcast token factor, and no sum over lanes is ever taken (N-12). Columns
// behind V and rows behind K are padding: computed along with the rest, never stored.
//
// Rows of scratch that hold one token's K channels are kKeyStride floats apart, a compile-time constant that
// puts row offsets into the instructions and keeps rows off each other's cache sets.
#if defined(KDA_CPU_SIMD_PANELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_SIMD_PANELS_INL_H_
#undef KDA_CPU_SIMD_PANELS_INL_H_
#else
#define KDA_CPU_SIMD_PANELS_INL_H_
#endif

#include "cpu/prefill_kernel.h"
#include "cpu/simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

inline constexpr int kLanes = HWY_LANES(float);
// Vectors per panel and most token rows of a register tile: accumulators, one panel row and a broadcast factor
// fill the registers of the target (32 with AVX-512 and NEON, else 16).
#if HWY_TARGET == HWY_AVX3
inline constexpr int kPanelVectors = 2, kTileRows = 12;
#elif HWY_TARGET == HWY_NEON
inline constexpr int kPanelVectors = 4, kTileRows = 6;
#elif HWY_TARGET == HWY_AVX2
inline constexpr int kPanelVectors = 2, kTileRows = 6;
#else
inline constexpr int kPanelVectors = 4, kTileRows = 2;
#endif
inline constexpr int kPanel = kPanelVectors * kLanes;
inline constexpr int64_t kKeyStride = kMaxKeyDim + kRowPad;

// ---- Rows of a dtype known at run time ------------------------------------------------------------------

HWY_INLINE void load_row(kda_dtype dtype, const char* from, int64_t n, float* to) {
  switch (dtype) {
    case KDA_BF16: return load_row(reinterpret_cast<const bf16*>(from), n, to);
    case KDA_FP16: return load_row(reinterpret_cast<const fp16*>(from), n, to);
    default: return load_row(reinterpret_cast<const float*>(from), n, to);
  }
}
HWY_INLINE void store_row(kda_dtype dtype, const float* from, int64_t n, char* to) {
  switch (dtype) {
    case KDA_BF16: return store_row(from, n, reinterpret_cast<bf16*>(to));
    case KDA_FP16: return store_row(from, n, reinterpret_cast<fp16*>(to));
    default: return store_row(from, n, reinterpret_cast<float*>(to));
  }
}
HWY_INLINE float load_scalar(kda_dtype dtype, const char* from) {
  switch (dtype) {
    case KDA_BF16: return to_float(*reinterpret_cast<const bf16*>(from));
    case KDA_FP16: return to_float(*reinterpret_cast<const fp16*>(from));
    default: return *reinterpret_cast<const float*>(from);
  }
}

// ---- Transposition --------------------------------------------------------------------------------------

// to[c][r] = from[r][c] for a square of kLanes x kLanes floats; both aligned to vectors.
HWY_INLINE void transpose_square(const float* from, int64_t from_stride, float* HWY_RESTRICT to, int64_t to_stride) {
#if HWY_MAX_BYTES < 16
  for (int r = 0; r < kLanes; ++r) {
    for (int c = 0; c < kLanes; ++c) to[c * to_stride + r] = from[r * from_stride + c];
  }
#else
  const F32 d;
  const hn::Repartition<double, F32> d64;
  VF x[kLanes], y[kLanes];
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) x[r] = hn::Load(d, from + r * from_stride);
    // 4x4 inside every 128-bit block: block b of y[4g + r] holds column 4b + r of rows 4g .. 4g + 3.
#pragma GCC unroll 4
  for (int g = 0; g < kLanes; g += 4) {
    const auto a = hn::BitCast(d64, hn::InterleaveLower(d, x[g], x[g + 1]));
    const auto b = hn::BitCast(d64, hn::InterleaveUpper(d, x[g], x[g + 1]));
    const auto c = hn::BitCast(d64, hn::InterleaveLower(d, x[g + 2], x[g + 3]));
    const auto e = hn::BitCast(d64, hn::InterleaveUpper(d, x[g + 2], x[g + 3]));
    y[g] = hn::BitCast(d, hn::InterleaveLower(d64, a, c));
    y[g + 1] = hn::BitCast(d, hn::InterleaveUpper(d64, a, c));
    y[g + 2] = hn::BitCast(d, hn::InterleaveLower(d64, b, e));
    y[g + 3] = hn::BitCast(d, hn::InterleaveUpper(d64, b, e));
  }
  // Then the blocks as a matrix: neighbours within 256 bits, and the 256-bit halves.
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
#if HWY_MAX_BYTES == 64
    const VF p0 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(y[4 + r]), y[r]);
    const VF p1 = hn::OddEvenBlocks(y[4 + r], hn::SwapAdjacentBlocks(y[r]));
    const VF p2 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(y[12 + r]), y[8 + r]);
    const VF p3 = hn::OddEvenBlocks(y[12 + r], hn::SwapAdjacentBlocks(y[8 + r]));
    x[r] = hn::ConcatLowerLower(d, p2, p0);
    x[4 + r] = hn::ConcatLowerLower(d, p3, p1);
    x[8 + r] = hn::ConcatUpperUpper(d, p2, p0);
    x[12 + r] = hn::ConcatUpperUpper(d, p3, p1);
#elif HWY_MAX_BYTES == 32
    x[r] = hn::ConcatLowerLower(d, y[4 + r], y[r]);
    x[4 + r] = hn::ConcatUpperUpper(d, y[4 + r], y[r]);
#else
    x[r] = y[r];
#endif
  }
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) hn::Store(x[r], d, to + r * to_stride);
#endif
}

// ---- States ---------------------------------------------------------------------------------------------

// Reads columns [column, column + kPanel) of a state into a panel of padded(K) rows. `rows` is scratch of
// kLanes rows. Columns >= V of a task are those of a segment map and start from the identity (S-3).
HWY_INLINE void load_panel(const HeadTask& task, int64_t column, float* HWY_RESTRICT rows,
                           float* HWY_RESTRICT panel) {
  const int64_t K = task.key_dim;
  const auto size = static_cast<int64_t>(dtype_size(task.initial.dtype));
  if (task.initial.data == nullptr && column + kPanel <= task.value_dim) {
    std::memset(panel, 0, static_cast<size_t>(padded(K) * kPanel) * sizeof(float));
    return;
  }
  for (int block = 0; block < kPanelVectors; ++block) {
    for (int r = 0; r < kLanes; ++r) {
      const int64_t v = column + block * kLanes + r;
      float* row = rows + r * kKeyStride;
      if (task.initial.data != nullptr && v < task.value_dim) {
        load_row(task.initial.dtype, task.initial.data + v * K * size, K, row);
      } else {
        std::memset(row, 0, static_cast<size_t>(padded(K)) * sizeof(float));
        if (v >= task.value_dim && v < task.column_end && v - task.value_dim < K) row[v - task.value_dim] = 1.0f;
      }
    }
    for (int64_t k = 0; k < K; k += kLanes) {
      transpose_square(rows + k, kKeyStride, panel + k * kPanel + block * kLanes, kPanel);
    }
  }
}

// Rounds a panel's columns that lie before `column_end` into the state `to` (N-2).
HWY_INLINE void store_panel(const float* panel, int64_t column, int64_t column_end, int64_t K, const StateRef& to,
                            float* HWY_RESTRICT rows) {
  const auto size = static_cast<int64_t>(dtype_size(to.dtype));
  for (int block = 0; block < kPanelVectors; ++block) {
    const int64_t first = column + block * kLanes;
    if (first >= column_end) return;
    for (int64_t k = 0; k < K; k += kLanes) {
      transpose_square(panel + k * kPanel + block * kLanes, kPanel, rows + k, kKeyStride);
    }
    for (int r = 0; r < kLanes && first + r < column_end; ++r) {
      store_row(to.dtype, rows + r * kKeyStride, K, to.data + (first + r) * K * size);
    }
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_SIMD_PANELS_INL_H_

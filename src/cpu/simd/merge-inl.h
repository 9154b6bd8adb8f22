// Segment merge (spec S-4, S-6): St_{p+1} = St_p M_p + B_p, segment after segment, for a few rows of one head's
// states. Rows are independent; every element is one chain over the input channels k, begun with B (N-12).
#if defined(KDA_CPU_SIMD_MERGE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_SIMD_MERGE_INL_H_
#undef KDA_CPU_SIMD_MERGE_INL_H_
#else
#define KDA_CPU_SIMD_MERGE_INL_H_
#endif

#include "cpu/simd/tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// Up to a vector of a row of n elements from element c on.
HWY_INLINE VF load_part(const float* row, int64_t c, int64_t n) {
  const F32 d;
  return c + kLanes <= n ? hn::LoadU(d, row + c) : load_n(d, row + c, static_cast<size_t>(n - c));
}

// to[r][0, K) = B[r] + from[r] M. from, to [R][kKeyStride]; map_b [R][K], map_m [K][K] dense.
template <int R>
HWY_NOINLINE void tile_merge(const float* HWY_RESTRICT from, const float* HWY_RESTRICT map_b,
                             const float* HWY_RESTRICT map_m, int64_t K, float* HWY_RESTRICT to) {
  const F32 d;
  for (int64_t c = 0; c < K; c += kLanes) {
    VF acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = load_part(map_b + r * K, c, K);
    for (int64_t k = 0; k < K; ++k) {
      const VF m = load_part(map_m + k * K, c, K);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r] = hn::MulAdd(hn::Set(d, from[r * kKeyStride + k]), m, acc[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) hn::Store(acc[r], d, to + r * kKeyStride + c);
  }
}

inline int64_t merge_scratch_bytes(int64_t) {
  return 2 * kTileRows * kKeyStride * static_cast<int64_t>(sizeof(float));
}

inline void merge_rows(const MergeTask& task, int64_t first, int64_t rows, float* now, float* next) {
  const int64_t K = task.key_dim;
  for (int64_t r = 0; r < rows; ++r) {
    if (task.initial != nullptr) load_row(task.initial + (first + r) * K, K, now + r * kKeyStride);
    else std::memset(now + r * kKeyStride, 0, static_cast<size_t>(padded(K)) * sizeof(float));
  }
  for (int64_t p = 0; p < task.segments; ++p) {
    if (task.starts != nullptr) {
      float* const start = task.starts + p * task.start_stride + first * K;
      for (int64_t r = 0; r < rows; ++r) store_row(now + r * kKeyStride, K, start + r * K);
    }
    if (task.present != nullptr && task.present[p * task.present_stride] == 0) continue;  // identity, not read
    const float* const map = task.summaries + p * task.summary_stride;
    KDA_TILE_DISPATCH(rows, kTileRows, tile_merge, now, map + first * K, map + task.value_dim * K, K, next)
    float* const swapped = now;
    now = next;
    next = swapped;
  }
  if (task.final == nullptr) return;
  for (int64_t r = 0; r < rows; ++r) store_row(now + r * kKeyStride, K, task.final + (first + r) * K);
}

inline void merge(const MergeTask& task, void* scratch) {
  float* const now = static_cast<float*>(scratch);
  float* const next = now + kTileRows * kKeyStride;
  for (int64_t row = task.row_begin, size; row < task.row_end; row += size) {
    size = tile_size(task.row_end - row, kTileRows);
    merge_rows(task, row, size, now, next);
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_SIMD_MERGE_INL_H_

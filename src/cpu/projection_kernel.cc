// x·Wᵀ on packed panels (spec L-7): register tiles of R rows by one panel. How many rows a tile has does not enter
// the chain of any element, so a row's bits do not depend on the rows beside it (N-13). Precision: fp32 fused
// multiply-adds; sums restart every kBlock elements of k, which keeps the error of long rows near that of a pairwise
// sum.
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/projection_kernel.cc"
#include <hwy/foreach_target.h>

#include "cpu/projection_call.h"
#include "cpu/simd/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {
namespace {

constexpr int64_t kBlock = 512;
constexpr int kVectorLanes = static_cast<int>(hn::MaxLanes(F32()));
constexpr int kVectors = static_cast<int>(kProjectionPanel) / kVectorLanes;
// Accumulators, two panel vectors or more and a broadcast fit into the registers.
constexpr int kTileRows = HWY_TARGET == HWY_AVX3 ? 12 : HWY_TARGET == HWY_NEON || HWY_TARGET == HWY_AVX2 ? 3 : 1;

template <int R, class W>
HWY_NOINLINE void tile(const float* HWY_RESTRICT x, int64_t stride, const W* HWY_RESTRICT panel, int64_t cols,
                       float* HWY_RESTRICT out) {
  const F32 d;
  for (int64_t k0 = 0; k0 < cols; k0 += kBlock) {
    const int64_t k1 = k0 + kBlock < cols ? k0 + kBlock : cols;
    VF acc[R][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 32
      for (int c = 0; c < kVectors; ++c) acc[r][c] = hn::Zero(d);
    }
    for (int64_t k = k0; k < k1; ++k) {
      VF w[kVectors];
#pragma GCC unroll 32
      for (int c = 0; c < kVectors; ++c) w[c] = load(d, panel + k * kProjectionPanel + c * kVectorLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const VF factor = hn::Set(d, x[r * stride + k]);
#pragma GCC unroll 32
        for (int c = 0; c < kVectors; ++c) acc[r][c] = hn::MulAdd(factor, w[c], acc[r][c]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 32
      for (int c = 0; c < kVectors; ++c) {
        float* const at = out + r * kProjectionPanel + c * kVectorLanes;
        hn::StoreU(k0 == 0 ? acc[r][c] : hn::Add(hn::LoadU(d, at), acc[r][c]), d, at);
      }
    }
  }
}

template <int R, class W>
HWY_INLINE void rest(const float* x, int64_t stride, int64_t rows, const W* panel, int64_t cols, float* out) {
  if constexpr (R > 0) {
    if (rows == R) return tile<R>(x, stride, panel, cols, out);
    rest<R - 1>(x, stride, rows, panel, cols, out);
  }
}

template <class W>
void multiply_panel(const float* x, int64_t stride, int64_t rows, const W* panel, int64_t cols, float* out) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) {
    tile<kTileRows>(x + r * stride, stride, panel, cols, out + r * kProjectionPanel);
  }
  rest<kTileRows - 1>(x + r * stride, stride, rows - r, panel, cols, out + r * kProjectionPanel);
}

void multiply(const float* x, int64_t stride, int64_t rows, const ProjectionPanels& panels, int64_t panel,
              float* out) {
  const int64_t at = panel * panels.cols * kProjectionPanel;
  if (panels.dtype == KDA_BF16) {
    return multiply_panel(x, stride, rows, static_cast<const bf16*>(panels.data) + at, panels.cols, out);
  }
  multiply_panel(x, stride, rows, static_cast<const float*>(panels.data) + at, panels.cols, out);
}

void load_elements(kda_dtype dtype, const void* from, int64_t n, float* to) { load_any(dtype, from, n, to); }

void store_elements(kda_dtype dtype, const float* from, const float* bias, int64_t n, void* to) {
  float sum[kProjectionPanel];
  if (bias == nullptr) return store_any(dtype, from, n, to);
  for (int64_t i = 0; i < n; ++i) sum[i] = from[i] + bias[i];
  store_any(dtype, sum, n, to);
}

}  // namespace

const ProjectionFunctions* projection_table() {
  static constexpr ProjectionFunctions table = {multiply, load_elements, store_elements};
  return &table;
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {
HWY_EXPORT(projection_table);
const ProjectionFunctions& projection_functions(Isa isa) { return *KDA_CPU_TABLE(projection_table, isa)(); }
}  // namespace kda::cpu
#endif

#include "reference/product.h"

#include <cmath>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kda::reference {
namespace {

struct Rows {
  const double* x;
  int64_t x_stride;
  const double* panel;
  int64_t n;
  double* y;
  int64_t y_stride;
};

// Every machine without a form of its own; slow where fma() is a call, and right.
template <int kRows>
void tile_plain(const Rows& t) {
  for (int r = 0; r < kRows; ++r) {
    double sums[kPanelColumns];
    for (int64_t c = 0; c < kPanelColumns; ++c) sums[c] = t.y[r * t.y_stride + c];
    for (int64_t k = 0; k < t.n; ++k) {
      const double a = t.x[r * t.x_stride + k];
      for (int64_t c = 0; c < kPanelColumns; ++c) sums[c] = std::fma(a, t.panel[k * kPanelColumns + c], sums[c]);
    }
    for (int64_t c = 0; c < kPanelColumns; ++c) t.y[r * t.y_stride + c] = sums[c];
  }
}

#if defined(__x86_64__)
template <int kRows>
__attribute__((target("avx512f"))) void tile_avx512(const Rows& t) {
  __m512d sums[kRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    sums[r][0] = _mm512_load_pd(t.y + r * t.y_stride);
    sums[r][1] = _mm512_load_pd(t.y + r * t.y_stride + 8);
  }
  for (int64_t k = 0; k < t.n; ++k) {
    const __m512d b0 = _mm512_load_pd(t.panel + k * kPanelColumns);
    const __m512d b1 = _mm512_load_pd(t.panel + k * kPanelColumns + 8);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512d a = _mm512_set1_pd(t.x[r * t.x_stride + k]);
      sums[r][0] = _mm512_fmadd_pd(a, b0, sums[r][0]);
      sums[r][1] = _mm512_fmadd_pd(a, b1, sums[r][1]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    _mm512_store_pd(t.y + r * t.y_stride, sums[r][0]);
    _mm512_store_pd(t.y + r * t.y_stride + 8, sums[r][1]);
  }
}

// Half a panel at a time: its sums of four rows leave room in the sixteen registers.
template <int kRows>
__attribute__((target("avx2,fma"))) void tile_avx2(const Rows& t) {
  for (int64_t c = 0; c < kPanelColumns; c += 8) {
    __m256d sums[kRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sums[r][0] = _mm256_load_pd(t.y + r * t.y_stride + c);
      sums[r][1] = _mm256_load_pd(t.y + r * t.y_stride + c + 4);
    }
    for (int64_t k = 0; k < t.n; ++k) {
      const __m256d b0 = _mm256_load_pd(t.panel + k * kPanelColumns + c);
      const __m256d b1 = _mm256_load_pd(t.panel + k * kPanelColumns + c + 4);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m256d a = _mm256_broadcast_sd(t.x + r * t.x_stride + k);
        sums[r][0] = _mm256_fmadd_pd(a, b0, sums[r][0]);
        sums[r][1] = _mm256_fmadd_pd(a, b1, sums[r][1]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      _mm256_store_pd(t.y + r * t.y_stride + c, sums[r][0]);
      _mm256_store_pd(t.y + r * t.y_stride + c + 4, sums[r][1]);
    }
  }
}
#endif

struct Tiles {
  int64_t rows;  // of the large one
  void (*large)(const Rows&);
  void (*single)(const Rows&);
};

Tiles choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return {8, tile_avx512<8>, tile_avx512<1>};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {4, tile_avx2<4>, tile_avx2<1>};
#endif
  return {4, tile_plain<4>, tile_plain<1>};
}

}  // namespace

void add_product(const double* x, int64_t x_stride, int64_t rows, const double* panel, int64_t n, double* y,
                 int64_t y_stride) {
  static const Tiles tiles = choose();
  int64_t r = 0;
  const auto at = [&](int64_t row) {
    return Rows{x + row * x_stride, x_stride, panel, n, y + row * y_stride, y_stride};
  };
  for (; r + tiles.rows <= rows; r += tiles.rows) tiles.large(at(r));
  for (; r < rows; ++r) tiles.single(at(r));
}

}  // namespace kda::reference

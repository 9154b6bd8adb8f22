// Register tiles of the chunked prefill: each element of a result is one chain of fused multiply-adds in a fixed
// order (over k, or over tokens j), kept in one register lane. How rows and columns are grouped into tiles,
// how long the tail is, what else runs: none of it enters a chain (H-9, N-12, N-13).
//
//   tile_products   rows x panel over k:        acc[r][c]  = sum_k rows[r][k] * St[c][k]        (K~ St^T, Q~ St^T)
//   tile_scores     rows x tokens over k:       A_ij, M_ij with running decay products          (H-1, H-3 b)
//   tile_solve      forward substitution:       U_i = r_i - sum_{j<i} beta_i A_ij U_j           (H-8)
//   tile_outputs    triangle x panel over j:    O_i = scale (o_i + sum_{j<=i} M_ij U_j)         (H-1)
//   tile_update     channels x panel over j:    St = St e^Gamma + sum_j k^_j U_j                (H-1)
//
// Entries above a diagonal are never read, so nothing has to be masked by multiplication (H-7).
#if defined(KDA_CPU_SIMD_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_SIMD_TILES_INL_H_
#undef KDA_CPU_SIMD_TILES_INL_H_
#else
#define KDA_CPU_SIMD_TILES_INL_H_
#endif

#include "cpu/simd/panels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// Tokens of an inner chunk; the grid of 64 (H-10) is a multiple of it.
inline constexpr int kChunk = 16;
// Token rows of a score tile: 2 * rows accumulators, the running column factors and three broadcasts.
inline constexpr int kScoreRows = HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON ? 8 : 4;
inline constexpr int kSolveRows = 4;

// Calls FUNCTION<R>(args) for R = rows, 1 <= rows <= MAX <= 12.
// clang-format off
#define KDA_TILE_CASE(R, MAX, FUNCTION, ...) \
  case R: if constexpr (R <= MAX) FUNCTION<R>(__VA_ARGS__); break;
#define KDA_TILE_DISPATCH(rows, MAX, FUNCTION, ...) \
  switch (rows) {                                   \
    KDA_TILE_CASE(1, MAX, FUNCTION, __VA_ARGS__)   \
    KDA_TILE_CASE(2, MAX, FUNCTION, __VA_ARGS__)   \
    KDA_TILE_CASE(3, MAX, FUNCTION, __VA_ARGS__)   \
    KDA_TILE_CASE(4, MAX, FUNCTION, __VA_ARGS__)   \
    KDA_TILE_CASE(5, MAX, FUNCTION, __VA_ARGS__)   \
    KDA_TILE_CASE(6, MAX, FUNCTION, __VA_ARGS__)   \
    KDA_TILE_CASE(7, MAX, FUNCTION, __VA_ARGS__)   \
    KDA_TILE_CASE(8, MAX, FUNCTION, __VA_ARGS__)   \
    KDA_TILE_CASE(9, MAX, FUNCTION, __VA_ARGS__)   \
    KDA_TILE_CASE(10, MAX, FUNCTION, __VA_ARGS__)  \
    KDA_TILE_CASE(11, MAX, FUNCTION, __VA_ARGS__)  \
    KDA_TILE_CASE(12, MAX, FUNCTION, __VA_ARGS__)  \
  }
// clang-format on

// Size of the next tile when `left` rows remain: as even as possible, at most `most`.
HWY_INLINE int64_t tile_size(int64_t left, int64_t most) {
  const int64_t tiles = (left + most - 1) / most;
  return (left + tiles - 1) / tiles;
}

// rows [R][kKeyStride], panel [K][kPanel], out [R][kPanel].
template <int R>
HWY_NOINLINE void tile_products(const float* HWY_RESTRICT rows, const float* HWY_RESTRICT panel, int64_t K,
                                float* HWY_RESTRICT out) {
  const F32 d;
  VF acc[R][kPanelVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kPanelVectors; ++c) acc[r][c] = hn::Zero(d);
  }
  for (int64_t k = 0; k < K; ++k) {
    VF s[kPanelVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kPanelVectors; ++c) s[c] = hn::Load(d, panel + k * kPanel + c * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const VF factor = hn::Set(d, rows[r * kKeyStride + k]);
#pragma GCC unroll 4
      for (int c = 0; c < kPanelVectors; ++c) acc[r][c] = hn::MulAdd(factor, s[c], acc[r][c]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kPanelVectors; ++c) hn::Store(acc[r][c], d, out + r * kPanel + c * kLanes);
  }
}

// Scores of token rows [row, row + R) against the kLanes tokens from `column`. `columns` [K][kLanes] holds
// k_j o e^Gamma(j, row - 1) in lane j - column (k_j itself where j >= row) and is carried on to the last row.
//   a [R][kChunk] = beta_i sum_k k_i k_j e^Gamma(j,i), valid for j < i;   m likewise with q_i, valid for j <= i.
template <int R>
HWY_NOINLINE void tile_scores(const float* HWY_RESTRICT decay, const float* HWY_RESTRICT keys,
                              const float* HWY_RESTRICT queries, const float* HWY_RESTRICT beta,
                              float* HWY_RESTRICT columns, int64_t K, int64_t earlier, float* HWY_RESTRICT a,
                              float* HWY_RESTRICT m) {
  const F32 d;
  VF sum_a[R], sum_m[R];
  hn::Mask<F32> before[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    sum_a[r] = hn::Zero(d);
    sum_m[r] = hn::Zero(d);
    before[r] = hn::FirstN(d, static_cast<size_t>(HWY_MAX(earlier + r, 0)));  // lanes of tokens before row r
  }
  for (int64_t k = 0; k < K; ++k) {
    VF x = hn::Load(d, columns + k * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      // By selection: a NaN decay of a token must not reach the columns of later ones (H-9).
      x = hn::IfThenElse(before[r], hn::Mul(x, hn::Set(d, decay[r * kKeyStride + k])), x);
      sum_a[r] = hn::MulAdd(x, hn::Set(d, keys[r * kKeyStride + k]), sum_a[r]);
      sum_m[r] = hn::MulAdd(x, hn::Set(d, queries[r * kKeyStride + k]), sum_m[r]);
    }
    hn::Store(x, d, columns + k * kLanes);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    hn::Store(hn::Mul(hn::Set(d, beta[r]), sum_a[r]), d, a + r * kChunk);
    hn::Store(sum_m[r], d, m + r * kChunk);
  }
}

// Rows [row, row + R) of U in place; u [kChunk][kPanel] holds r_i = beta_i (v_i - K~_i St^T) in rows >= row and
// U in the rows before.
template <int R>
HWY_INLINE void tile_solve(const float* HWY_RESTRICT a, int64_t row, float* HWY_RESTRICT u) {
  const F32 d;
  VF acc[R][kPanelVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kPanelVectors; ++c) acc[r][c] = hn::Load(d, u + (row + r) * kPanel + c * kLanes);
  }
  for (int64_t j = 0; j < row; ++j) {
    VF x[kPanelVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kPanelVectors; ++c) x[c] = hn::Load(d, u + j * kPanel + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const VF factor = hn::Set(d, a[(row + r) * kChunk + j]);
#pragma GCC unroll 4
      for (int c = 0; c < kPanelVectors; ++c) acc[r][c] = hn::NegMulAdd(factor, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < r; ++j) {
      const VF factor = hn::Set(d, a[(row + r) * kChunk + row + j]);
#pragma GCC unroll 4
      for (int c = 0; c < kPanelVectors; ++c) acc[r][c] = hn::NegMulAdd(factor, acc[j][c], acc[r][c]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kPanelVectors; ++c) hn::Store(acc[r][c], d, u + (row + r) * kPanel + c * kLanes);
  }
}

// Rows [row, row + R) of O in place; o [kChunk][kPanel] holds Q~_i St^T.
template <int R>
HWY_INLINE void tile_outputs(const float* HWY_RESTRICT m, int64_t row, const float* HWY_RESTRICT u, float scale,
                             float* HWY_RESTRICT o) {
  const F32 d;
  VF acc[R][kPanelVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kPanelVectors; ++c) acc[r][c] = hn::Load(d, o + (row + r) * kPanel + c * kLanes);
  }
  for (int64_t j = 0; j < row; ++j) {
    VF x[kPanelVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kPanelVectors; ++c) x[c] = hn::Load(d, u + j * kPanel + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const VF factor = hn::Set(d, m[(row + r) * kChunk + j]);
#pragma GCC unroll 4
      for (int c = 0; c < kPanelVectors; ++c) acc[r][c] = hn::MulAdd(factor, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < R; ++j) {
    VF x[kPanelVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kPanelVectors; ++c) x[c] = hn::Load(d, u + (row + j) * kPanel + c * kLanes);
#pragma GCC unroll 8
    for (int r = j; r < R; ++r) {
      const VF factor = hn::Set(d, m[(row + r) * kChunk + row + j]);
#pragma GCC unroll 4
      for (int c = 0; c < kPanelVectors; ++c) acc[r][c] = hn::MulAdd(factor, x[c], acc[r][c]);
    }
  }
  const VF s = hn::Set(d, scale);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kPanelVectors; ++c) {
      hn::Store(hn::Mul(s, acc[r][c]), d, o + (row + r) * kPanel + c * kLanes);
    }
  }
}

// R channels of the state: to = from * (power + rest) + sum_{j<n} keys[j][channel] * u[j], where e^Gamma = power
// + rest with power a power of two: the decay costs one rounding of the result and has no bias of its own (F31).
template <int R>
HWY_NOINLINE void tile_update(const float* HWY_RESTRICT keys, const float* HWY_RESTRICT u, int64_t n,
                              const float* HWY_RESTRICT power, const float* HWY_RESTRICT rest, const float* from,
                              float* to) {
  const F32 d;
  VF acc[R][kPanelVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kPanelVectors; ++c) {
      const VF s = hn::Load(d, from + r * kPanel + c * kLanes);
      acc[r][c] = hn::MulAdd(s, hn::Set(d, rest[r]), hn::Mul(s, hn::Set(d, power[r])));
    }
  }
  for (int64_t j = 0; j < n; ++j) {
    VF x[kPanelVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kPanelVectors; ++c) x[c] = hn::Load(d, u + j * kPanel + c * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const VF factor = hn::Set(d, keys[j * kKeyStride + r]);
#pragma GCC unroll 4
      for (int c = 0; c < kPanelVectors; ++c) acc[r][c] = hn::MulAdd(factor, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kPanelVectors; ++c) hn::Store(acc[r][c], d, to + r * kPanel + c * kLanes);
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_SIMD_TILES_INL_H_

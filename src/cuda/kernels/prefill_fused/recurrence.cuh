// The serial chain of one warpgroup: 64 value rows, fp32 state in accumulators, every product's A operand made from
// the accumulators of the one before (V-major, H-1):
//   R = V - S K~^T      U = R T'^T (two terms)      O = S Q~^T + U M^T      S <- S diag(decay) + U K^ (two terms)
// The accumulators hold s S, s one power of two per row and two items (N-7, with 64 tokens as the chunk of its rule).
#pragma once

#include "cuda/kernels/prefill_fused/shared_plan.cuh"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/wgmma.h"

namespace kda::cuda::prefill_fused {

struct ConsumerLane {
  int warp, lane, g, c;
  uint32_t decays;  // where this lane's decays start in a stage's
  __device__ explicit ConsumerLane(int thread)
      : warp(thread >> 5), lane(thread & 31), g(lane >> 2), c(lane & 3), decays(4 * decay_place(2 * c)) {}
};

// Powers of two of this lane's rows g and g + 8: the accumulators hold row * scale.
struct RowScales {
  float scale[2] = {1.0f, 1.0f};
  __device__ float inverse(int r) const { return __int_as_float((254 << 23) - __float_as_int(scale[r])); }
};

// Biased exponent of base -> scale 2^-floor(log2 base), normal as its inverse is; 1 for 0 (or subnormal), Inf, NaN.
__device__ __forceinline__ float scale_of_exponent(int exponent) {
  const int e = exponent <= 0 || exponent >= 255 ? 127 : min(exponent, 253);
  return __int_as_float((254 - e) << 23);
}

__device__ __forceinline__ int exponent_of(float magnitude) { return (__float_as_int(magnitude) >> 23) & 255; }

// Largest |state| of this lane's columns kFirst / 32 * 64 .. + 63, rows g and g + 8.
template <int kFirst>
__device__ __forceinline__ void half_peaks(float (&peaks)[2], const float (&state)[64]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m[2];  // two chains
#pragma unroll
    for (int i = 0; i < 2; ++i)
      m[i] = fmaxf(fabsf(state[kFirst + 4 * i + 2 * r]), fabsf(state[kFirst + 4 * i + 2 * r + 1]));
#pragma unroll
    for (int n = 2; n < 8; ++n)
      m[n & 1] =
          fmaxf(fmaxf(m[n & 1], fabsf(state[kFirst + 4 * n + 2 * r])), fabsf(state[kFirst + 4 * n + 2 * r + 1]));
    peaks[r] = fmaxf(m[0], m[1]);
  }
}

// Exponent of the largest finite |v| of token 0 over the warp's 16 rows: lanes with c = 0 hold it in the low halves
// of the first two registers of the tile.
__device__ __forceinline__ int value_exponent(const uint32_t (&values)[8], const ConsumerLane& me) {
  uint32_t v0 = values[0] & 0x7fffu, v1 = values[1] & 0x7fffu;
  v0 = v0 >= 0x7f80u || me.c != 0 ? 0u : v0;
  v1 = v1 >= 0x7f80u || me.c != 0 ? 0u : v1;
  return static_cast<int>(__reduce_max_sync(0xffffffffu, max(v0, v1)) >> 7);
}

// Chooses the item's scales (N-7) from the peaks of the accumulators' rows over this lane's columns and the values of
// the first token. change: what the accumulators must be multiplied with.
__device__ __forceinline__ void choose_scales(RowScales& rows, float (&change)[2], float (&peaks)[2],
                                              int value_exponent) {
#pragma unroll
  for (int r = 0; r < 2; ++r) peaks[r] = fmaxf(peaks[r], __shfl_xor_sync(0xffffffffu, peaks[r], 1));
#pragma unroll
  for (int r = 0; r < 2; ++r) peaks[r] = fmaxf(peaks[r], __shfl_xor_sync(0xffffffffu, peaks[r], 2));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int held = exponent_of(peaks[r]);
    // True exponent of the state: undo the scale it is held in.
    int exponent = max(held + exponent_of(rows.inverse(r)) - 127, 1);
    exponent = held == 255 ? 255 : (held != 0 ? exponent : 0);
    exponent = max(exponent, value_exponent);
    const float scale = scale_of_exponent(exponent);
    // Finite even where a zero state meets opposite extremes; a state that is not zero never needs the bound.
    change[r] = fminf(scale * rows.inverse(r), 0x1p127f);
    rows.scale[r] = scale;
  }
}

__device__ __forceinline__ void rescale_state(float (&state)[64], const float (&change)[2]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) state[i] *= change[(i >> 1) & 1];
}
// The A operand of a step of 16 columns.
__device__ __forceinline__ void pack_step(uint32_t (&packed)[32], const float (&state)[64], int s) {
#pragma unroll
  for (int i = 4 * s; i < 4 * s + 4; ++i) packed[i] = ptx::pack_f16(state[2 * i], state[2 * i + 1]);
}

template <int kPairs>
__device__ __forceinline__ void pack_pairs(uint32_t (&packed)[kPairs], const float (&x)[2 * kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) packed[i] = ptx::pack_f16(x[2 * i], x[2 * i + 1]);
}

// The larger of both halves of |x| over the packed values, as fp16 bits; Inf and NaN are >= 0x7c00.
__device__ __forceinline__ uint32_t largest_magnitude(const uint32_t (&packed)[8]) {
  uint32_t m = packed[0] & 0x7fff7fffu;
#pragma unroll
  for (int i = 1; i < 8; ++i) m = ptx::max_nan_f16x2(m, packed[i] & 0x7fff7fffu);
  return max(m & 0xffffu, m >> 16) & 0x7fffu;
}
constexpr uint32_t kLimitBits = 0x7800;  // 2^15: from here on the slow path (N-7)
constexpr uint32_t kCalmBits = 0x5c00;   // 2^8: below it no U = T' R can reach the limit (32 terms, |T'| <= 4)

// First token of the tile whose value reaches the limit in any row of the warp; kChunk if none.
__device__ __forceinline__ int first_over_limit(const uint32_t (&packed)[8], const ConsumerLane& me) {
  int first = kChunk;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int token = 8 * (i >> 1) + 2 * me.c;
    if ((packed[i] & 0x7fffu) >= 0x7800u) first = min(first, token);
    if (((packed[i] >> 16) & 0x7fffu) >= 0x7800u) first = min(first, token + 1);
  }
  return __reduce_min_sync(0xffffffffu, first);
}

// Selects the columns (tokens) >= limit to zero.
__device__ __forceinline__ void clear_from(uint32_t (&packed)[8], int limit, const ConsumerLane& me) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int token = 8 * (i >> 1) + 2 * me.c;
    packed[i] = token >= limit ? 0u : (token + 1 >= limit ? packed[i] & 0xffffu : packed[i]);
  }
}

// The operands of a stage are named by `stage16`, its shared address / 16.
// acc[64 rows, 32 tokens] (+)= state * operand^T for 16 columns of the operand [32, 128] K-major at byte kPart.
template <uint32_t kPart>
__device__ __forceinline__ void multiply_step(float (&acc)[16], const uint32_t (&packed)[32], uint32_t stage16,
                                              int s) {
  const uint32_t at = stage16 + ((kPart + (s >> 2) * Stage::kHalf + (s & 3) * 32) >> 4);
  ptx::wgmma_m64n32k16_kmajor(acc, packed[4 * s], packed[4 * s + 1], packed[4 * s + 2], packed[4 * s + 3],
                              ptx::matrix_descriptor<16, 1024, ptx::Swizzle::k128>(at), s != 0);
}

// acc = rhs * T'^T, both terms of T'.
__device__ __forceinline__ void apply_inverse(float (&acc)[16], const uint32_t (&rhs)[8], uint32_t stage16) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const uint32_t at = stage16 + ((Stage::kSolve + s * 32) >> 4);
    const int a = 4 * (s & 1);
    ptx::wgmma_m64n32k16_kmajor(acc, rhs[a], rhs[a + 1], rhs[a + 2], rhs[a + 3],
                                ptx::matrix_descriptor<16, 1024, ptx::Swizzle::k128>(at), s != 0);
  }
}

// out += U M^T.
__device__ __forceinline__ void add_scores(float (&out)[16], const uint32_t (&u)[8], uint32_t stage16) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const uint32_t at = stage16 + ((Stage::kScores + s * 32) >> 4);
    ptx::wgmma_m64n32k16_kmajor(out, u[4 * s], u[4 * s + 1], u[4 * s + 2], u[4 * s + 3],
                                ptx::matrix_descriptor<16, 512, ptx::Swizzle::k64>(at), 1);
  }
}

// Half of state += U K^ (columns kFirst / 32 * 64 .. + 63), both terms.
template <int kFirst>
__device__ __forceinline__ void update_half(float (&state)[64], const uint32_t (&u)[8], uint32_t stage16) {
#pragma unroll
  for (int term = 0; term < 2; ++term) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint32_t part = (term == 0 ? Stage::kUpdateHigh : Stage::kUpdateLow) + kFirst / 32 * Stage::kHalf;
      ptx::wgmma_m64n64k16_nmajor<kFirst>(
          state, u[4 * s], u[4 * s + 1], u[4 * s + 2], u[4 * s + 3],
          ptx::matrix_descriptor<Stage::kHalf, 1024, ptx::Swizzle::k128>(stage16 + ((part + s * 2048) >> 4)));
    }
  }
}

// Of this lane's columns.
struct StateDecay {
  float2 x[16];
};
__device__ __forceinline__ void load_decay(StateDecay& decay, uint32_t stage, const ConsumerLane& me) {
#pragma unroll
  for (int n = 0; n < 16; n += 2) {
    const float4 x = ptx::load_shared_f4(stage + me.decays + Stage::kDecay + 4 * decay_place(8 * n));
    decay.x[n] = {x.x, x.y}, decay.x[n + 1] = {x.z, x.w};
  }
}
__device__ __forceinline__ void decay_state(float (&state)[64], const StateDecay& decay) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    state[4 * n] *= decay.x[n].x;
    state[4 * n + 1] *= decay.x[n].y;
    state[4 * n + 2] *= decay.x[n].x;
    state[4 * n + 3] *= decay.x[n].y;
  }
}

}  // namespace kda::cuda::prefill_fused

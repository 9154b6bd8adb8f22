// A warp's share of one head's state, in fp32 registers, and one token applied to it (spec E-7).
//
// Sixteen lanes own one row of the [V, K] state, so a warp holds two rows a slot: row = 2 * slot + lane / 16. A
// lane's elements are 16-byte pieces of the row as the pool stores it, so that a load of the warp covers whole
// sectors:
//   key(e) = (e / kVector) * 16 * kVector + lane16 * kVector + e % kVector,   kVector = 16 / sizeof(Pool)
// Rows are independent; K is never split over warps (V-5), and the sum over K is the same tree whatever the grid, so
// that bits depend on nothing but the row (N-12, N-13).
//
// One pass over the elements takes S.k and S.q together on the decayed state, and the output follows from
//   o = scale * (S.q + u (k.q))          with S = St o e^g, u = beta (v - S.k), then S += u k^T
// which is E-7's o = scale * St.q without a second reduction. Everything is fp32.
#pragma once

#include "cuda/kernels/common/math.cuh"
#include "cuda/kernels/recurrence/params.h"
#include "cuda/ptx/copy.h"

namespace kda::cuda {

// Where a head's state lies and what of it exists.
struct HeadState {
  void* data = nullptr;  // [V, K] of one slot and head
  int32_t keys = 0;      // K
  int32_t values = 0;    // V
  bool vectors = false;  // masked shapes: rows are whole, aligned 16-byte pieces
};

// Reads of states are once-only: they are not kept in the L1 and leave the L2 first.
__device__ __forceinline__ uint4 load_stream(const void* p) { return __ldcs(static_cast<const uint4*>(p)); }
__device__ __forceinline__ void store_stream(void* p, uint4 x) { __stcs(static_cast<uint4*>(p), x); }

__device__ __forceinline__ float2 widen_pair(unsigned bits, __nv_bfloat16) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
__device__ __forceinline__ float2 widen_pair(unsigned bits, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}
__device__ __forceinline__ unsigned round_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ unsigned round_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// kSlots: rows that one lane has a part of; 1, 2, 4 or 8. The sums do not depend on it.
// kStream: exact rows are marked to leave the L2 first.
template <class Pool_, Shape kShape_, int kSlots_ = kShape_ == Shape::kMasked256 ? 4 : 8, bool kStream = true>
struct StateTile {
  using Pool = Pool_;
  static constexpr Shape kShape = kShape_;
  static constexpr bool kExact = kShape == Shape::kExact128;
  static constexpr int kKeys = kShape == Shape::kMasked256 ? 256 : 128;
  static constexpr int kElements = kKeys / 16;  // of a row in one lane
  static constexpr int kSlots = kSlots_;
  static constexpr int kRows = 2 * kSlots;  // of the warp
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Pool));
  static constexpr int kPieces = kElements / kVector;
  static constexpr int kPieceStride = 16 * kVector;  // keys between a lane's pieces

  // The pool's own bits, as loads leave them: nothing waits for them before widen().
  struct Raw {
    uint4 piece[kSlots][kPieces];
  };

  float s[kSlots][kElements];

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
  static __device__ __forceinline__ int lane16() { return lane() % 16; }
  // Row of a slot within the warp's rows.
  static __device__ __forceinline__ int row_of(int slot) { return 2 * slot + lane() / 16; }
  static __device__ __forceinline__ int key_of(int e) {
    return (e / kVector) * kPieceStride + lane16() * kVector + e % kVector;
  }

  // `first` is the warp's first row. Rows and keys that do not exist read as zero. [kFrom, kTo): which slots.
  template <int kFrom = 0, int kTo = kSlots>
  static __device__ __forceinline__ void load(Raw& raw, const HeadState& h, int first) {
    const Pool* base = static_cast<const Pool*>(h.data);
    if constexpr (kExact) {
      const Pool* p = base + static_cast<int64_t>(first + lane() / 16) * kKeys + lane16() * kVector;
#pragma unroll
      for (int slot = kFrom; slot < kTo; ++slot) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) raw.piece[slot][i] = load_exact(p + slot * 2 * kKeys + i * kPieceStride);
      }
    } else {
#pragma unroll
      for (int slot = kFrom; slot < kTo; ++slot) {
        const int row = first + row_of(slot);
        const Pool* p = base + static_cast<int64_t>(row) * h.keys;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) raw.piece[slot][i] = load_masked(p, i, row < h.values, h);
      }
    }
  }

  // The exact shape's rows on their way into the warp's kStage bytes of shared memory, where every lane reads what it
  // has written and therefore waits for its own copies alone. `exists` false: zeros.
  static constexpr int kStage = kSlots * kPieces * 32 * 16;
  static __device__ __forceinline__ void stage(uint32_t s_stage, const HeadState& h, int first, bool exists) {
    static_assert(kExact);
    const Pool* p =
        static_cast<const Pool*>(h.data) + static_cast<int64_t>(first + lane() / 16) * kKeys + lane16() * kVector;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        ptx::copy_async_16(s_stage + (slot * kPieces + i) * 512 + lane() * 16,
                           p + slot * 2 * kKeys + i * kPieceStride, exists ? 16 : 0);
      }
    }
    ptx::copy_async_commit();
  }
  static __device__ __forceinline__ void unstage(Raw& raw, uint32_t s_stage) {
    ptx::copy_async_wait<0>();
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        raw.piece[slot][i] = ptx::load_shared_u4(s_stage + (slot * kPieces + i) * 512 + lane() * 16);
    }
  }

  // Exact rows that lie in shared memory as in the pool; `from`: the lane's first piece.
  static __device__ __forceinline__ void load_shared(Raw& raw, uint32_t from) {
    static_assert(kExact);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        raw.piece[slot][i] = ptx::load_shared_u4(from + (slot * 2 * kKeys + i * kPieceStride) * sizeof(Pool));
    }
  }

  static __device__ __forceinline__ void zero(Raw& raw) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) raw.piece[slot][i] = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void widen(const Raw& raw) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const unsigned word[4] = {raw.piece[slot][i].x, raw.piece[slot][i].y, raw.piece[slot][i].z,
                                  raw.piece[slot][i].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          if constexpr (sizeof(Pool) == 4) {
            s[slot][i * 4 + w] = __uint_as_float(word[w]);
          } else {
            const float2 pair = widen_pair(word[w], Pool{});
            s[slot][i * 8 + 2 * w] = pair.x;
            s[slot][i * 8 + 2 * w + 1] = pair.y;
          }
        }
      }
    }
  }

  // One rounding to the pool's dtype (N-2); the registers stay as they are.
  __device__ __forceinline__ uint4 rounded(int slot, int piece) const {
    unsigned word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(Pool) == 4) word[w] = __float_as_uint(s[slot][piece * 4 + w]);
      else word[w] = round_pair(s[slot][piece * 8 + 2 * w], s[slot][piece * 8 + 2 * w + 1], Pool{});
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }

  __device__ __forceinline__ void store(const HeadState& h, int first) const {
    Pool* base = static_cast<Pool*>(h.data);
    if constexpr (kExact) {
      Pool* p = base + static_cast<int64_t>(first + lane() / 16) * kKeys + lane16() * kVector;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) store_exact(p + slot * 2 * kKeys + i * kPieceStride, rounded(slot, i));
      }
    } else {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const int row = first + row_of(slot);
        Pool* p = base + static_cast<int64_t>(row) * h.keys;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          if (row < h.values) store_masked(p, i, rounded(slot, i), h);
        }
      }
    }
  }

  // Goes on from the bits that a store would leave (V-10b).
  __device__ __forceinline__ void round_to_pool() {
    if constexpr (sizeof(Pool) < 4) {
      Raw raw;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) raw.piece[slot][i] = rounded(slot, i);
      }
      widen(raw);
    }
  }

  // This lane's part of a vector over K in shared memory (padded to kKeys).
  static __device__ __forceinline__ void gather(float (&x)[kElements], const float* s_vector) {
    const float4* p = reinterpret_cast<const float4*>(s_vector);
#pragma unroll
    for (int e = 0; e < kElements; e += 4) {
      const float4 v = p[key_of(e) / 4];
      x[e] = v.x, x[e + 1] = v.y, x[e + 2] = v.z, x[e + 3] = v.w;
    }
  }

  // After a token, lane l of each half holds u and o of slot slot_of_lane() of its half.
  static __device__ __forceinline__ int slot_of_lane() { return (lane() % 8) / (8 / kSlots); }
  // One lane of those that hold a row's results, the one that stores them.
  static __device__ __forceinline__ bool owns_row() { return lane() % (8 / kSlots) == 0 && lane() % 16 < 8; }

  struct Result {
    float u, o;
  };

  __device__ __forceinline__ void decay(const float* s_decay) {
    float d[kElements];
    gather(d, s_decay);
    decay_lanes(d);
  }
  // `d`: this lane's part, as gather() gives it.
  __device__ __forceinline__ void decay_lanes(const float (&d)[kElements]) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) s[slot][e] = __fmul_rn(s[slot][e], d[e]);
    }
  }

  // Decays of two terms: the factor's own rounding does not add up over a long prompt of like gates.
  __device__ __forceinline__ void decay(const float* s_decay, const float* s_decay_low) {
    float d[kElements], low[kElements];
    gather(d, s_decay);
    gather(low, s_decay_low);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const float x = s[slot][e], y = __fmaf_rn(x, d[e], __fmul_rn(x, low[e]));
        s[slot][e] = isinf(x) ? __fmul_rn(x, d[e]) : y;  // infinite terms of two signs would be no number
      }
    }
  }

  // E-7 on the decayed state. `v` is the value of this lane's slot_of_lane() row.
  __device__ __forceinline__ Result token(const float* s_k, const float* s_q, float beta, float v, float scale) {
    float k[kElements], q[kElements];
    gather(k, s_k);
    gather(q, s_q);
    return token_lanes(k, q, dot_lanes(k, q), beta, v, scale);
  }

  // k.q of the lanes' parts, and E-7 with those.
  static __device__ __forceinline__ float dot_lanes(const float (&k)[kElements], const float (&q)[kElements]) {
    float kq = __fmul_rn(k[0], q[0]);
#pragma unroll
    for (int e = 1; e < kElements; ++e) kq = __fmaf_rn(k[e], q[e], kq);
    return lane_sum<16>(kq);
  }
  __device__ __forceinline__ Result token_lanes(const float (&k)[kElements], const float (&q)[kElements], float kq,
                                                float beta, float v, float scale) {
    float sum[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) sum[slot] = exchange_add(dot_slot(slot, k), dot_slot(slot, q), 8);
    const Result r = results_of(sum, kq, beta, v, scale);
    add_outer(r.u, k);
    return r;
  }

  // The token's results alone, with the choice made by whoever loads the vectors: `kept` is k in a half's lower eight
  // lanes and q in the upper, `sent` the other one. replay_lanes() with u then moves the state on.
  __device__ __forceinline__ Result results(const float (&kept)[kElements], const float (&sent)[kElements], float kq,
                                            float beta, float v, float scale) const {
    float sum[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      sum[slot] = __fadd_rn(dot_slot(slot, kept), __shfl_xor_sync(kFullMask, dot_slot(slot, sent), 8));
    }
    return results_of(sum, kq, beta, v, scale);
  }

  // The recorded token again, with the u that it had (V-10): the same roundings of the decayed state as token().
  __device__ __forceinline__ void replay(const float* s_k, float u) {
    float k[kElements];
    gather(k, s_k);
    add_outer(u, k);
  }
  __device__ __forceinline__ void replay_lanes(const float (&k)[kElements], float u) { add_outer(u, k); }

 private:
  __device__ __forceinline__ float dot_slot(int slot, const float (&x)[kElements]) const {
    float sum = __fmul_rn(s[slot][0], x[0]);
#pragma unroll
    for (int e = 1; e < kElements; ++e) sum = __fmaf_rn(s[slot][e], x[e], sum);
    return sum;
  }

  // `sum`, of the slots: S.k in a half's lower eight lanes, S.q in the upper.
  static __device__ __forceinline__ Result results_of(float (&sum)[kSlots], float kq, float beta, float v,
                                                      float scale) {
    const float mine = scatter_sums(sum);
    const float other = __shfl_xor_sync(kFullMask, mine, 8);
    const bool low = lane() % 16 < 8;
    const float sk = low ? mine : other, sq = low ? other : mine;
    Result r;
    r.u = __fmul_rn(beta, __fsub_rn(v, sk));
    r.o = __fmul_rn(scale, __fmaf_rn(r.u, kq, sq));
    return r;
  }

  // S += u k^T; u of slot i is in the lanes whose slot_of_lane() is i.
  __device__ __forceinline__ void add_outer(float u, const float (&k)[kElements]) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const float us = __shfl_sync(kFullMask, u, slot * (8 / kSlots), 16);
#pragma unroll
      for (int e = 0; e < kElements; ++e) s[slot][e] = __fmaf_rn(us, k[e], s[slot][e]);
    }
  }

  // The lanes without `mask` get the pair's sum of x, those with it the sum of y.
  static __device__ __forceinline__ float exchange_add(float x, float y, int mask) {
    const bool upper = (lane() & mask) != 0;
    const float send = upper ? x : y, keep = upper ? y : x;
    return __fadd_rn(keep, __shfl_xor_sync(kFullMask, send, mask));
  }

  // Sums of kSlots values over eight lanes. Each step halves the values a lane carries, so the whole costs kSlots - 1
  // exchanges (and one for a lane bit left over); for every value lanes pair in the order 8, 4, 2, 1, so the tree is
  // that of a plain butterfly.
  static __device__ __forceinline__ float scatter_sums(float (&x)[kSlots]) {
    int count = kSlots;
#pragma unroll
    for (int mask = 4; mask > 0; mask /= 2) {
      if (count > 1) {
        count /= 2;
#pragma unroll
        for (int i = 0; i < count; ++i) x[i] = exchange_add(x[i], x[i + count], mask);
      } else {
        x[0] = __fadd_rn(x[0], __shfl_xor_sync(kFullMask, x[0], mask));
      }
    }
    return x[0];
  }

  static __device__ __forceinline__ uint4 load_exact(const Pool* p) {
    return kStream ? load_stream(p) : *reinterpret_cast<const uint4*>(p);
  }
  static __device__ __forceinline__ void store_exact(Pool* p, uint4 bits) {
    if constexpr (kStream) store_stream(p, bits);
    else *reinterpret_cast<uint4*>(p) = bits;
  }

  static __device__ __forceinline__ uint4 load_masked(const Pool* row, int piece, bool exists, const HeadState& h) {
    const int key = piece * kPieceStride + lane16() * kVector;
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (!exists) return bits;
    if (h.vectors) return key < h.keys ? load_stream(row + key) : bits;
    Pool element[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) element[i] = key + i < h.keys ? row[key + i] : Pool(0.0f);
    memcpy(&bits, element, sizeof(bits));
    return bits;
  }

  static __device__ __forceinline__ void store_masked(Pool* row, int piece, uint4 bits, const HeadState& h) {
    const int key = piece * kPieceStride + lane16() * kVector;
    if (h.vectors) {
      if (key < h.keys) store_stream(row + key, bits);
      return;
    }
    Pool element[kVector];
    memcpy(element, &bits, sizeof(bits));
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (key + i < h.keys) row[key + i] = element[i];
    }
  }
};

}  // namespace kda::cuda

// Rows of an io dtype as 16-byte pieces.
#pragma once

#include "cuda/kernels/common/math.cuh"

namespace kda::cuda {

// Eight elements as 16-byte pieces. kStream: marked to leave the caches first.
template <class Io, bool kStream = true>
struct Octet {
  static constexpr int kPieces = static_cast<int>(sizeof(Io)) / 2;
  uint4 piece[kPieces];
  __device__ __forceinline__ void load(const Io* p) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const auto* from = reinterpret_cast<const uint4*>(p) + i;
      piece[i] = kStream ? __ldcs(from) : *from;
    }
  }
  __device__ __forceinline__ void widen(float* x) const {
    Io element[8];
    memcpy(element, piece, sizeof(piece));
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_fp32(element[i]);
  }
  __device__ __forceinline__ void store(const float* x, Io* p) {
    Io element[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) from_fp32(x[i], element[i]);
    memcpy(piece, element, sizeof(piece));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      auto* to = reinterpret_cast<uint4*>(p) + i;
      if constexpr (kStream) __stcs(to, piece[i]);
      else *to = piece[i];
    }
  }
};

}  // namespace kda::cuda

// Warp-level matrix products.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

// D[16, 8] += A[16, 16] * B[16, 8], fp16 operands. Lane l: a0 = A[l/4][2c, 2c+1], a1 = A[l/4+8][..], a2, a3 the same
// at +8 columns; b0 = B[2c, 2c+1][l/4], b1 at +8 rows; d0, d1 = D[l/4][2c, 2c+1], d2, d3 = D[l/4+8][..]; c = l%4.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// D[16, 8] += A[16, 8] * B[8, 8], bf16 operands: a0 = A[l/4][2c, 2c+1], a1 = A[l/4+8][..], b = B[2c, 2c+1][l/4].
__device__ __forceinline__ void mma_m16n8k8_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// D[16, 8] += A[16, 8] * B[8, 8], tf32 operands (fp32 bits; the low 13 are not read). Lane l: a0 = A[l/4][c],
// a1 = A[l/4+8][c], a2, a3 the same at column c+4; b0 = B[c][l/4], b1 = B[c+4][l/4]; d as above.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                 uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace kda::cuda::ptx

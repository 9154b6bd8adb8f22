// Single arithmetic instructions: approximations with their errors, packed conversions, NaN-keeping maxima.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

// 2^x, relative error about 2^-22.5; denormal results become 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1/x, 1 ulp.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1/sqrt(x), 2 ulp.
__device__ __forceinline__ float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// max that answers NaN if either is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ uint32_t max_nan_f16x2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
// fp32 bits rounded to tf32 (nearest, ties away): the matrix unit cuts the low 13 bits off.
__device__ __forceinline__ uint32_t round_tf32(float x) { return __float_as_uint(x) + 0x1000u; }
// a * b + c, 64 bits: one instruction.
__device__ __forceinline__ uint64_t multiply_add_wide(uint32_t a, uint32_t b, uint64_t c) {
  uint64_t y;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(y) : "r"(a), "r"(b), "l"(c));
  return y;
}
// {lo, hi} to two fp16 (nearest even, no saturation), lo in the low half.
__device__ __forceinline__ uint32_t pack_f16(float lo, float hi) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
// The same with magnitudes above 65504, and NaN, made 65504: every result is finite.
__device__ __forceinline__ uint32_t pack_f16_finite(float lo, float hi) {
  uint32_t y;
  asm("{\n .reg .b32 t;\n cvt.rn.satfinite.f16x2.f32 t, %1, %2;\n min.f16x2 %0, t, %3;\n}\n"
      : "=r"(y)
      : "f"(hi), "f"(lo), "r"(0x7bff7bffu));
  return y;
}
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
__device__ __forceinline__ float2 unpack_f16(uint32_t x) {
  float2 y;
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}\n"
      : "=f"(y.x), "=f"(y.y)
      : "r"(x));
  return y;
}
__device__ __forceinline__ float bf16_low(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float bf16_high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

}  // namespace kda::cuda::ptx

// Stands in for CUDA's header, with what the decode family's kernels name besides ../emulation's stand-ins.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>

#include "cuda/ptx/instructions.h"

struct __nv_bfloat16 {
  uint16_t bits = 0;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) : bits(static_cast<uint16_t>(kda::cuda::ptx::to_bf16(x))) {}
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __half {
  uint16_t bits = 0;
  __half() = default;
  explicit __half(float x) : bits(static_cast<uint16_t>(kda::cuda::ptx::to_f16(x))) {}
};
struct __half2 {
  __half x, y;
};

inline float __bfloat162float(__nv_bfloat16 x) { return kda::cuda::ptx::from_bf16(x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float __half2float(__half x) { return kda::cuda::ptx::from_f16(x.bits); }
inline __half __float2half_rn(float x) { return __half(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half __ushort_as_half(unsigned short bits) {
  __half x;
  x.bits = bits;
  return x;
}

using std::isinf;

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }

template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T x) {
  *p = x;
}

template <class T>
T __shfl_sync(unsigned, T x, int from, int width) {
  return LaneValues<T>(x)[emulation::lane() / width * width + from % width];
}
inline uint32_t __cvta_generic_to_shared(const void* p) { return emulation::shared_address(p); }

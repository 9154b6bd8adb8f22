// Warpgroup matrix products of Hopper with A in registers, and their shared-memory descriptors.
//
// Accumulator layout (m64nN): lane l of warp w holds rows 16w + l/4 and + 8; d[4n+e] is column 8n + 2*(l%4) + e%2
// of row l/4 (e < 2) or l/4 + 8. The 16-bit A fragment of k-step s has the same layout: a0..a3 are the packed pairs
// of d[8s..8s+7] in order.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

enum class Swizzle : uint64_t { k128 = 1, k64 = 2 };

// Matrix descriptor of the operand at `address16` (shared address / 16). `stride` (bytes): distance of 8-row groups
// (K-major) or of 8-k groups (N-major); `leading`: distance of 64-element column groups (N-major only). Its low half
// is address16 plus a constant, so that offsets inside an operand are added to address16.
template <uint32_t kLeading, uint32_t kStride, Swizzle kSwizzle>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address16) {
  constexpr uint32_t kHigh = (kStride >> 4) | static_cast<uint32_t>(kSwizzle) << 30;
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(address16 + ((kLeading >> 4) << 16)), "n"(kHigh));
  return descriptor;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of accumulators across a wait.
template <int kSize>
__device__ __forceinline__ void pin_registers(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The same for a part of an array.
template <int kFirst, int kCount, int kSize>
__device__ __forceinline__ void pin_part(float (&d)[kSize]) {
#pragma unroll
  for (int i = kFirst; i < kFirst + kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// D[64, 32] += A[64, 16] (registers, fp16) * B[16, 32] (shared, fp16, K contiguous); `accumulate` 0 starts from zero.
__device__ __forceinline__ void wgmma_m64n32k16_kmajor(float (&d)[16], uint32_t a0, uint32_t a1, uint32_t a2,
                                                       uint32_t a3, uint64_t b, int accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %21, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate)
      : "memory");
}

// D[64, 64] += A[64, 16] (registers, fp16) * B[16, 64] (shared, fp16, N contiguous), D being d[kFirst..kFirst+31].
template <int kFirst, int kSize>
__device__ __forceinline__ void wgmma_m64n64k16_nmajor(float (&d)[kSize], uint32_t a0, uint32_t a1, uint32_t a2,
                                                       uint32_t a3, uint64_t b) {
  asm volatile(
      "{\n .reg .pred p;\n setp.eq.b32 p, 0, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
      : "+f"(d[kFirst + 0]), "+f"(d[kFirst + 1]), "+f"(d[kFirst + 2]), "+f"(d[kFirst + 3]), "+f"(d[kFirst + 4]),
        "+f"(d[kFirst + 5]), "+f"(d[kFirst + 6]), "+f"(d[kFirst + 7]), "+f"(d[kFirst + 8]), "+f"(d[kFirst + 9]),
        "+f"(d[kFirst + 10]), "+f"(d[kFirst + 11]), "+f"(d[kFirst + 12]), "+f"(d[kFirst + 13]), "+f"(d[kFirst + 14]),
        "+f"(d[kFirst + 15]), "+f"(d[kFirst + 16]), "+f"(d[kFirst + 17]), "+f"(d[kFirst + 18]), "+f"(d[kFirst + 19]),
        "+f"(d[kFirst + 20]), "+f"(d[kFirst + 21]), "+f"(d[kFirst + 22]), "+f"(d[kFirst + 23]), "+f"(d[kFirst + 24]),
        "+f"(d[kFirst + 25]), "+f"(d[kFirst + 26]), "+f"(d[kFirst + 27]), "+f"(d[kFirst + 28]), "+f"(d[kFirst + 29]),
        "+f"(d[kFirst + 30]), "+f"(d[kFirst + 31])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)
      : "memory");
}

// D[64, 128] += A[64, 8] (registers, tf32) * B[8, 128] (shared, tf32, K contiguous). A: a0 row l/4, k l%4; a1 the row
// 8 on; a2, a3 the same of k + 4.
__device__ __forceinline__ void wgmma_m64n128k8_tf32(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2,
                                                     uint32_t a3, uint64_t b) {
  asm volatile(
      "{\n .reg .pred p;\n setp.eq.b32 p, 0, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)
      : "memory");
}

}  // namespace kda::cuda::ptx

// Arithmetic that a condition leaves out, without a selection after it.
#pragma once

namespace kda::cuda::ptx {

// x += a * b, y += a * c where i >= kLeast; elsewhere both stay, whatever the factors are.
template <int kLeast>
__device__ __forceinline__ void multiply_add_from(float& x, float& y, float a, float b, float c, int i) {
  asm("{\n .reg .pred p;\n setp.ge.s32 p, %5, %6;\n"
      " @p fma.rn.f32 %0, %2, %3, %0;\n"
      " @p fma.rn.f32 %1, %2, %4, %1;\n}\n"
      : "+f"(x), "+f"(y)
      : "f"(a), "f"(b), "f"(c), "r"(i), "n"(kLeast));
}

}  // namespace kda::cuda::ptx

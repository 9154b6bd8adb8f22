// Rows whose dtype is known at run time only.
#if defined(KDA_CPU_SIMD_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_SIMD_ROWS_INL_H_
#undef KDA_CPU_SIMD_ROWS_INL_H_
#else
#define KDA_CPU_SIMD_ROWS_INL_H_
#endif

#include "base/tensor.h"
#include "core/rows.h"
#include "cpu/simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// As load_row and store_row.
HWY_NOINLINE inline void load_any(kda_dtype dtype, const void* from, int64_t n, float* to) {
  switch (dtype) {
    case KDA_FP32: return load_row(static_cast<const float*>(from), n, to);
    case KDA_BF16: return load_row(static_cast<const bf16*>(from), n, to);
    default: return load_row(static_cast<const fp16*>(from), n, to);
  }
}
HWY_NOINLINE inline void store_any(kda_dtype dtype, const float* from, int64_t n, void* to) {
  switch (dtype) {
    case KDA_FP32: return store_row(from, n, static_cast<float*>(to));
    case KDA_BF16: return store_row(from, n, static_cast<bf16*>(to));
    default: return store_row(from, n, static_cast<fp16*>(to));
  }
}
HWY_INLINE float load_one(kda_dtype dtype, const void* from) {
  switch (dtype) {
    case KDA_FP32: return *static_cast<const float*>(from);
    case KDA_BF16: return to_float(*static_cast<const bf16*>(from));
    default: return to_float(*static_cast<const fp16*>(from));
  }
}

// Head h of token row t: [T, heads, ...] or batched; `row_dims` as in core/rows.h.
HWY_INLINE const char* head_row(const kda_tensor& x, const TokenSpan& span, int row_dims, int64_t t, int64_t h) {
  const int64_t stride = x.strides[x.rank - row_dims + 1];
  return token_row(x, span, row_dims, t) + h * stride * static_cast<int64_t>(dtype_size(x.dtype));
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_SIMD_ROWS_INL_H_

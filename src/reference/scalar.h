// Typed access of the oracle: elements widened exactly to fp64, results rounded once from fp64 (spec G-2).
#pragma once

#include <cstdint>

#include "base/half.h"
#include "base/tensor.h"

namespace kda::reference {

inline double load(const char* p, kda_dtype dtype) {
  switch (dtype) {
    case KDA_FP64: return *reinterpret_cast<const double*>(p);
    case KDA_FP32: return static_cast<double>(*reinterpret_cast<const float*>(p));
    case KDA_BF16: return static_cast<double>(to_float(*reinterpret_cast<const bf16*>(p)));
    default: return static_cast<double>(to_float(*reinterpret_cast<const fp16*>(p)));
  }
}

inline void store(char* p, kda_dtype dtype, double x) {
  switch (dtype) {
    case KDA_FP64: *reinterpret_cast<double*>(p) = x; break;
    case KDA_FP32: *reinterpret_cast<float*>(p) = static_cast<float>(x); break;
    case KDA_BF16: *reinterpret_cast<bf16*>(p) = to_bf16(x); break;
    default: *reinterpret_cast<fp16*>(p) = to_fp16(x); break;
  }
}

// Dense runs of n elements.
void load_row(const char* p, kda_dtype dtype, int64_t n, double* x);
void store_row(char* p, kda_dtype dtype, int64_t n, const double* x);
void zero_row(char* p, kda_dtype dtype, int64_t n);

// Element i of a parameter vector, or `absent` if there is no tensor.
inline double parameter(const kda_tensor& t, int64_t i, double absent) {
  if (!present(t)) return absent;
  return load(static_cast<const char*>(t.data) + i * static_cast<int64_t>(dtype_size(t.dtype)), t.dtype);
}

// Address of index (i) or (i, j) of a view.
inline char* at(const kda_tensor& t, int64_t i, int64_t j = 0) {
  const int64_t offset = i * t.strides[0] + (t.rank > 1 ? j * t.strides[1] : 0);
  return static_cast<char*>(t.data) + offset * static_cast<int64_t>(dtype_size(t.dtype));
}

// A row pointer moved by `elements`.
template <class Char>
Char* advance(Char* row, kda_dtype dtype, int64_t elements) {
  return row + elements * static_cast<int64_t>(dtype_size(dtype));
}

}  // namespace kda::reference

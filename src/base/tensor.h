// Helpers over kda_tensor: element access by dtype, byte ranges, density.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "kda/types.h"

namespace kda {

inline bool present(const kda_tensor& t) { return t.dtype != KDA_DTYPE_NONE; }

const char* dtype_name(kda_dtype dtype);
size_t dtype_size(kda_dtype dtype);
const char* device_name(kda_device_type type);

// "bf16 [3, 12, 128] strides [1536, 128, 1]"
std::string describe(const kda_tensor& t);
std::string shape_string(const kda_tensor& t);

// Row-major strides for the tensor's rank and shape, a size of 0 counted as 1. INVALID_ARGUMENT, the tensor
// unchanged: a rank that does not exist, a negative size, or a product of those sizes above 2^63-1. Every shape that
// has been through here, or through check_view, can be multiplied up without a check.
Status make_dense(kda_tensor& t);

int64_t num_elements(const kda_tensor& t);

// Address range that a view touches: [first, last) in bytes; empty if it has no element.
struct ByteRange {
  uintptr_t first = 0;
  uintptr_t last = 0;
  bool overlaps(const ByteRange& o) const {
    return first < last && o.first < o.last && first < o.last && o.first < last;
  }
};
ByteRange byte_range(const kda_tensor& t);

// True if the last `dims` dimensions are row-major without gaps (a dimension of size 0 or 1 may have any stride).
bool inner_dense(const kda_tensor& t, int dims);

// A dense row-major view; for tests, tools and internal scratch. Absent if make_dense refuses the shape.
kda_tensor make_tensor(void* data, kda_dtype dtype, std::initializer_list<int64_t> shape,
                       kda_device device = {KDA_CPU, 0});

// int32/int64 vector read through its stride; the host side of "values in device memory".
struct IndexView {
  const char* data = nullptr;
  int64_t stride = 0;  // elements
  bool wide = false;   // int64
  int64_t size = 0;

  explicit operator bool() const { return data != nullptr; }
  int64_t operator[](int64_t i) const {
    return wide ? *reinterpret_cast<const int64_t*>(data + i * stride * 8)
                : *reinterpret_cast<const int32_t*>(data + i * stride * 4);
  }
};
// View of a rank-1 tensor, or of row `row` of a rank-2 one; empty if absent.
IndexView index_view(const kda_tensor& t);
IndexView index_row(const kda_tensor& t, int64_t row);

}  // namespace kda

#include "base/tensor.h"

#include <algorithm>

#include "base/checked.h"

namespace kda {

const char* dtype_name(kda_dtype dtype) {
  switch (dtype) {
    case KDA_DTYPE_NONE: return "none";
    case KDA_FP32: return "fp32";
    case KDA_BF16: return "bf16";
    case KDA_FP16: return "fp16";
    case KDA_FP64: return "fp64";
    case KDA_INT8: return "int8";
    case KDA_INT16: return "int16";
    case KDA_INT32: return "int32";
    case KDA_INT64: return "int64";
    case KDA_BOOL: return "bool";
    case KDA_UINT8: return "uint8";
  }
  return "unknown";
}

size_t dtype_size(kda_dtype dtype) {
  switch (dtype) {
    case KDA_FP64:
    case KDA_INT64: return 8;
    case KDA_FP32:
    case KDA_INT32: return 4;
    case KDA_BF16:
    case KDA_FP16:
    case KDA_INT16: return 2;
    case KDA_INT8:
    case KDA_BOOL:
    case KDA_UINT8: return 1;
    case KDA_DTYPE_NONE: return 0;
  }
  return 0;
}

const char* device_name(kda_device_type type) {
  switch (type) {
    case KDA_CPU: return "cpu";
    case KDA_CUDA: return "cuda";
  }
  return "unknown";
}

static std::string list(const int64_t* values, int n) {
  std::string s = "[";
  for (int i = 0; i < n; ++i) s += (i ? ", " : "") + std::to_string(values[i]);
  return s + "]";
}

std::string shape_string(const kda_tensor& t) { return list(t.shape, t.rank); }

std::string describe(const kda_tensor& t) {
  if (!present(t)) return "absent";
  return str_cat(dtype_name(t.dtype), " ", shape_string(t), " strides ", list(t.strides, t.rank));
}

Status make_dense(kda_tensor& t) {
  if (t.rank < 0 || t.rank > KDA_MAX_RANK) {
    return invalid_argument("rank: wanted 0 to ", KDA_MAX_RANK, ", got ", t.rank);
  }
  int64_t strides[KDA_MAX_RANK + 1], *stride = &strides[t.rank];
  *stride = 1;
  for (int i = t.rank - 1; i >= 0; --i, --stride) {
    if (t.shape[i] < 0) return invalid_argument("shape: wanted sizes >= 0, got ", shape_string(t));
    if (__builtin_mul_overflow(*stride, std::max<int64_t>(t.shape[i], 1), stride - 1)) {
      return invalid_argument("shape: wanted a product below 2^63 (a 0 counted as 1), got ", shape_string(t));
    }
  }
  std::copy(strides + 1, strides + 1 + t.rank, t.strides);
  return {};
}

int64_t num_elements(const kda_tensor& t) {
  int64_t n = 1;
  for (int i = 0; i < t.rank; ++i) n *= t.shape[i];
  return n;
}

ByteRange byte_range(const kda_tensor& t) {
  if (!present(t) || t.data == nullptr || num_elements(t) == 0) return {};
  int64_t low = 0, high = 0;
  for (int i = 0; i < t.rank; ++i) {
    const int64_t reach = (t.shape[i] - 1) * t.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  const auto size = static_cast<int64_t>(dtype_size(t.dtype));
  const auto base = reinterpret_cast<intptr_t>(t.data);
  return {static_cast<uintptr_t>(base + low * size), static_cast<uintptr_t>(base + (high + 1) * size)};
}

bool inner_dense(const kda_tensor& t, int dims) {
  int64_t expected = 1;
  for (int i = t.rank - 1; i >= t.rank - dims && i >= 0; --i) {
    if (t.shape[i] > 1 && t.strides[i] != expected) return false;
    expected *= std::max<int64_t>(t.shape[i], 1);
  }
  return true;
}

kda_tensor make_tensor(void* data, kda_dtype dtype, std::initializer_list<int64_t> shape, kda_device device) {
  kda_tensor t{};
  t.data = data;
  t.dtype = dtype;
  t.device = device;
  for (int64_t s : shape) t.shape[t.rank++] = s;
  return make_dense(t).ok() ? t : kda_tensor{};
}

IndexView index_view(const kda_tensor& t) {
  if (!present(t)) return {};
  return {static_cast<const char*>(t.data), t.rank > 0 ? t.strides[0] : 1, t.dtype == KDA_INT64,
          t.rank > 0 ? t.shape[0] : 1};
}

IndexView index_row(const kda_tensor& t, int64_t row) {
  if (!present(t)) return {};
  const auto size = static_cast<int64_t>(dtype_size(t.dtype));
  const char* first = static_cast<const char*>(t.data) + row * t.strides[0] * size;
  if (t.rank == 1) return {first, 1, t.dtype == KDA_INT64, 1};
  return {first, t.strides[1], t.dtype == KDA_INT64, t.shape[1]};
}

}  // namespace kda

#include "conformance/tensor.h"

#include <kda/kda.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "conformance/rounding.h"

namespace kda::conformance {
namespace {

constexpr unsigned char kPattern = 0xff;
constexpr int64_t kGuard = 256;  // bytes in front and behind

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "conformance tensor: %s\n", what);
  std::abort();
}

int64_t element_offset(const kda_tensor& t, int64_t flat) {
  int64_t offset = 0;
  for (int d = t.rank - 1; d >= 0; --d) {
    offset += (flat % t.shape[d]) * t.strides[d];
    flat /= t.shape[d];
  }
  return offset;
}

int64_t count(const kda_tensor& t) {
  int64_t n = 1;
  for (int d = 0; d < t.rank; ++d) n *= t.shape[d];
  return n;
}

// Calls f(address, C-order number) for every element.
template <class F>
void for_each_element(const kda_tensor& t, const F& f) {
  const int64_t total = count(t), inner = t.rank > 0 ? t.shape[t.rank - 1] : 1;
  const auto size = static_cast<int64_t>(kda_dtype_size(t.dtype));
  const int64_t step = t.rank > 0 ? t.strides[t.rank - 1] * size : 0;
  for (int64_t i = 0; i < total; i += inner) {
    char* p = element(t, i);
    for (int64_t j = 0; j < inner; ++j, p += step) f(p, i + j);
  }
}

std::string index_text(const kda_tensor& t, int64_t flat) {
  std::string s;
  for (int d = t.rank - 1; d >= 0; --d) {
    s = std::to_string(flat % t.shape[d]) + (s.empty() ? "" : ", ") + s;
    flat /= t.shape[d];
  }
  return "[" + s + "]";
}

std::string hex(const unsigned char* p, size_t n) {
  std::string s = "0x";
  char digits[3];
  for (size_t i = n; i-- > 0;) {
    std::snprintf(digits, sizeof digits, "%02x", p[i]);
    s += digits;
  }
  return s;
}

}  // namespace

int64_t product(const Shape& shape) {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  return n;
}

Shape dense_strides(const Shape& shape) {
  kda_tensor t{};
  t.rank = static_cast<int32_t>(shape.size());
  std::copy_n(shape.begin(), std::min<size_t>(shape.size(), KDA_MAX_RANK), t.shape);
  if (kda_tensor_make_dense(&t) != KDA_OK) die(kda_last_error());
  return {t.strides, t.strides + t.rank};
}

char* element(const kda_tensor& t, int64_t flat) {
  return static_cast<char*>(t.data) + element_offset(t, flat) * static_cast<int64_t>(kda_dtype_size(t.dtype));
}

kda_tensor narrow(kda_tensor t, int dim, int64_t begin, int64_t length) {
  if (dim >= t.rank || begin < 0 || begin + length > t.shape[dim]) die("narrow out of range");
  t.data = static_cast<char*>(t.data) + begin * t.strides[dim] * static_cast<int64_t>(kda_dtype_size(t.dtype));
  t.shape[dim] = length;
  return t;
}

kda_tensor select(kda_tensor t, int dim, int64_t index) {
  t = narrow(t, dim, index, 1);
  for (int d = dim; d + 1 < t.rank; ++d) {
    t.shape[d] = t.shape[d + 1];
    t.strides[d] = t.strides[d + 1];
  }
  --t.rank;
  return t;
}

kda_tensor reshape(const kda_tensor& dense, const Shape& shape) {
  if (product(shape) != count(dense)) die("reshape to another element count");
  kda_tensor t = dense;
  const Shape strides = dense_strides(shape);
  t.rank = static_cast<int32_t>(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) {
    t.shape[d] = shape[d];
    t.strides[d] = strides[d];
  }
  return t;
}

std::vector<double> values(const kda_tensor& t) {
  std::vector<double> x(static_cast<size_t>(count(t)));
  for_each_element(t, [&](const char* p, int64_t i) { x[static_cast<size_t>(i)] = load(p, t.dtype); });
  return x;
}

void assign(const kda_tensor& t, const std::vector<double>& x) {
  if (count(t) != static_cast<int64_t>(x.size())) die("assign of another element count");
  for_each_element(t, [&](char* p, int64_t i) { store(p, t.dtype, x[static_cast<size_t>(i)]); });
}

void fill(const kda_tensor& t, double x) {
  for_each_element(t, [&](char* p, int64_t) { store(p, t.dtype, x); });
}

std::string first_difference(const kda_tensor& a, const kda_tensor& b) {
  if (a.dtype != b.dtype || count(a) != count(b)) return "dtypes or element counts differ";
  const size_t size = kda_dtype_size(a.dtype);
  for (int64_t i = 0; i < count(a); ++i) {
    const char *p = element(a, i), *q = element(b, i);
    if (std::memcmp(p, q, size) == 0) continue;
    return "element " + index_text(a, i) + ": " + hex(reinterpret_cast<const unsigned char*>(p), size) + " (" +
           std::to_string(load(p, a.dtype)) + ") against " + hex(reinterpret_cast<const unsigned char*>(q), size) +
           " (" + std::to_string(load(q, b.dtype)) + ")";
  }
  return "";
}

bool same_bits(const kda_tensor& a, const kda_tensor& b) { return first_difference(a, b).empty(); }

Tensor::Tensor(kda_dtype dtype, Shape shape, Shape strides, int64_t offset)
    : dtype_(dtype),
      shape_(std::move(shape)),
      strides_(strides.empty() ? dense_strides(shape_) : std::move(strides)) {
  if (strides_.size() != shape_.size() || shape_.size() > KDA_MAX_RANK) die("rank");
  const auto size = static_cast<int64_t>(kda_dtype_size(dtype));
  int64_t reach = product(shape_) > 0 ? 1 : 0;
  for (size_t d = 0; d < shape_.size() && reach > 0; ++d) reach += (shape_[d] - 1) * strides_[d];
  bytes_.assign(static_cast<size_t>(kGuard + (offset + reach) * size + kGuard), kPattern);
  first_ = kGuard + offset * size;
}

kda_tensor Tensor::view() const {
  kda_tensor t{};
  if (!present()) return t;
  t.data = const_cast<unsigned char*>(bytes_.data()) + first_;
  t.dtype = dtype_;
  t.device = {KDA_CPU, 0};
  t.rank = static_cast<int32_t>(shape_.size());
  for (size_t d = 0; d < shape_.size(); ++d) {
    t.shape[d] = shape_[d];
    t.strides[d] = strides_[d];
  }
  return t;
}

Tensor Tensor::of(kda_dtype dtype, Shape shape, const std::vector<double>& x) {
  Tensor t(dtype, std::move(shape));
  t.assign(x);
  return t;
}

Tensor Tensor::full(kda_dtype dtype, Shape shape, double x) {
  Tensor t(dtype, std::move(shape));
  t.fill(x);
  return t;
}

Tensor Tensor::ints(const std::vector<int64_t>& x, kda_dtype dtype) {
  Tensor t(dtype, {static_cast<int64_t>(x.size())});
  const kda_tensor v = t.view();
  for (size_t i = 0; i < x.size(); ++i) {
    // Not through double: 64-bit values stay exact.
    if (dtype == KDA_INT64) std::memcpy(element(v, static_cast<int64_t>(i)), &x[i], 8);
    else store(element(v, static_cast<int64_t>(i)), dtype, static_cast<double>(x[i]));
  }
  return t;
}

static int64_t flat_index(const Shape& shape, std::initializer_list<int64_t> index) {
  if (index.size() != shape.size()) die("index rank");
  int64_t flat = 0;
  size_t d = 0;
  for (int64_t i : index) {
    if (i < 0 || i >= shape[d]) die("index out of range");
    flat = flat * shape[d++] + i;
  }
  return flat;
}

double Tensor::get(std::initializer_list<int64_t> index) const {
  return load(element(view(), flat_index(shape_, index)), dtype_);
}
void Tensor::set(std::initializer_list<int64_t> index, double x) {
  store(element(view(), flat_index(shape_, index)), dtype_, x);
}

void Tensor::poison() { std::fill(bytes_.begin(), bytes_.end(), kPattern); }

Tensor Tensor::copy(kda_dtype dtype, Shape strides, int64_t offset) const {
  Tensor t(dtype, shape_, std::move(strides), offset);
  t.assign(values());
  return t;
}

// Marks the bytes of a view's elements; `first` is the place of its first element in the backing memory.
static void mark_elements(std::vector<bool>& marks, const kda_tensor& t, int64_t first) {
  const auto size = static_cast<int64_t>(kda_dtype_size(t.dtype));
  for_each_element(t, [&](const char* p, int64_t) {
    const int64_t at = first + (p - static_cast<char*>(t.data));
    for (int64_t b = 0; b < size; ++b) marks[static_cast<size_t>(at + b)] = true;
  });
}

std::string Tensor::guard_report() const {
  if (!present()) return "";
  std::vector<bool> mine(bytes_.size(), false);
  mark_elements(mine, view(), first_);
  for (size_t i = 0; i < bytes_.size(); ++i) {
    if (!mine[i] && bytes_[i] != kPattern) {
      return "byte " + std::to_string(static_cast<int64_t>(i) - first_) + " from the first element was written";
    }
  }
  return "";
}

std::string Snapshot::changes_outside(const Tensor& now, const std::vector<int64_t>& slots) const {
  std::vector<bool> allowed(bytes_.size(), false);
  for (int64_t slot : slots) {
    const kda_tensor s = select(now.view(), 0, slot);
    const int64_t first = static_cast<unsigned char*>(s.data) - now.bytes().data();
    mark_elements(allowed, s, first);
  }
  const auto size = static_cast<int64_t>(kda_dtype_size(now.dtype()));
  for (size_t i = 0; i < bytes_.size(); ++i) {
    if (allowed[i] || bytes_[i] == now.bytes()[i]) continue;
    const int64_t at = (static_cast<int64_t>(i) - now.first_byte()) / size;
    const int64_t stride = now.view().strides[0];
    return "element offset " + std::to_string(at) + " (slot " + std::to_string(stride ? at / stride : 0) +
           ") was written";
  }
  return "";
}

std::string Snapshot::slot_changes(const Tensor& now, int64_t slot) const {
  const kda_tensor s = select(now.view(), 0, slot);
  const size_t size = kda_dtype_size(s.dtype);
  for (int64_t i = 0; i < count(s); ++i) {
    const auto at = static_cast<size_t>(reinterpret_cast<unsigned char*>(element(s, i)) - now.bytes().data());
    if (std::memcmp(&bytes_[at], &now.bytes()[at], size) != 0) {
      return "slot " + std::to_string(slot) + " element " + index_text(s, i) + " was written";
    }
  }
  return "";
}

Tensor canary_pool(kda_dtype dtype, Shape shape, int64_t slot_stride, int64_t offset) {
  Shape strides = dense_strides(shape);
  if (slot_stride > 0) strides[0] = slot_stride;
  Tensor pool(dtype, shape, strides, offset);
  const int64_t payload = product(shape) / std::max<int64_t>(1, shape[0]);
  for_each_element(pool.view(), [&](char* p, int64_t i) {
    store(p, dtype, (static_cast<double>(i / payload) + 1 + static_cast<double>(i % 61) / 64) / 64);
  });
  return pool;
}

}  // namespace kda::conformance

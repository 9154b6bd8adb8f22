// Owning tensors for checks: any dtype, any strides and offset, with a known pattern in front, behind and in every
// gap. The pattern (bytes 0xff) reads as NaN in every float format and as -1 in every integer format, so it is at
// once poison for readers and, compared bitwise, a canary for writers.
#pragma once

#include <kda/types.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

namespace kda::conformance {

using Shape = std::vector<int64_t>;

int64_t product(const Shape& shape);
// Row-major strides of a dense tensor.
Shape dense_strides(const Shape& shape);

// Sub-views; they share memory, as slices do elsewhere.
kda_tensor narrow(kda_tensor t, int dim, int64_t begin, int64_t length);
kda_tensor select(kda_tensor t, int dim, int64_t index);
kda_tensor reshape(const kda_tensor& dense, const Shape& shape);
// Elements of any view in C order, widened exactly.
std::vector<double> values(const kda_tensor& t);
// Stores `x` (C order, rounded once) into any view.
void assign(const kda_tensor& t, const std::vector<double>& x);
void fill(const kda_tensor& t, double x);
// Address of the element with this C-order number.
char* element(const kda_tensor& t, int64_t flat);
// True if two views of equal shape and dtype hold the same bits.
bool same_bits(const kda_tensor& a, const kda_tensor& b);
// "" or "element [1, 2, 3]: 0x3f80 against 0x3f81".
std::string first_difference(const kda_tensor& a, const kda_tensor& b);

class Tensor {
 public:
  Tensor() = default;  // absent
  // All bytes hold the pattern at first. `strides` empty: dense. `offset` elements come before the first one.
  Tensor(kda_dtype dtype, Shape shape, Shape strides = {}, int64_t offset = 0);

  static Tensor of(kda_dtype dtype, Shape shape, const std::vector<double>& x);
  static Tensor full(kda_dtype dtype, Shape shape, double x);
  // Integer vectors.
  static Tensor ints(const std::vector<int64_t>& x, kda_dtype dtype = KDA_INT32);
  static Tensor flags(const std::vector<int64_t>& x) { return ints(x, KDA_BOOL); }

  bool present() const { return dtype_ != KDA_DTYPE_NONE; }
  kda_dtype dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int64_t size() const { return product(shape_); }

  kda_tensor view() const;
  operator kda_tensor() const { return view(); }

  double get(std::initializer_list<int64_t> index) const;
  void set(std::initializer_list<int64_t> index, double x);
  std::vector<double> values() const { return conformance::values(view()); }
  void assign(const std::vector<double>& x) { conformance::assign(view(), x); }
  void fill(double x) { conformance::fill(view(), x); }
  // Every byte of the backing memory back to the pattern.
  void poison();

  // The same values in another dtype and layout.
  Tensor copy(kda_dtype dtype, Shape strides = {}, int64_t offset = 0) const;

  // "" or the first byte outside the elements that lost the pattern.
  std::string guard_report() const;
  const std::vector<unsigned char>& bytes() const { return bytes_; }
  // Byte range of the view inside bytes().
  int64_t first_byte() const { return first_; }

 private:
  kda_dtype dtype_ = KDA_DTYPE_NONE;
  Shape shape_, strides_;
  int64_t first_ = 0;  // byte of element 0
  std::vector<unsigned char> bytes_;
};

// Bitwise memory of a tensor's whole backing at one moment.
class Snapshot {
 public:
  explicit Snapshot(const Tensor& t) : bytes_(t.bytes()) {}
  // "" if nothing changed since, except inside the named slots (outermost index; payload only, gaps never).
  std::string changes_outside(const Tensor& now, const std::vector<int64_t>& slots = {}) const;
  // "" if this slot's payload has its old bits.
  std::string slot_changes(const Tensor& now, int64_t slot) const;

 private:
  std::vector<unsigned char> bytes_;
};

// A pool whose slots all hold a recognisable canary (finite, different in each slot).
Tensor canary_pool(kda_dtype dtype, Shape shape, int64_t slot_stride = 0, int64_t offset = 0);

}  // namespace kda::conformance

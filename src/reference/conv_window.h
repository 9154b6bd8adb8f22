// Windows of raw conv inputs in a pool (spec P-2, W-2..W-5): copies of elements, bit for bit.
#pragma once

#include <cstring>

#include "reference/scalar.h"

namespace kda::reference {

// One slot's window of one part, seen as (channel, column) in either layout.
class ConvWindow {
 public:
  ConvWindow(const kda_tensor& pool, kda_conv_layout layout, int64_t slot)
      : data_(at(pool, slot)),
        dtype_(pool.dtype),
        size_(static_cast<int64_t>(dtype_size(pool.dtype))),
        columns_(pool.shape[layout == KDA_CONV_SD ? 1 : 2]),
        channel_stride_(layout == KDA_CONV_SD ? pool.strides[2] : pool.strides[1]),
        column_stride_(layout == KDA_CONV_SD ? pool.strides[1] : pool.strides[2]) {}

  kda_dtype dtype() const { return dtype_; }
  int64_t columns() const { return columns_; }
  char* element(int64_t channel, int64_t column) const {
    return data_ + (channel * channel_stride_ + column * column_stride_) * size_;
  }
  double get(int64_t channel, int64_t column) const { return load(element(channel, column), dtype_); }

  // Moves columns [from, from + count) to [0, count) of one channel (W-4's commit).
  void shift(int64_t channel, int64_t from, int64_t count) const {
    if (from == 0) return;
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(element(channel, i), element(channel, from + i), static_cast<size_t>(size_));
    }
  }

 private:
  char* data_;
  kda_dtype dtype_;
  int64_t size_, columns_, channel_stride_, column_stride_;
};

}  // namespace kda::reference

// A conv pool seen as (slot, channel, column), whatever its layout (spec P-2).
#pragma once

#include <cstdint>
#include <cstring>

#include "base/tensor.h"

namespace kda::cpu {

struct ConvPool {
  char* data = nullptr;
  kda_dtype dtype = KDA_DTYPE_NONE;
  int64_t size = 0;                                                // bytes of an element
  int64_t slot_stride = 0, column_stride = 0, channel_stride = 0;  // elements
  int64_t channels = 0;

  ConvPool() = default;
  ConvPool(const kda_tensor& t, kda_conv_layout layout)
      : data(static_cast<char*>(t.data)),
        dtype(t.dtype),
        size(static_cast<int64_t>(dtype_size(t.dtype))),
        slot_stride(t.strides[0]),
        column_stride(layout == KDA_CONV_SD ? t.strides[1] : 1),
        channel_stride(layout == KDA_CONV_SD ? 1 : t.strides[1]),
        channels(t.shape[layout == KDA_CONV_SD ? 2 : 1]) {}

  char* at(int64_t slot, int64_t column, int64_t channel) const {
    return data + (slot * slot_stride + column * column_stride + channel * channel_stride) * size;
  }

  // Bit-exact copy of channels [c0, c0 + n) of one column (W-1).
  void copy_column(int64_t from_slot, int64_t from_column, int64_t to_slot, int64_t to_column, int64_t c0,
                   int64_t n) const {
    copy(at(from_slot, from_column, c0), channel_stride, at(to_slot, to_column, c0), channel_stride, n, size);
  }
  void zero_column(int64_t slot, int64_t column, int64_t c0, int64_t n) const {
    if (channel_stride == 1) {
      std::memset(at(slot, column, c0), 0, static_cast<size_t>(n * size));
      return;
    }
    for (int64_t c = 0; c < n; ++c) std::memset(at(slot, column, c0 + c), 0, static_cast<size_t>(size));
  }

  static void copy(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t n, int64_t bytes) {
    if (from_stride == 1 && to_stride == 1) {
      std::memmove(to, from, static_cast<size_t>(n * bytes));
    } else if (bytes == 2) {
      copy_elements<uint16_t>(from, from_stride, to, to_stride, n);
    } else {
      copy_elements<uint32_t>(from, from_stride, to, to_stride, n);
    }
  }

 private:
  template <class E>
  static void copy_elements(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t n) {
    const auto* f = reinterpret_cast<const E*>(from);
    auto* t = reinterpret_cast<E*>(to);
    for (int64_t c = 0; c < n; ++c) t[c * to_stride] = f[c * from_stride];
  }
};

}  // namespace kda::cpu

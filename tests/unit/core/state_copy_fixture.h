// Buffers and a plain-loop model for the state-copy tests: every byte of every buffer is compared, so that gaps,
// guards and unselected rows are covered by the same comparison as the copied rows.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/tensor.h"
#include "kda/kda.h"
#include "support/device.h"

namespace kda::conformance::test {

// Bytes at an address of a chosen class mod 16, full of a seeded pattern, with guards on both sides.
class CopyMemory {
 public:
  static constexpr size_t kGuard = 64;

  CopyMemory() = default;
  CopyMemory(size_t bytes, int alignment_class, uint64_t seed)
      : bytes_(bytes), class_(static_cast<size_t>(alignment_class)) {
    const size_t total = (bytes + 2 * kGuard + 64 + 63) / 64 * 64;
    memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(64, total)));
    total_ = total;
    // A period that no row size is a multiple of, so that no two rows look alike.
    constexpr size_t kPeriod = 65521 * 8;
    uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
    for (size_t i = 0; i < std::min(total, kPeriod); i += 8) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      std::memcpy(memory_.get() + i, &state, 8);
    }
    for (size_t i = kPeriod; i < total; i += kPeriod) {
      std::memcpy(memory_.get() + i, memory_.get(), std::min(kPeriod, total - i));
    }
  }
  CopyMemory(const CopyMemory& o) : bytes_(o.bytes_), class_(o.class_), total_(o.total_) {
    memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(64, total_)));
    std::memcpy(memory_.get(), o.memory_.get(), total_);
  }
  CopyMemory(CopyMemory&&) = default;
  CopyMemory& operator=(CopyMemory&&) = default;

  unsigned char* data() const { return memory_.get() + kGuard + class_; }
  size_t size() const { return bytes_; }
  bool operator==(const CopyMemory& o) const {
    return total_ == o.total_ && std::memcmp(memory_.get(), o.memory_.get(), total_) == 0;
  }

 private:
  struct Free {
    void operator()(unsigned char* p) const { std::free(p); }
  };
  size_t bytes_ = 0, class_ = 0, total_ = 0;
  std::unique_ptr<unsigned char, Free> memory_;
};

// A pool layout.
struct PoolShape {
  int64_t rows = 5, hv = 2, v = 3, k = 4;
  kda_dtype dtype = KDA_FP32;
  int64_t gap = 0;     // elements between payload and row stride
  int64_t offset = 0;  // elements before row 0
  int alignment = 0;   // of row 0, mod 16
  kda_dtype packed = KDA_DTYPE_NONE;

  int64_t payload() const { return hv * v * k; }
  int64_t stride() const { return payload() + gap; }
  int64_t size() const { return static_cast<int64_t>(dtype_size(dtype)); }
  kda_dtype packed_dtype() const { return packed == KDA_DTYPE_NONE ? dtype : packed; }
  int64_t packed_size() const { return static_cast<int64_t>(dtype_size(packed_dtype())); }
};

// A pool in memory, with a pattern everywhere.
struct Pool {
  explicit Pool(const PoolShape& s, uint64_t seed = 7)
      : shape(s),
        memory(static_cast<size_t>((s.offset + (s.rows - 1) * s.stride() + s.payload()) * s.size()), start_class(s),
               seed) {}
  static int start_class(const PoolShape& s) {
    return static_cast<int>(((s.alignment - s.offset * s.size()) % 16 + 16) % 16);
  }
  unsigned char* row(int64_t r) const { return memory.data() + (shape.offset + r * shape.stride()) * shape.size(); }
  kda_tensor view() const {
    kda_tensor t = make_tensor(row(0), shape.dtype, {shape.rows, shape.hv, shape.v, shape.k});
    t.strides[0] = shape.stride();
    return t;
  }
  PoolShape shape;
  CopyMemory memory;
};

struct Packed {
  Packed(const PoolShape& s, int64_t rows, uint64_t seed = 11, int alignment = 0, int64_t row_gap = 0)
      : shape(s),
        n(rows),
        gap(row_gap),
        memory(static_cast<size_t>(rows * (s.payload() + row_gap) * s.packed_size()), alignment, seed) {}
  unsigned char* row(int64_t i) const { return memory.data() + i * (shape.payload() + gap) * shape.packed_size(); }
  kda_tensor view() const {
    kda_tensor t = make_tensor(memory.data(), shape.packed_dtype(), {n, shape.hv, shape.v, shape.k});
    t.strides[0] = shape.payload() + gap;
    return t;
  }
  PoolShape shape;
  int64_t n, gap;
  CopyMemory memory;
};

// Index vector of either dtype with a stride; the places between hold 9999 (F37).
class Indices {
 public:
  Indices(const std::vector<int64_t>& x, kda_dtype dtype, int64_t stride = 1)
      : n_(static_cast<int64_t>(x.size())), dtype_(dtype), stride_(stride) {
    memory_.assign(static_cast<size_t>(std::max<int64_t>(1, n_ * stride)), 9999);
    narrow_.assign(memory_.size(), 9999);
    for (size_t i = 0; i < x.size(); ++i) {
      memory_[i * static_cast<size_t>(stride)] = x[i];
      narrow_[i * static_cast<size_t>(stride)] = static_cast<int32_t>(x[i]);
    }
  }
  kda_tensor view() const {
    void* data = dtype_ == KDA_INT64 ? static_cast<void*>(const_cast<int64_t*>(memory_.data()))
                                     : static_cast<void*>(const_cast<int32_t*>(narrow_.data()));
    kda_tensor t = make_tensor(data, dtype_, {n_});
    t.strides[0] = stride_;
    return t;
  }
  int64_t operator[](size_t i) const {
    const size_t at = i * static_cast<size_t>(stride_);
    return dtype_ == KDA_INT64 ? memory_[at] : narrow_[at];
  }

 private:
  int64_t n_;
  kda_dtype dtype_;
  int64_t stride_;
  std::vector<int64_t> memory_;
  std::vector<int32_t> narrow_;
};

inline kda_tensor flags_view(const std::vector<uint8_t>& flags) {
  return make_tensor(const_cast<uint8_t*>(flags.data()), KDA_BOOL, {static_cast<int64_t>(flags.size())});
}

inline kda_state_copy_desc copy_desc(const kda_tensor& pool, int64_t max_selected, kda_dtype packed = KDA_DTYPE_NONE,
                                     const char* backend = nullptr) {
  auto desc = sized<kda_state_copy_desc>();
  desc.pool = pool;
  desc.max_selected = max_selected;
  desc.packed_dtype = packed;
  desc.backend = backend;
  return desc;
}

inline Plan copy_plan(kda_state_copy_desc desc, kda_context* context = nullptr) {
  // Of the pool's address, preparation looks at its place modulo 16 alone, which a device's copy keeps.
  if (context == nullptr && on_device()) desc.pool.device = {KDA_CUDA, 0};
  return Plan(kda_state_copy_plan_create, context != nullptr ? context : test_context(), desc);
}

inline kda_state_copy_args copy_args(const kda_tensor& pool, const kda_tensor& indices, const kda_tensor& packed,
                                     const kda_tensor& flags = {}) {
  auto args = sized<kda_state_copy_args>();
  args.pool = pool;
  args.indices = indices;
  args.packed = packed;
  args.has_initial_state = flags;
  return args;
}

using CopyFunction = kda_status (*)(const kda_plan*, const kda_state_copy_args*, void*);
inline kda_status copy_call(CopyFunction function, const Plan& plan, kda_state_copy_args args) {
  if (!on_device()) return function(plan.get(), &args, nullptr);
  return call_there({&args.pool, &args.indices, &args.has_initial_state, &args.packed},
                    [&] { return function(plan.get(), &args, nullptr); });
}
inline kda_status gather(const Plan& plan, const kda_state_copy_args& args) {
  return copy_call(kda_state_gather, plan, args);
}
inline kda_status scatter(const Plan& plan, const kda_state_copy_args& args) {
  return copy_call(kda_state_scatter, plan, args);
}

// The definition (spec C-1, C-2) for equal dtypes, as a plain loop over rows.
inline void model_gather(const Pool& pool, const Indices& idx, const std::vector<uint8_t>& flags, Packed& packed) {
  for (int64_t i = 0; i < packed.n; ++i) {
    const int64_t r = idx[static_cast<size_t>(i)];
    const auto bytes = static_cast<size_t>(pool.shape.payload() * pool.shape.size());
    const bool live = r >= 0 && r < pool.shape.rows && (flags.empty() || flags[static_cast<size_t>(i)] != 0);
    if (live) std::memcpy(packed.row(i), pool.row(r), bytes);
    else std::memset(packed.row(i), 0, bytes);
  }
}
inline void model_scatter(Pool& pool, const Indices& idx, const Packed& packed) {
  for (int64_t i = 0; i < packed.n; ++i) {
    const int64_t r = idx[static_cast<size_t>(i)];
    if (r < 0 || r >= pool.shape.rows) continue;
    std::memcpy(pool.row(r), packed.row(i), static_cast<size_t>(pool.shape.payload() * pool.shape.size()));
  }
}

}  // namespace kda::conformance::test

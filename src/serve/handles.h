// Owners of the C ABI's objects, and small helpers over its structs.
#pragma once

#include <kda/kda.h>
#include <kda/state_pool.h>

#include <cstdlib>
#include <initializer_list>
#include <memory>

#include "serve/status.h"

namespace kda::serve {

template <class T, void (*Destroy)(T*)>
struct Deleter {
  void operator()(T* object) const { Destroy(object); }
};
using ContextHandle = std::unique_ptr<kda_context, Deleter<kda_context, kda_context_destroy>>;
using PlanHandle = std::unique_ptr<kda_plan, Deleter<kda_plan, kda_plan_destroy>>;
using PoolHandle = std::unique_ptr<kda_state_pool, Deleter<kda_state_pool, kda_state_pool_destroy>>;

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};

// Raw memory aligned to 256 bytes; contents unspecified.
class Buffer {
 public:
  Buffer() = default;
  static Result<Buffer> allocate(int64_t bytes) {
    Buffer b;
    const auto rounded = (static_cast<size_t>(bytes) + 255) / 256 * 256;
    b.data_.reset(static_cast<char*>(std::aligned_alloc(256, rounded == 0 ? 256 : rounded)));
    if (!b.data_) return error(KDA_OUT_OF_MEMORY, "no memory for {} bytes", bytes);
    b.bytes_ = rounded;
    return b;
  }
  char* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<char, FreeDeleter> data_;
  size_t bytes_ = 0;
};

// A dense row-major view in host memory; absent if the sizes have no product.
inline kda_tensor view(const void* data, kda_dtype dtype, std::initializer_list<int64_t> shape) {
  kda_tensor t{};
  t.data = const_cast<void*>(data);
  t.dtype = dtype;
  t.device = {KDA_CPU, 0};
  t.rank = static_cast<int32_t>(shape.size());
  int i = 0;
  for (int64_t extent : shape) t.shape[i++] = extent;
  return kda_tensor_make_dense(&t) == KDA_OK ? t : kda_tensor{};
}

// The same with a free stride between rows.
inline kda_tensor rows_view(const void* data, kda_dtype dtype, std::initializer_list<int64_t> shape,
                            int64_t row_stride) {
  kda_tensor t = view(data, dtype, shape);
  t.strides[0] = row_stride;
  return t;
}

}  // namespace kda::serve

#include <algorithm>
#include <cstring>
#include <new>

#include "bench/workload.h"
#include "conformance/random.h"
#include "conformance/rounding.h"

namespace kda::bench {

kda_tensor Arena::zeros(kda_dtype dtype, const std::vector<int64_t>& shape) {
  kda_tensor t{};
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  int64_t count = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.shape[i] = shape[static_cast<size_t>(i)];
    t.strides[i] = count;
    if (__builtin_mul_overflow(count, t.shape[i], &count)) throw std::bad_alloc();
  }
  // Far more than there is; the product with the dtype's size stays small enough for any allocator.
  if (count > (int64_t{1} << 56)) throw std::bad_alloc();
  memory_.push_back(pages(static_cast<size_t>(count) * kda_dtype_size(dtype)));
  t.data = memory_.back().get();
  return t;
}

kda_tensor Arena::random(kda_dtype dtype, const std::vector<int64_t>& shape, double scale) {
  const kda_tensor t = zeros(dtype, shape);
  size_t count = 1;
  for (int64_t s : shape) count *= static_cast<size_t>(s);
  const size_t size = kda_dtype_size(dtype);
  // Rounding each value takes time: a block of them, repeated.
  const size_t block = std::min<size_t>(count, 65521);
  auto* const bytes = static_cast<char*>(t.data);
  for (size_t i = 0; i < block; ++i) {
    conformance::store(bytes + i * size, dtype,
                       scale * conformance::uniform(static_cast<uint32_t>(memory_.size()), i));
  }
  for (size_t at = block; at < count; at += block) {
    std::memcpy(bytes + at * size, bytes, std::min(block, count - at) * size);
  }
  return t;
}

kda_tensor Arena::ints(const std::vector<int64_t>& x) {
  const kda_tensor t = zeros(KDA_INT32, {static_cast<int64_t>(x.size())});
  for (size_t i = 0; i < x.size(); ++i) static_cast<int32_t*>(t.data)[i] = static_cast<int32_t>(x[i]);
  return t;
}

kda_workspace Arena::workspace(const Plan& plan) {
  const size_t bytes = plan.workspace_size();
  memory_.push_back(pages(bytes));
  return {memory_.back().get(), bytes};
}

}  // namespace kda::bench

#include <kda/device.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "bench/workload.h"
#include "conformance/random.h"
#include "conformance/rounding.h"

namespace kda::bench {
namespace {

size_t bytes_of(const kda_tensor& t) {
  size_t count = 1;
  for (int i = 0; i < t.rank; ++i) count *= static_cast<size_t>(t.shape[i]);
  return count * kda_dtype_size(t.dtype);
}

}  // namespace

kda_tensor Arena::room(kda_dtype dtype, const std::vector<int64_t>& shape) {
  kda_tensor t{};
  t.dtype = dtype;
  t.device = device_;
  t.rank = static_cast<int32_t>(shape.size());
  std::copy_n(shape.begin(), std::min<size_t>(shape.size(), KDA_MAX_RANK), t.shape);
  if (kda_tensor_make_dense(&t) != KDA_OK) throw std::bad_alloc();
  const int64_t count = t.rank > 0 ? t.shape[0] * t.strides[0] : 1;
  // Far more than there is; the product with the dtype's size stays small enough for any allocator.
  if (count > (int64_t{1} << 56)) throw std::bad_alloc();
  const size_t bytes = static_cast<size_t>(count) * kda_dtype_size(dtype);
  if (device_.type == KDA_CPU) {
    memory_.push_back(pages(bytes));
  } else {
    void* memory = nullptr;
    check(kda_memory_allocate(context_, KDA_MEMORY_DEVICE, std::max<size_t>(1, bytes), &memory));
    const kda_context* context = context_;
    memory_.push_back({memory, [context](void* p) { (void)kda_memory_free(context, KDA_MEMORY_DEVICE, p); }});
  }
  t.data = memory_.back().get();
  return t;
}

void Arena::copy(void* to, const void* from, size_t bytes) const {
  check(kda_memory_copy(context_, to, from, bytes, nullptr));
  check(kda_stream_synchronize(context_, nullptr));
}

kda_tensor Arena::zeros(kda_dtype dtype, const std::vector<int64_t>& shape) {
  const kda_tensor t = room(dtype, shape);
  if (device_.type == KDA_CPU) return t;
  const size_t bytes = bytes_of(t);
  const std::vector<char> block(std::min<size_t>(bytes, size_t{64} << 20), 0);
  for (size_t at = 0; at < bytes; at += block.size())
    copy(static_cast<char*>(t.data) + at, block.data(), std::min(block.size(), bytes - at));
  return t;
}

kda_tensor Arena::random(kda_dtype dtype, const std::vector<int64_t>& shape, double scale, bool decays) {
  const kda_tensor t = room(dtype, shape);
  const size_t size = kda_dtype_size(dtype), bytes = bytes_of(t), count = bytes / size;
  // Rounding each value takes time: a block of them, repeated.
  std::vector<char> block(std::min<size_t>(count, 65521) * size);
  for (size_t i = 0; i * size < block.size(); ++i) {
    const double x = scale * conformance::uniform(static_cast<uint32_t>(memory_.size()), i);
    conformance::store(block.data() + i * size, dtype, decays ? -x * x : x);
  }
  auto* const to = static_cast<char*>(t.data);
  if (bytes == 0) return t;
  copy(to, block.data(), block.size());
  for (size_t done = block.size(); done < bytes; done += std::min(done, bytes - done))
    copy(to + done, to, std::min(done, bytes - done));
  return t;
}

kda_tensor Arena::ints(const std::vector<int64_t>& x, kda_dtype dtype) {
  const kda_tensor t = room(dtype, {static_cast<int64_t>(x.size())});
  std::vector<char> host(bytes_of(t) + 8);
  for (size_t i = 0; i < x.size(); ++i)
    std::memcpy(host.data() + i * kda_dtype_size(dtype), &x[i], kda_dtype_size(dtype));  // little-endian
  copy(t.data, host.data(), bytes_of(t));
  return t;
}

kda_workspace Arena::workspace(const Plan& plan) {
  const size_t bytes = plan.workspace_size();
  return {room(KDA_UINT8, {static_cast<int64_t>(bytes)}).data, bytes};
}

kda_tensor part(kda_tensor t, int64_t i, int64_t of) {
  t.shape[0] /= of;
  t.data = static_cast<char*>(t.data) + i * t.shape[0] * t.strides[0] * static_cast<int64_t>(kda_dtype_size(t.dtype));
  return t;
}

}  // namespace kda::bench

#include "plans.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <unordered_map>

// In libtorch_cuda: absent where PyTorch was built for the CPU.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
__attribute__((weak)) AOTITorchError aoti_torch_get_current_device_index(int32_t* device);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t bytes, void** memory);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_caching_allocator_raw_delete(void* memory);
}

namespace {

// Memory of PyTorch's caching allocator without a tensor around it, which costs a call a microsecond and more. Of the
// current stream and the current device only: null on another one, and where this PyTorch does not offer it.
void* cuda_memory(size_t bytes, kda_device device) {
  if (device.type != KDA_CUDA || aoti_torch_cuda_caching_allocator_raw_alloc == nullptr ||
      aoti_torch_cuda_caching_allocator_raw_delete == nullptr || aoti_torch_get_current_device_index == nullptr) {
    return nullptr;
  }
  int32_t current = -1;
  void* memory = nullptr;
  if (aoti_torch_get_current_device_index(&current) != AOTI_TORCH_SUCCESS || current != device.index) return nullptr;
  return aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &memory) == AOTI_TORCH_SUCCESS ? memory : nullptr;
}

// A caller with its own memory plan (a serving framework's workspace) lends scratch to the operators of its thread.
struct Lent {
  void* data = nullptr;
  size_t bytes = 0;
  bool measuring = false;
  size_t needed = 0;
};
thread_local Lent lent;

}  // namespace

// Operators of the calling thread take their scratch from `data` until the next call (less what its
// alignment costs); NULL: from PyTorch again.
extern "C" __attribute__((visibility("default"))) void libkda_torch_lend(void* data, size_t bytes) {
  void* const aligned = std::align(KDA_WORKSPACE_ALIGNMENT, 0, data, bytes);
  lent.data = aligned != nullptr ? aligned : data;
  lent.bytes = aligned != nullptr ? bytes : 0;
}

// on: operators of the calling thread make their plans but run nothing. Returns the largest need since it was last
// on.
extern "C" __attribute__((visibility("default"))) size_t libkda_torch_measure(int32_t on) {
  if (on != 0) lent.needed = 0;
  lent.measuring = on != 0;
  return lent.needed;
}

namespace kda::torch_ops {
namespace {

// The CPU backend runs on PyTorch's threads: two pools in one process would fight for the cores.
void on_torch_threads(void*, int32_t n, void (*body)(void*, int32_t), void* arg) {
  struct Call {
    void (*body)(void*, int32_t);
    void* arg;
  } call{body, arg};
  torch_parallel_for(
      0, n, 1,
      [](int64_t begin, int64_t end, void* opaque) {
        const Call& c = *static_cast<const Call*>(opaque);
        for (int64_t i = begin; i < end; ++i) c.body(c.arg, static_cast<int32_t>(i));
      },
      &call);
}

struct Hash {
  using is_transparent = void;
  size_t operator()(std::string_view key) const { return std::hash<std::string_view>()(key); }
};

// Contexts and plans of the process. Never destroyed: other threads may still run at exit.
class Cache {
 public:
  static Cache& instance() {
    static Cache* const cache = new Cache;
    return *cache;
  }

  size_t size() {
    const std::shared_lock lock(mutex_);
    return plans_.size();
  }

  const kda_plan* find(std::string_view key) {
    const std::shared_lock lock(mutex_);
    const auto it = plans_.find(key);
    return it == plans_.end() ? nullptr : it->second;
  }

  template <class Create>
  const kda_plan* create(std::string_view key, kda_device device, int32_t threads, const Create& create) {
    const std::unique_lock lock(mutex_);
    const auto it = plans_.find(key);
    if (it != plans_.end()) return it->second;
    const kda_plan* plan = create(context(device, threads));
    plans_.emplace(key, plan);
    return plan;
  }

 private:
  kda_context* context(kda_device device, int32_t threads) {
    const std::string name =
        std::to_string(device.type) + ":" + std::to_string(device.index) + ":" + std::to_string(threads);
    kda_context*& c = contexts_[name];
    if (c != nullptr) return c;
    auto options = zeroed<kda_context_options>();
    options.device = device;
    options.num_threads = threads;
    if (device.type == KDA_CPU) options.parallel_for = on_torch_threads;
    check(kda_context_create(&options, &c));
    return c;
  }

  std::shared_mutex mutex_;
  std::unordered_map<std::string, const kda_plan*, Hash, std::equal_to<>> plans_;
  std::unordered_map<std::string, kda_context*> contexts_;
};

// A key's bytes, on the stack.
class Key {
 public:
  template <class T>
  void add(const T& value) {
    add(&value, sizeof value);
  }
  void add(const void* data, size_t size) {
    if (size_ + size > sizeof bytes_) throw std::runtime_error("libkda: description too long");
    std::memcpy(bytes_ + size_, data, size);
    size_ += size;
  }
  std::string_view view() const { return {bytes_, size_}; }

 private:
  char bytes_[768];
  size_t size_ = 0;
};

}  // namespace

int64_t bound(int64_t given, int64_t needed) {
  if (given > 0) return given;
  if (needed < 0 || needed > INT64_MAX / 4)
    bad_argument("tokens: wanted a count below 2^61, got " + std::to_string(needed));
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(needed < 16 ? 16 : needed)));
}

uint64_t layout_class(const kda_tensor& t) {
  uint64_t c = static_cast<uint64_t>(t.rank) + 1;
  const auto size = static_cast<int64_t>(kda_dtype_size(t.dtype));
  for (int32_t i = 0; i < t.rank; ++i) {
    const bool last = i + 1 == t.rank;
    const bool fine = t.shape[i] <= 1 || (last ? t.strides[i] == 1 : t.strides[i] * size % 16 == 0);
    c = c * 2 + (fine ? 1 : 0);
  }
  const int64_t pitch = t.rank >= 3 ? t.strides[t.rank - 3] : 0;
  return c * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(pitch);
}

const kda_plan* find_plan(const PlanRequest& request, const void* desc, size_t size,
                          kda_plan* (*create)(kda_context*, const void*, const char*, const void*),
                          const void* more) {
  uint32_t threads = 0;
  if (request.device.type == KDA_CPU) torch_get_num_threads(&threads);
  Key key;
  key.add(request.op);
  key.add(request.device);
  key.add(threads);
  key.add(request.layouts, request.num_layouts * sizeof *request.layouts);
  key.add(desc, size);
  key.add(request.backend.data(), request.backend.size());
  if (const kda_plan* plan = Cache::instance().find(key.view())) return plan;
  const std::string backend(request.backend);
  return Cache::instance().create(
      key.view(), request.device, static_cast<int32_t>(threads),
      [&](kda_context* context) { return create(context, desc, backend.empty() ? nullptr : backend.c_str(), more); });
}

size_t plan_count() { return Cache::instance().size(); }

void* current_stream(kda_device device) {
  if (device.type == KDA_CPU) return nullptr;
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr ||
      aoti_torch_get_current_cuda_stream(device.index, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("libkda: this PyTorch has no CUDA streams");
  }
  return stream;
}

bool only_measured(const kda_plan* plan) {
  if (!lent.measuring) return false;
  size_t bytes = 0;
  check(kda_plan_workspace_size(plan, &bytes));
  lent.needed = std::max(lent.needed, bytes);
  return true;
}

Scratch::Scratch(const kda_plan* plan, kda_device device) {
  size_t bytes = 0;
  check(kda_plan_workspace_size(plan, &bytes));
  if (bytes == 0) return;
  if (lent.data != nullptr) {
    if (bytes > lent.bytes) {
      throw std::runtime_error("WORKSPACE_TOO_SMALL: scratch: wanted " + std::to_string(bytes) +
                               " bytes, lent were " + std::to_string(lent.bytes));
    }
    grant_ = {lent.data, lent.bytes};
    return;
  }
  bare_ = cuda_memory(bytes, device);
  if (bare_ != nullptr) {
    grant_ = {bare_, bytes};
    return;
  }
  // The CPU's allocator aligns to 64 bytes only.
  const int64_t shape = static_cast<int64_t>(bytes) + (device.type == KDA_CPU ? KDA_WORKSPACE_ALIGNMENT : 0);
  memory_ = empty(&shape, 1, KDA_UINT8, device);
  void* data = nullptr;
  aoti_torch_get_data_ptr(memory_, &data);
  size_t space = static_cast<size_t>(shape);
  grant_ = {std::align(KDA_WORKSPACE_ALIGNMENT, bytes, data, space), bytes};
}

Scratch::~Scratch() {
  if (bare_ != nullptr) aoti_torch_cuda_caching_allocator_raw_delete(bare_);
  if (memory_ != nullptr) aoti_torch_delete_tensor_object(memory_);
}

}  // namespace kda::torch_ops

// Plans that the operators of this process keep.
extern "C" __attribute__((visibility("default"))) size_t libkda_torch_plans() { return kda::torch_ops::plan_count(); }

// The device that a replay runs on: the context of its plans, one stream, memory there, and a context whose threads
// do the host's share of the work.
#pragma once

#include <kda/device.h>

#include <memory>
#include <utility>

#include "serve/handles.h"

namespace kda::serve {

// Memory of one kind on a device, aligned to 256 bytes; contents unspecified.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(const kda_context* context, kda_memory_kind kind, char* data, size_t bytes)
      : context_(context), kind_(kind), data_(data), bytes_(bytes) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceBuffer() {
    if (data_ != nullptr) static_cast<void>(kda_memory_free(context_, kind_, data_));
  }

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void swap(DeviceBuffer& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(kind_, other.kind_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  const kda_context* context_ = nullptr;
  kda_memory_kind kind_ = KDA_MEMORY_DEVICE;
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

class Device {
 public:
  // `threads`: of the host's work, 0 = all cores.
  static Result<std::unique_ptr<Device>> open(kda_device_type type, int threads);
  // Borrows a context of the CPU.
  explicit Device(kda_context* cpu) : context_(cpu), host_(cpu) {}
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  kda_context* context() const { return context_; }  // of plans and pools
  kda_context* host() const { return host_; }
  void* stream() const { return stream_; }
  bool is_host() const { return context_ == host_; }

  Status allocate(int64_t bytes, DeviceBuffer& out, kda_memory_kind kind = KDA_MEMORY_DEVICE) const;
  // In the order of the stream.
  Status copy(void* to, const void* from, int64_t bytes) const;
  Status synchronize() const;
  // Allocates and fills from host memory; done on return.
  Status upload(const void* from, int64_t bytes, DeviceBuffer& out) const;
  // Dense views in the device's memory.
  kda_tensor at(const void* data, kda_dtype dtype, std::initializer_list<int64_t> shape) const {
    return placed(view(data, dtype, shape));
  }
  kda_tensor rows_at(const void* data, kda_dtype dtype, std::initializer_list<int64_t> shape, int64_t stride) const {
    return placed(rows_view(data, dtype, shape, stride));
  }

 private:
  kda_tensor placed(kda_tensor t) const {
    t.device = {is_host() ? KDA_CPU : KDA_CUDA, 0};
    return t;
  }

  ContextHandle owned_host_, owned_device_;
  kda_context* context_ = nullptr;
  kda_context* host_ = nullptr;
  void* stream_ = nullptr;
};

}  // namespace kda::serve

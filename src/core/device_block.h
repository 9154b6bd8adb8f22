// Memory of a context's device that is freed with its owner, and its filling from the host at creation time.
#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include "core/context.h"
#include "core/device_runtime.h"

namespace kda {

class DeviceBlock {
 public:
  DeviceBlock() = default;
  DeviceBlock(DeviceBlock&& other) noexcept { swap(other); }
  DeviceBlock& operator=(DeviceBlock&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceBlock() {
    if (data_ != nullptr) (void)runtime_->release(KDA_MEMORY_DEVICE, data_).ok();
  }

  // Aligned to 256 bytes, contents unspecified.
  static Result<DeviceBlock> allocate(const Context& context, int64_t bytes) {
    auto memory = context.runtime->allocate(KDA_MEMORY_DEVICE, static_cast<size_t>(bytes));
    if (!memory.ok()) return memory.status();
    DeviceBlock block;
    block.runtime_ = context.runtime;
    block.data_ = static_cast<char*>(memory.value());
    block.bytes_ = bytes;
    return block;
  }

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void swap(DeviceBlock& other) noexcept {
    std::swap(runtime_, other.runtime_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  const DeviceRuntime* runtime_ = nullptr;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

// A stream for the time of a creation; never the device's default one.
class CreationStream {
 public:
  explicit CreationStream(const Context& context) : runtime_(*context.runtime), stream_(runtime_.create_stream()) {}
  ~CreationStream() {
    if (stream_.ok()) (void)runtime_.destroy_stream(stream_.value()).ok();
  }
  CreationStream(const CreationStream&) = delete;
  CreationStream& operator=(const CreationStream&) = delete;

  Status status() const { return stream_.ok() ? Status() : stream_.status(); }
  void* get() const { return stream_.value(); }
  Status synchronize() const { return runtime_.synchronize(stream_.value()); }

 private:
  const DeviceRuntime& runtime_;
  Result<void*> stream_;
};

}  // namespace kda

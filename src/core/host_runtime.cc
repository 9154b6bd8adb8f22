#include <chrono>
#include <cstdlib>
#include <cstring>

#include "core/device_runtime.h"

namespace kda {
namespace {

class HostEvent final : public DeviceEvent {
 public:
  Status record(void*) override {
    time_ = std::chrono::steady_clock::now();
    return {};
  }
  Result<double> seconds_until(const DeviceEvent& later) const override {
    return std::chrono::duration<double>(static_cast<const HostEvent&>(later).time_ - time_).count();
  }

 private:
  std::chrono::steady_clock::time_point time_;
};

Status no_graphs() { return unsupported("graph: wanted a device that has graphs, got the CPU"); }

class HostRuntime final : public DeviceRuntime {
 public:
  Result<void*> allocate(kda_memory_kind, size_t bytes) const override {
    constexpr size_t kAlignment = KDA_WORKSPACE_ALIGNMENT;
    if (bytes == 0) return nullptr;
    void* memory = bytes > SIZE_MAX - kAlignment
                       ? nullptr
                       : std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (memory == nullptr)
      return Status(KDA_OUT_OF_MEMORY, str_cat("host memory: wanted ", bytes, " bytes, got none"));
    return memory;
  }
  Status release(kda_memory_kind, void* memory) const override {
    std::free(memory);
    return {};
  }
  Status copy(void* to, const void* from, size_t bytes, void*) const override {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return {};
  }
  Status copy_rows(void* to, const void* from, const ByteRows& r, void*) const override {
    for (int64_t i = 0; i < r.rows; ++i) {
      std::memcpy(static_cast<char*>(to) + i * r.to_pitch, static_cast<const char*>(from) + i * r.from_pitch,
                  static_cast<size_t>(r.width));
    }
    return {};
  }
  Status zero_rows(void* to, int64_t width, int64_t rows, int64_t pitch, void*) const override {
    for (int64_t i = 0; i < rows; ++i) {
      std::memset(static_cast<char*>(to) + i * pitch, 0, static_cast<size_t>(width));
    }
    return {};
  }
  Status read(void* host, const void* device, size_t bytes, void* stream) const override {
    return copy(host, device, bytes, stream);
  }
  Result<void*> create_stream() const override { return nullptr; }
  Status destroy_stream(void*) const override { return {}; }
  Status synchronize(void*) const override { return {}; }
  Result<std::unique_ptr<DeviceEvent>> create_event() const override {
    return std::unique_ptr<DeviceEvent>(std::make_unique<HostEvent>());
  }
  Status begin_graph(void*) const override { return no_graphs(); }
  Result<std::unique_ptr<DeviceGraph>> end_graph(void*) const override { return no_graphs(); }
};

}  // namespace

const DeviceRuntime& host_runtime() {
  static const HostRuntime runtime;
  return runtime;
}

}  // namespace kda

// Memory, streams, events and graphs of a device, as a backend offers them (kda/device.h). One object per device that
// lives as long as the process; every method may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "kda/device.h"

namespace kda {

// A rectangle of bytes: `rows` rows of `width`, `pitch` apart.
struct ByteRows {
  int64_t width = 0, rows = 1;
  int64_t to_pitch = 0, from_pitch = 0;
};

class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  virtual Status record(void* stream) = 0;
  virtual Result<double> seconds_until(const DeviceEvent& later) const = 0;
};

class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  virtual Status launch(void* stream) = 0;
};

class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  virtual Result<void*> allocate(kda_memory_kind kind, size_t bytes) const = 0;
  virtual Status release(kda_memory_kind kind, void* memory) const = 0;
  virtual Status copy(void* to, const void* from, size_t bytes, void* stream) const = 0;
  virtual Status copy_rows(void* to, const void* from, const ByteRows& rows, void* stream) const = 0;
  // `rows` rows of `width` bytes, `pitch` apart, become zeros; both are even.
  virtual Status zero_rows(void* to, int64_t width, int64_t rows, int64_t pitch, void* stream) const = 0;
  // Device memory to the host, waited for (checked mode, spec G-7). FAILED_PRECONDITION while `stream` is captured.
  virtual Status read(void* host, const void* device, size_t bytes, void* stream) const = 0;

  virtual Result<void*> create_stream() const = 0;
  virtual Status destroy_stream(void* stream) const = 0;
  virtual Status synchronize(void* stream) const = 0;

  virtual Result<std::unique_ptr<DeviceEvent>> create_event() const = 0;
  virtual Status begin_graph(void* stream) const = 0;
  virtual Result<std::unique_ptr<DeviceGraph>> end_graph(void* stream) const = 0;
};

// The CPU's.
const DeviceRuntime& host_runtime();

}  // namespace kda

// What a resolver may know about the device of a context: host facts only (spec R-12). Filled in by the backend that
// opens the device; a test fills it in by hand and so has any device that it likes.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace kda {

struct DeviceFacts {
  std::string name;              // "NVIDIA H200"
  int32_t major = 0, minor = 0;  // compute capability
  int32_t multiprocessors = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
  int64_t shared_bytes = 0;     // most shared memory of one block
  int32_t driver_version = 0;   // newest CUDA that the driver speaks, 1000 * major + 10 * minor
  int32_t runtime_version = 0;  // CUDA that this library was built with
  std::array<uint8_t, 16> uuid{};
};

}  // namespace kda

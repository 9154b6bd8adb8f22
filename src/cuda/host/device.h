// CUDA devices as the host sees them. The only users of the CUDA runtime are under src/cuda; nothing in this header
// needs its types.
#pragma once

#include "base/status.h"
#include "core/device.h"

namespace kda::cuda {

// Number of devices. UNSUPPORTED with the loader's or the driver's message on a machine that has none to offer.
Result<int32_t> device_count();
// Facts of device `index`; INVALID_ARGUMENT if there is no such device.
Result<DeviceFacts> device_facts(int32_t index);
// device_facts, and the device's primary context made, so that no later call pays for it.
Result<DeviceFacts> open_device(int32_t index);

// Makes `index` the calling thread's device for the guard's life. Costs two short calls into the runtime when it
// already is.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  Status status() const { return status_; }

 private:
  int32_t before_ = -1;
  bool changed_ = false;
  Status status_;
};

}  // namespace kda::cuda

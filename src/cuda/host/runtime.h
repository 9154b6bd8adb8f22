// The runtime of one CUDA device behind core's interface.
#pragma once

#include "core/device_runtime.h"

namespace kda::cuda {

// Lives as long as the process; any thread. `index` >= 0 is a device that has been opened (open_device).
const DeviceRuntime& device_runtime(int32_t index);

}  // namespace kda::cuda

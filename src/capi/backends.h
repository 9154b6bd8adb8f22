// The one list of backends.
#pragma once

#include "core/backend.h"
#include "core/device_runtime.h"
#include "core/metadata_registry.h"

namespace kda::capi {

const Backends& backends();
// The process's list of metadata backends (spec M-24): the built-in ones, then what callers register.
MetadataRegistry& metadata_registry();

// The CUDA backend's view of the machine; UNSUPPORTED (`not_built`) in a library without it.
Result<int32_t> cuda_device_count();
Result<DeviceFacts> cuda_device_facts(int32_t index);
Result<DeviceFacts> cuda_open_device(int32_t index);
const DeviceRuntime& cuda_device_runtime(int32_t index);  // of a device that has been opened

}  // namespace kda::capi

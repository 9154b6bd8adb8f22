// The CUDA backend of a library built without it: no devices, and candidates that say `not_built`.
#pragma once

#include "core/backend.h"
#include "core/device.h"
#include "core/device_runtime.h"
#include "core/metadata_registry.h"
#include "cuda/host/not_built.h"

namespace kda::cuda {

inline void add_candidates(Backends& list) {
  add_not_built<Prefill>(list);
  add_not_built<Decode>(list);
  add_not_built<Commit>(list);
  add_not_built<DecodeStep>(list);
  add_not_built<Conv>(list);
  add_not_built<GatedNorm>(list);
  add_not_built<SegmentSummary>(list);
  add_not_built<SegmentMerge>(list);
  add_not_built<ResidualNorm>(list);
}

inline Status not_built() {
  return unsupported(
      "device: wanted a device whose backend is in this build (cpu), got cuda (not_built: the library "
      "has no CUDA backend)");
}
inline const DeviceRuntime& device_runtime(int32_t) { return host_runtime(); }  // never reached: no device opens
inline const ProjectionBackend* projection() { return nullptr; }
inline const CopyBackend* copy_backend() { return nullptr; }
inline const MetadataDevice* metadata_device() { return nullptr; }
inline Result<int32_t> device_count() { return not_built(); }
inline Result<DeviceFacts> device_facts(int32_t) { return not_built(); }
inline Result<DeviceFacts> open_device(int32_t) { return not_built(); }

}  // namespace kda::cuda

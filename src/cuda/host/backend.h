// What the rest of the library sees of the CUDA backend. A library built without it has the same functions from
// cuda/host/absent.h; capi/backends.cc chooses.
#pragma once

#include "core/backend.h"
#include "core/metadata_registry.h"
#include "core/projection.h"
#include "core/state_copy_backend.h"
#include "cuda/host/device.h"
#include "cuda/host/runtime.h"

namespace kda::cuda {

// Every operator's CUDA candidates in the order of R-8: `fused` before `portable`.
void add_candidates(Backends& list);

// The layer's dense projections; null in a build without the backend.
const ProjectionBackend* projection();

// State copies and step metadata; null in a build without the backend.
const CopyBackend* copy_backend();
const MetadataDevice* metadata_device();

}  // namespace kda::cuda

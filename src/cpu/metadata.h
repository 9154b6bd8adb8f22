// Step metadata on the CPU: host builds, serial, O(N + T) (spec M-23).
#pragma once

#include "core/metadata_registry.h"

namespace kda::cpu {

// A function-local static.
const MetadataDevice& metadata_device();

}  // namespace kda::cpu

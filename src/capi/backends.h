// The one list of backends.
#pragma once

#include "core/backend.h"
#include "core/metadata_registry.h"

namespace kda::capi {

const Backends& backends();
// The process's list of metadata backends (spec M-24): the built-in ones, then what callers register.
MetadataRegistry& metadata_registry();

}  // namespace kda::capi

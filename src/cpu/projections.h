// The CPU's projection backends, for the list in capi/backends.cc.
#pragma once

#include "core/projection.h"

namespace kda::cpu {

const ProjectionBackend* portable_projection();
// Of oneDNN; null in a library built without it.
const ProjectionBackend* onednn_projection();

}  // namespace kda::cpu

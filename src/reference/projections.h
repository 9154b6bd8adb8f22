// The oracle's dense projections, for the list in capi/backends.cc.
#pragma once

#include "core/projection.h"

namespace kda::reference {

const ProjectionBackend* projection();

}  // namespace kda::reference

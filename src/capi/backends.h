// The one list of backends.
#pragma once

#include "core/backend.h"

namespace kda::capi {

const Backends& backends();

}  // namespace kda::capi

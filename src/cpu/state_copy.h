// State copies on the CPU (spec Y-18).
#pragma once

#include "core/state_copy_backend.h"

namespace kda::cpu {

// A function-local static.
const CopyBackend* copy_backend();

}  // namespace kda::cpu

// The candidates of the CUDA backend (spec ). Each is a function-local static.
#pragma once

#include "core/backend.h"

namespace kda::cuda {}  // namespace kda::cuda

// Emulated: see instructions.h.
#pragma once

#include "cuda/ptx/instructions.h"

// The real one: ../emulation has a stand-in for the kernels that need less.
#pragma once

#include "../../../../../../src/cuda/kernels/common/math.cuh"

// One parameter of a layer as a tensor, by its name in checkpoints (spec L-1).
#pragma once

#include <string>

#include "layer/tensors.h"

namespace kda::layer {

// Views of the memory that `tensors` came from; sections of fused tensors are cut, A_log ends with the value heads.
// Matrices [rows, cols]; conv weights [channels, W]; A_log [HV]; dt_bias [HV, K]; o_norm.weight [V]; g_b_proj.bias
// [HV*V]; q_conv1d.bias ... [channels]. NOT_FOUND: there is none in this layer, or no such name.
Result<kda_tensor> parameter(const LayerTensors& tensors, const kda_layer_spec& spec, const std::string& name);

}  // namespace kda::layer

// Seeded weights of the parts of a KDA layer that core mode runs: conv taps, gate parameters, norm weight.
#pragma once

#include <cstdint>
#include <vector>

#include "serve/model.h"

namespace kda::serve {

struct LayerWeights {
  std::vector<float> conv;     // [channels, W] over q|k|v
  std::vector<float> A_log;    // [HV] = log U(1, 16)
  std::vector<float> dt_bias;  // [HV, K] = softplus^-1 of log-uniform 1e-3..0.1
  std::vector<float> norm;     // [V]
};

// Every number depends on seed, layer and its place in the whole model alone: a rank's weights are a part of
// the whole model's.
std::vector<LayerWeights> seeded_weights(const Model& model, uint64_t seed);
LayerWeights seeded_layer(const Model& model, uint64_t seed, int32_t number);

}  // namespace kda::serve

#include "serve/weights.h"

#include <cmath>

#include "serve/hash.h"

namespace kda::serve {
namespace {

// Uniform in [low, high).
double uniform(double low, double high, uint64_t hash) { return low + (high - low) * unit(hash); }

void fill_taps(const Model& model, uint64_t stream, std::vector<float>& out) {
  // The default of PyTorch's Conv1d: U(-1, 1) / sqrt(W).
  const double bound = 1.0 / std::sqrt(static_cast<double>(model.conv_width));
  for (int part = 0; part < 3; ++part) {
    const int64_t dim = part == 2 ? model.value_dim : model.key_dim;
    for (int64_t c = 0; c < model.heads * dim; ++c) {
      const int64_t channel = model.first_head * dim + c;
      for (int32_t w = 0; w < model.conv_width; ++w) {
        out.push_back(static_cast<float>(uniform(-bound, bound, mix(stream, part, channel, w))));
      }
    }
  }
}

}  // namespace

LayerWeights seeded_layer(const Model& model, uint64_t seed, int32_t number) {
  LayerWeights layer;
  const auto n = static_cast<uint64_t>(number);
  fill_taps(model, mix(uint64_t{kTagTaps}, seed, n), layer.conv);
  for (int64_t h = 0; h < model.heads; ++h) {
    const auto head = static_cast<uint64_t>(model.first_head + h);
    layer.A_log.push_back(static_cast<float>(std::log(uniform(1, 16, mix(uint64_t{kTagGate}, seed, n, head)))));
    for (int64_t k = 0; k < model.key_dim; ++k) {
      const double dt = std::exp(uniform(std::log(1e-3), std::log(0.1), mix(uint64_t{kTagBias}, seed, n, head, k)));
      layer.dt_bias.push_back(static_cast<float>(dt + std::log(-std::expm1(-dt))));  // softplus^-1(dt)
    }
  }
  for (int64_t v = 0; v < model.value_dim; ++v) {
    layer.norm.push_back(static_cast<float>(uniform(0.5, 1.5, mix(uint64_t{kTagNorm}, seed, n, v))));
  }
  return layer;
}

std::vector<LayerWeights> seeded_weights(const Model& model, uint64_t seed) {
  std::vector<LayerWeights> layers;
  for (int32_t n = 0; n < model.layers; ++n) layers.push_back(seeded_layer(model, seed, n));
  return layers;
}

}  // namespace kda::serve

// The weights of a replayed model's KDA layers in layer mode: seeded, or of a checkpoint (design.md 4). Loaded for
// any projection backend, so that the oracle gets the same numbers as the run.
#pragma once

#include <kda/layer.h>

#include <string>
#include <vector>

#include "serve/handles.h"
#include "serve/model.h"

namespace kda::serve {

using LayerWeightsHandle = std::unique_ptr<kda_layer_weights, Deleter<kda_layer_weights, kda_layer_weights_destroy>>;
using CheckpointHandle = std::unique_ptr<kda_checkpoint, Deleter<kda_checkpoint, kda_checkpoint_close>>;

class ModelWeights {
 public:
  // Weights of `model.spec`, each number by seed, layer and its place in the whole model alone: projections bf16,
  // uniform with variance 1 / columns, so that raw gate, beta and z have variance 1 for normalised rows.
  static ModelWeights seeded(const Model& model, uint64_t seed);
  // The KDA layers of a checkpoint; `model` takes its shapes from them. INVALID_ARGUMENT if they differ in shape.
  static Result<ModelWeights> open(const std::string& path, const ModelOptions& options, Model& model);

  // Layer `layer` (from 0) of the first rank, packed for a context; seeded numbers are made by the threads of `host`.
  // `projection`: null = auto.
  Result<LayerWeightsHandle> load(kda_context* context, int32_t layer, const char* projection,
                                  const kda_context* host) const;

 private:
  Result<LayerWeightsHandle> generate(kda_context* context, int32_t layer, const kda_layer_load_options& options,
                                      const kda_context* host) const;

  Model model_;
  uint64_t seed_ = 0;
  CheckpointHandle checkpoint_;
};

}  // namespace kda::serve

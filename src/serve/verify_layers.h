// Verification in layer mode, layer by layer (design.md 4): the oracle takes the backend's own input of each layer,
// so that an error is that layer's alone. It recomputes the first 1,024 prompt tokens and every decoded token with
// fp64 projections and compares the layer's outputs, the state and window where the prompt ended, and the final ones.
// After a longer prompt it goes on from the backend's state and window at its end. Requests go through a layer
// together, in batches, on all threads.
#pragma once

#include "serve/model_weights.h"
#include "serve/verify.h"

namespace kda::serve {

// 1e-2 with 16-bit io, 1e-5 with fp32; a 16-bit pool adds its rounding as in core mode.
Tolerance layer_tolerance(const Model& model);

// As verify(). One layer's weights are in memory at a time.
Result<VerifyReport> verify_layers(const Model& model, const ModelWeights& weights,
                                   const std::vector<std::unique_ptr<Request>>& requests, const kda_context* host,
                                   const std::atomic<bool>& stop, const VerifyObserver& observer = {});

}  // namespace kda::serve

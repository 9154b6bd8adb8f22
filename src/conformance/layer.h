// Whole layers for checks: weights in memory, pools, a step of two groups.
#pragma once

#include <kda/layer.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "conformance/api.h"
#include "conformance/tensor.h"

namespace kda::conformance {

// A layer's weights under their checkpoint names.
struct LayerModel {
  kda_layer_spec spec{};
  std::vector<std::pair<std::string, Tensor>> tensors;

  Tensor* find(const std::string& name);
};

// Seeded weights of a description, bf16 values: projections of variance 1 / columns, so that raw gate, beta and z are
// of size 1 for rows of size 1.
LayerModel layer_model(const kda_layer_spec& spec, uint32_t seed);

struct WeightsDeleter {
  void operator()(kda_layer_weights* w) const { kda_layer_weights_destroy(w); }
};
using WeightsHandle = std::unique_ptr<kda_layer_weights, WeightsDeleter>;

// Packs a model; null and a message if that is refused.
WeightsHandle pack(const LayerModel& model, kda_context* context, kda_dtype io, const char* projection,
                   std::string& message, int32_t ranks = 1, int32_t rank = 0);

kda_layer_desc layer_desc(const kda_layer_spec& spec, const char* backend, kda_dtype io);
// As run_in: on a device the tensors travel there and back.
kda_status run_layer(kda_context* context, const Plan& plan, const kda_layer_args& args, std::string& message);

// `rows` of one fresh sequence, always the same ones, as one prefill.
struct LayerRun {
  std::string error;  // "" if it ran
  Tensor out, state, normed;
};
LayerRun prefill_layer(const kda_layer_weights* weights, kda_context* context, const char* backend,
                       const char* projection, kda_dtype io, int64_t rows, uint32_t flags = 0);
// Of rows of one's own [T, D]; these are the ones that the other takes.
LayerRun prefill_layer(const kda_layer_weights* weights, kda_context* context, const char* backend,
                       const char* projection, const Tensor& hidden, uint32_t flags = 0);
Tensor layer_rows(const kda_layer_weights* weights, kda_dtype io, int64_t rows);

}  // namespace kda::conformance

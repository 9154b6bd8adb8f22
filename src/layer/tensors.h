// A layer's tensors under any of the names and layouts that checkpoints have (spec L-1, L-2, L-10, L-11), brought to
// one form: a view for each parameter.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/projection.h"
#include "layer/config.h"
#include "layer/spec.h"

namespace kda::layer {

// A tensor as it came. `data` outlives what is made of it.
struct TensorSource {
  std::string where;  // "model.safetensors: tensor 'model.layers.0.self_attn.A_log'", for messages
  kda_dtype dtype = KDA_DTYPE_NONE;
  std::vector<int64_t> shape;
  const void* data = nullptr;  // null: only names and shapes are looked at

  int64_t count() const;
};

// By name below the layer: "q_proj.weight".
using TensorMap = std::map<std::string, TensorSource>;

// A run of elements of a small parameter.
struct VectorView {
  std::string where;
  kda_dtype dtype = KDA_DTYPE_NONE;
  const void* data = nullptr;
  int64_t count = 0;

  bool present() const { return dtype != KDA_DTYPE_NONE; }
  float value(int64_t i) const;
};

struct LayerTensors {
  MatrixView q, k, v, b, f_a, f_b, g_a, g_b, g, o;
  VectorView conv[3];       // q, k, v: [channels, W]; absent without short convolution
  VectorView conv_bias[3];  // q, k, v: [channels]; all or none
  VectorView A_log, dt_bias, norm, g_bias;
};

// What the shapes say, and the config beside them where there is one. `origin`: the checkpoint, for messages.
Result<kda_layer_spec> derive_spec(const TensorMap& tensors, const Config& config, const std::string& origin);

// Checks names and counts against `spec`; INVALID_ARGUMENT and UNSUPPORTED name file and tensor. Values (A_log's
// padding, zero rows) are checked too unless data is absent.
Result<LayerTensors> resolve(const TensorMap& tensors, const kda_layer_spec& spec, const std::string& origin,
                             bool short_conv);

}  // namespace kda::layer

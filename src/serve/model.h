// The models that a replay can take its shapes from (spec L-3), and one rank's share of one.
#pragma once

#include <kda/layer.h>

#include <cstdint>
#include <string>

#include "serve/status.h"

namespace kda::serve {

// One rank's KDA layers. Head counts are the rank's; `first_head` and `total_heads` place them in the model. States,
// gates and outputs belong to value heads; only a checkpoint has fewer query heads than those (spec E-8).
struct Model {
  std::string name;
  int64_t hidden = 0;  // D
  int64_t total_heads = 0;
  int64_t first_head = 0;
  int64_t heads = 0;        // HV
  int64_t query_heads = 0;  // H
  int64_t key_dim = 128, value_dim = 128;
  int32_t conv_width = 4;
  int32_t layers = 1;
  kda_gate_family gate_family = KDA_GATE_SOFTPLUS;
  double lower_bound = 0;
  double norm_eps = 1e-5;
  kda_dtype io_dtype = KDA_BF16;
  kda_dtype state_dtype = KDA_FP32;
  kda_layer_spec spec{};  // the rank's layer, for layer mode

  int64_t channels() const { return 2 * query_heads * key_dim + heads * value_dim; }  // of q|k|v
  int64_t out_size() const { return heads * value_dim; }                              // of one output row
  int64_t state_size() const { return heads * value_dim * key_dim; }
};

struct ModelOptions {
  std::string name = "tiny";
  int64_t heads = 0;          // 0 = the model's
  int32_t layers = 0;         // 0 = 1 in core mode, the model's KDA layers in layer mode
  int32_t tp = 1;             // ranks; the first one's share is run
  std::string io;             // fp32, bf16, fp16; empty = the model's
  std::string pool;           // fp32, bf16, fp16; empty = fp32
  bool whole_layers = false;  // layer mode
};

// INVALID_ARGUMENT for unknown names and for heads that the ranks do not divide (spec L-6).
Result<Model> make_model(const ModelOptions& options);
// The same from a checkpoint's description of `layers` whole layers.
Result<Model> model_of(const ModelOptions& options, const std::string& name, const kda_layer_spec& whole,
                       int32_t layers);

// fp32, bf16 or fp16.
Result<kda_dtype> parse_dtype(const std::string& name, const char* option);

}  // namespace kda::serve

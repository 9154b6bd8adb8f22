#include "serve/model.h"

namespace kda::serve {
namespace {

constexpr const char* kModels[] = {"tiny", "kimi-linear", "kimi-k3", "glm-5.3-flash"};

}  // namespace

Result<kda_dtype> parse_dtype(const std::string& name, const char* option) {
  if (name == "fp32") return KDA_FP32;
  if (name == "bf16") return KDA_BF16;
  if (name == "fp16") return KDA_FP16;
  return invalid_argument("{}: wanted fp32, bf16 or fp16, got \"{}\"", option, name);
}

Result<Model> make_model(const ModelOptions& options) {
  std::string names;
  bool known = false;
  for (const char* name : kModels) {
    known = known || options.name == name;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", name);
  }
  if (!known) return invalid_argument("--model: wanted one of {}, got \"{}\"", names, options.name);
  kda_layer_spec spec{};
  int32_t layers = 0;
  KDA_SERVE_TRY(from_kda(kda_model_spec(options.name.c_str(), &spec, &layers)));
  if (options.heads > 0) spec.num_heads = spec.num_value_heads = options.heads;
  return model_of(options, options.name, spec, layers);
}

Result<Model> model_of(const ModelOptions& options, const std::string& name, const kda_layer_spec& whole,
                       int32_t layers) {
  Model model;
  model.name = name;
  model.hidden = whole.hidden;
  model.total_heads = whole.num_value_heads;
  model.key_dim = whole.key_dim;
  model.value_dim = whole.value_dim;
  model.conv_width = whole.conv_width;
  model.gate_family = whole.gate_family;
  model.lower_bound = whole.lower_bound;
  model.norm_eps = whole.norm_eps;
  model.io_dtype = name == "tiny" ? KDA_FP32 : KDA_BF16;
  model.layers = options.layers > 0 ? options.layers : options.whole_layers ? layers : 1;
  if (options.tp < 1 || whole.num_heads % options.tp != 0 || whole.num_value_heads % options.tp != 0) {
    return invalid_argument("--tp: wanted ranks that divide {} heads{}, got {}", whole.num_heads,
                            whole.num_heads == whole.num_value_heads
                                ? std::string()
                                : fmt::format(" and {} value heads", whole.num_value_heads),
                            options.tp);
  }
  KDA_SERVE_TRY(from_kda(kda_layer_spec_share(&whole, options.tp, 0, &model.spec)));
  model.heads = model.spec.num_value_heads;
  model.query_heads = model.spec.num_heads;
  if (!options.io.empty()) {
    auto io = parse_dtype(options.io, "--io");
    if (!io.ok()) return io.status();
    model.io_dtype = io.value();
  }
  if (!options.pool.empty()) {
    auto pool = parse_dtype(options.pool, "--pool");
    if (!pool.ok()) return pool.status();
    model.state_dtype = pool.value();
  }
  return model;
}

}  // namespace kda::serve

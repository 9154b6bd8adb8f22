#include "serve/model.h"

namespace kda::serve {
namespace {

struct Known {
  const char* name;
  int64_t hidden, heads;
  kda_gate_family family;
  double lower_bound;
  kda_dtype io;
};

constexpr Known kModels[] = {
    {"tiny", 256, 2, KDA_GATE_SOFTPLUS, 0, KDA_FP32},
    {"kimi-linear", 2304, 32, KDA_GATE_SOFTPLUS, 0, KDA_BF16},
    {"kimi-k3", 7168, 96, KDA_GATE_BOUNDED, -5, KDA_BF16},
    {"glm-5.3-flash", 4096, 64, KDA_GATE_BOUNDED, -5, KDA_BF16},
};

}  // namespace

Result<kda_dtype> parse_dtype(const std::string& name, const char* option) {
  if (name == "fp32") return KDA_FP32;
  if (name == "bf16") return KDA_BF16;
  if (name == "fp16") return KDA_FP16;
  return invalid_argument("{}: wanted fp32, bf16 or fp16, got \"{}\"", option, name);
}

Result<Model> make_model(const ModelOptions& options) {
  const Known* known = nullptr;
  std::string names;
  for (const Known& m : kModels) {
    if (options.name == m.name) known = &m;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", m.name);
  }
  if (known == nullptr) return invalid_argument("--model: wanted one of {}, got \"{}\"", names, options.name);
  Model model;
  model.name = known->name;
  model.hidden = known->hidden;
  model.total_heads = options.heads > 0 ? options.heads : known->heads;
  model.gate_family = known->family;
  model.lower_bound = known->lower_bound;
  model.io_dtype = known->io;
  model.layers = options.layers > 0 ? options.layers : 1;
  if (options.tp < 1 || model.total_heads % options.tp != 0) {
    return invalid_argument("--tp: wanted ranks that divide {} heads, got {}", model.total_heads, options.tp);
  }
  model.heads = model.total_heads / options.tp;
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

#include "conformance/layer.h"

#include <cmath>

#include "conformance/random.h"

namespace kda::conformance {
namespace {

// Values that bf16 holds, uniform with the given standard deviation.
Tensor weight(Shape shape, double deviation, uint32_t stream) {
  std::vector<double> x = uniform_vector(stream, product(shape));
  for (double& v : x) v *= deviation * std::sqrt(3.0);
  return Tensor::of(KDA_BF16, std::move(shape), x);
}

Tensor mapped(Shape shape, uint32_t stream, double low, double high, double (*f)(double)) {
  std::vector<double> x = uniform_vector(stream, product(shape));
  for (double& v : x) v = f(low + (high - low) * (v + 1) / 2);
  return Tensor::of(KDA_FP32, std::move(shape), x);
}

}  // namespace

Tensor* LayerModel::find(const std::string& name) {
  for (auto& [key, tensor] : tensors) {
    if (key == name) return &tensor;
  }
  return nullptr;
}

LayerModel layer_model(const kda_layer_spec& s, uint32_t seed) {
  LayerModel m;
  m.spec = s;
  const int64_t D = s.hidden, HV = s.num_value_heads, qk = s.num_heads * s.key_dim, gate = HV * s.key_dim,
                value = HV * s.value_dim;
  uint32_t stream = 1000 * (seed + 1);
  const auto add = [&](const char* name, Tensor t) { m.tensors.emplace_back(name, std::move(t)); };
  const auto matrix = [&](const char* name, int64_t rows, int64_t cols) {
    add(name, weight({rows, cols}, 1 / std::sqrt(static_cast<double>(cols)), ++stream));
  };
  matrix("q_proj.weight", qk, D);
  matrix("k_proj.weight", qk, D);
  matrix("v_proj.weight", value, D);
  matrix("b_proj.weight", HV, D);
  matrix("f_a_proj.weight", s.gate_rank, D);
  matrix("f_b_proj.weight", gate, s.gate_rank);
  if (s.output_gate == KDA_OUTPUT_GATE_LOW_RANK) {
    matrix("g_a_proj.weight", s.output_gate_rank, D);
    matrix("g_b_proj.weight", value, s.output_gate_rank);
  } else {
    matrix("g_proj.weight", value, D);
  }
  matrix("o_proj.weight", D, value);
  for (const auto& [name, channels] :
       {std::pair{"q_conv1d.weight", qk}, {"k_conv1d.weight", qk}, {"v_conv1d.weight", value}}) {
    add(name, weight({channels, 1, s.conv_width}, 0.5, ++stream));
  }
  if (s.conv_bias != 0) {
    for (const auto& [name, channels] :
         {std::pair{"q_conv1d.bias", qk}, {"k_conv1d.bias", qk}, {"v_conv1d.bias", value}}) {
      add(name, weight({channels}, 0.5, ++stream));
    }
  }
  add("A_log", mapped({HV}, ++stream, 1, 16, [](double x) { return std::log(x); }));
  add("dt_bias", mapped({gate}, ++stream, std::log(1e-3), std::log(0.1),
                        [](double x) { return std::log(std::expm1(std::exp(x))); }));
  add("o_norm.weight", mapped({s.value_dim}, ++stream, 0.5, 1.5, [](double x) { return x; }));
  return m;
}

WeightsHandle pack(const LayerModel& model, kda_context* context, kda_dtype io, const char* projection,
                   std::string& message, int32_t ranks, int32_t rank) {
  std::vector<kda_named_tensor> named;
  for (const auto& [name, tensor] : model.tensors) named.push_back({name.c_str(), tensor.view()});
  auto options = sized<kda_layer_load_options>();
  options.io_dtype = io;
  options.projection = projection;
  options.ranks = ranks;
  options.rank = rank;
  kda_layer_weights* w = nullptr;
  if (kda_layer_weights_create(context, &model.spec, named.data(), named.size(), &options, &w) != KDA_OK) {
    message = kda_last_error();
  }
  return WeightsHandle(w);
}

kda_layer_desc layer_desc(const kda_layer_spec& spec, const char* backend, kda_dtype io) {
  kda_layer_desc d;
  kda_layer_desc_init(&d);
  d.layer = spec;
  d.backend = backend;
  d.io_dtype = io;
  return d;
}

kda_status run_layer(kda_context* context, const Plan& plan, const kda_layer_args& args, std::string& message) {
  return run_in(
      context, args, plan.workspace_bytes(),
      [&](const kda_layer_args& there, kda_workspace workspace) {
        return kda_layer_run(plan.get(), &there, workspace, nullptr);
      },
      message);
}

Tensor layer_rows(const kda_layer_weights* w, kda_dtype io, int64_t rows) {
  kda_layer_spec s{};
  if (kda_layer_weights_spec(w, &s) != KDA_OK) return Tensor(io, {0, 0});
  std::vector<double> x;
  for (int64_t i = 0; i < rows * s.hidden; ++i) x.push_back(1.5 * std::sin(0.37 * static_cast<double>(i * i % 1009)));
  return Tensor::of(io, {rows, s.hidden}, x);
}

LayerRun prefill_layer(const kda_layer_weights* w, kda_context* context, const char* backend, const char* projection,
                       kda_dtype io, int64_t rows, uint32_t flags) {
  return prefill_layer(w, context, backend, projection, layer_rows(w, io, rows), flags);
}

LayerRun prefill_layer(const kda_layer_weights* w, kda_context* context, const char* backend, const char* projection,
                       const Tensor& hidden, uint32_t flags) {
  LayerRun r;
  const kda_dtype io = hidden.dtype();
  const int64_t rows = hidden.shape()[0];
  kda_layer_spec s{};
  if (kda_layer_weights_spec(w, &s) != KDA_OK) {
    r.error = kda_last_error();
    return r;
  }
  kda_layer_desc d = layer_desc(s, backend, io);
  d.projection = projection;
  d.max_tokens = rows;
  d.max_sequences = 1;
  d.flags = flags;
  const Plan plan(kda_layer_plan_create, context, d);
  if (!plan.ok()) {
    r.error = plan.message();
    return r;
  }
  const Tensor cu = Tensor::ints({0, rows}), slots = Tensor::ints({0});
  const int64_t channels = 2 * s.num_heads * s.key_dim + s.num_value_heads * s.value_dim;
  r.out = Tensor(io, {rows, s.hidden});
  r.normed = Tensor(io, {rows, s.num_value_heads, s.value_dim});
  r.state = Tensor::full(KDA_FP32, {1, s.num_value_heads, s.value_dim, s.key_dim}, 0);
  Tensor window = Tensor::full(io, {1, s.conv_width - 1, channels}, 0);
  auto a = sized<kda_layer_args>();
  a.weights = w;
  a.hidden = hidden;
  a.chunk.sequences.cu_seqlens = cu;
  a.chunk.slots = slots;
  a.state = r.state;
  a.conv_state = window;
  a.normed = r.normed;
  a.out = r.out;
  if (run_layer(context, plan, a, r.error) == KDA_OK) r.error.clear();
  return r;
}

}  // namespace kda::conformance

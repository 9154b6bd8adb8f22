#include "conformance/layer_vectors.h"

#include <cstdlib>
#include <kda/kda.hpp>
#include <stdexcept>

#include "conformance/layer.h"
#include "conformance/limits.h"
#include "conformance/vectors.h"

namespace kda::conformance {
namespace {

struct File {
  Vectors tensors;
  int64_t prefill = 0, decode = 0;
  double lower_bound = 0;
};

File read(const std::string& path) {
  File f{read_vectors(path), 0, 0, 0};
  for (const auto& [key, value] : TensorFile(path).metadata()) {
    if (key == "prefill") f.prefill = std::atoll(value.c_str());
    if (key == "decode") f.decode = std::atoll(value.c_str());
    if (key == "lower_bound") f.lower_bound = value == "none" ? 0 : std::atof(value.c_str());
  }
  for (const char* name :
       {"hidden_states", "bf16_run.out", "expected.out", "expected.final_state", "expected.conv_state_final"}) {
    if (f.tensors.count(name) == 0) throw std::runtime_error(std::string("wanted a tensor '") + name + "', got none");
  }
  return f;
}

double relative(const std::vector<double>& x, const std::vector<double>& reference) {
  return compare_flat(x, reference).total;
}

}  // namespace

void run_layer_vectors(const std::string& path, kda_dtype io, const Setting& setting, Report& report) {
  const File f = read(path);
  const auto get = [&](const std::string& name) -> const Tensor& { return f.tensors.at(name); };
  kda_context* const context = setting.context != nullptr ? setting.context : cpu_context();
  const bool reference = setting.backend == "reference";
  const char* const projection = reference ? "reference" : "auto";

  kda_checkpoint* opened = nullptr;
  const kda_status open_status = kda_checkpoint_open(path.c_str(), &opened);
  if (!report.succeeded("checkpoint", open_status, kda_last_error())) return;
  const std::unique_ptr<kda_checkpoint, void (*)(kda_checkpoint*)> checkpoint(opened, kda_checkpoint_close);
  auto options = sized<kda_layer_load_options>();
  options.io_dtype = io;
  options.projection = projection;
  options.lower_bound = f.lower_bound;
  kda_layer_weights* w = nullptr;
  const kda_status loaded = kda_layer_weights_load(context, opened, 0, &options, &w);
  const WeightsHandle weights(w);
  if (!report.accept(loaded == KDA_UNSUPPORTED ? loaded : KDA_OK, kda_last_error(), nullptr)) return;
  if (!report.succeeded("weights", loaded, kda_last_error())) return;
  kda_layer_spec s{};
  if (!report.succeeded("spec", kda_layer_weights_spec(w, &s), "")) return;

  kda_layer_desc desc = layer_desc(s, setting.backend.c_str(), io);
  desc.projection = projection;
  desc.max_tokens = f.prefill;
  desc.max_sequences = 1;
  if (reference) desc.out_dtype = desc.state_dtype = KDA_FP64;
  const Plan plan(kda_layer_plan_create, context, desc);
  if (!report.accept(plan)) return;

  const int64_t HV = s.num_value_heads, K = s.key_dim, V = s.value_dim, W = s.conv_width;
  const int64_t channels = 2 * s.num_heads * K + HV * V, T = f.prefill + f.decode;
  const Tensor hidden = get("hidden_states").copy(io), slot = Tensor::ints({0});
  Tensor state(reference ? KDA_FP64 : KDA_FP32, {1, HV, V, K}), window(io, {1, W - 1, channels});
  Tensor out(reference ? KDA_FP64 : io, {T, s.hidden});
  std::string message;
  for (int64_t first = 0; first < T; first = first == 0 ? f.prefill : first + 1) {
    const int64_t rows = first == 0 ? f.prefill : 1;
    const Tensor cu = Tensor::ints({0, rows});
    auto args = sized<kda_layer_args>();
    args.weights = w;
    args.hidden = narrow(hidden, 0, first, rows);
    kda_layer_group& group = first == 0 ? args.chunk : args.recurrent;
    group.sequences.cu_seqlens = cu;
    group.slots = slot;
    args.state = state;
    args.conv_state = window;
    args.out = narrow(out, 0, first, rows);
    if (!report.succeeded("step at " + std::to_string(first), run_layer(context, plan, args, message), message))
      return;
  }

  // fp32: R-67 asks for 1e-5. bf16: what the same file's other code pays for bf16, and a quarter more.
  const std::vector<double> expected = get("expected.out").values();
  const bool exact = io == KDA_FP32;
  const double limit = exact ? 1e-5 : 1.25 * relative(get("bf16_run.out").values(), expected);
  const double state_limit = exact ? 1e-5 : 1e-2;
  report.measure("out", compare_flat(out.values(), expected), limit, io, out.size(), out.size());
  report.measure("state", compare_states(state.values(), get("expected.final_state").values(), HV, V * K),
                 state_limit, KDA_FP32, state.size(), V * K);
  Tensor columns(io, {channels, W - 1});  // the file has a channel's columns behind one another
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t j = 0; j < W - 1; ++j) columns.set({c, j}, window.get({0, j, c}));
  }
  report.measure("window", compare_flat(columns.values(), get("expected.conv_state_final").values()), state_limit, io,
                 columns.size(), columns.size());
}

}  // namespace kda::conformance

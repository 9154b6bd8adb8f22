#include "serve/verify_layers.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>

#include "conformance/limits.h"
#include "serve/handles.h"

namespace kda::serve {
namespace {

constexpr int64_t kPiece =
    256;  // tokens that the oracle takes at a time; its state is fp64, so the cut changes nothing

struct OraclePlan {
  ContextHandle context;
  PlanHandle plan;
  size_t workspace = 0;
};

Status make_plan(const Model& model, OraclePlan& o) {
  kda_context_options options{};
  options.struct_size = sizeof options;
  options.num_threads = 1;
  options.allow_late_plans = 1;
  kda_context* context = nullptr;
  KDA_SERVE_TRY(from_kda(kda_context_create(&options, &context)));
  o.context.reset(context);
  kda_layer_desc d;
  kda_layer_desc_init(&d);
  d.layer = model.spec;
  d.backend = "reference";
  d.io_dtype = model.io_dtype;
  d.state_dtype = d.out_dtype = KDA_FP64;
  d.max_tokens = kPiece;
  d.max_sequences = 1;
  d.initial_state = KDA_INITIAL_FLAGS;
  kda_plan* plan = nullptr;
  KDA_SERVE_TRY(from_kda(kda_layer_plan_create(context, &d, &plan)));
  o.plan.reset(plan);
  return from_kda(kda_plan_workspace_size(plan, &o.workspace));
}

std::vector<double> widened(const std::vector<char>& bytes, kda_dtype dtype) {
  const auto count = static_cast<int64_t>(bytes.size() / kda_dtype_size(dtype));
  return conformance::values(view(bytes.data(), dtype, {count}));
}

// One request in one layer. Errors of outputs, and of the states and windows at both ends.
class LayerOracle {
 public:
  LayerOracle(const Model& model, const OraclePlan& plan, const kda_layer_weights* weights)
      : model_(model), plan_(plan), weights_(weights) {}

  struct Found {
    conformance::Comparison out, state, window;
  };
  Result<Found> run(const Request& request, int32_t layer, const std::atomic<bool>& stop) {
    const Capture& c = *request.capture;
    const auto n = static_cast<size_t>(layer);
    auto workspace = Buffer::allocate(static_cast<int64_t>(plan_.workspace));
    if (!workspace.ok()) return workspace.status();
    workspace_ = std::move(workspace.value());
    const int64_t prompt = request.trace.input_length, head = std::min(prompt, kVerifiedPrompt);
    state_.assign(static_cast<size_t>(model_.state_size()), 0.0);
    window_.assign(c.windows[n].size(), 0);
    out_.clear();
    Found found;
    KDA_SERVE_TRY(advance(c.inputs[n], 0, head, /*fresh=*/true, stop));
    if (head == prompt) {
      compare(c.prompt_states[n], c.prompt_windows[n], found);
    } else {
      state_ = widened(c.prompt_states[n], model_.state_dtype);
      window_ = c.prompt_windows[n];
    }
    KDA_SERVE_TRY(advance(c.inputs[n], head, request.decode_length(), /*fresh=*/false, stop));
    if (request.decode_length() > 0) compare(c.states[n], c.windows[n], found);
    found.out = conformance::compare_outputs(widened(c.outputs[n], model_.io_dtype), out_,
                                             {head + request.decode_length()}, 1, model_.hidden);
    return found;
  }

 private:
  // Tokens [first, first + tokens) of the captured rows.
  Status advance(const std::vector<char>& inputs, int64_t first, int64_t tokens, bool fresh,
                 const std::atomic<bool>& stop) {
    const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
    for (int64_t at = 0; at < tokens; at += kPiece) {
      if (stop.load(std::memory_order_relaxed)) return error(KDA_FAILED_PRECONDITION, "verification was interrupted");
      const int64_t rows = std::min(kPiece, tokens - at);
      const uint8_t has_state = fresh && at == 0 ? 0 : 1;
      const int32_t cu[2] = {0, static_cast<int32_t>(rows)}, slot = 0;
      const size_t done = out_.size();
      out_.resize(done + static_cast<size_t>(rows * model_.hidden));
      kda_layer_args a{};
      a.struct_size = sizeof a;
      a.weights = weights_;
      a.hidden = view(inputs.data() + (first + at) * model_.hidden * io, model_.io_dtype, {rows, model_.hidden});
      a.chunk.sequences.cu_seqlens = view(cu, KDA_INT32, {2});
      a.chunk.slots = view(&slot, KDA_INT32, {1});
      a.chunk.has_initial_state = view(&has_state, KDA_BOOL, {1});
      a.state = view(state_.data(), KDA_FP64, {1, model_.heads, model_.value_dim, model_.key_dim});
      a.conv_state = view(window_.data(), model_.io_dtype, {1, model_.conv_width - 1, model_.channels()});
      a.out = view(out_.data() + done, KDA_FP64, {rows, model_.hidden});
      KDA_SERVE_TRY(from_kda(kda_layer_run(plan_.plan.get(), &a, {workspace_.data(), workspace_.bytes()}, nullptr)));
    }
    return {};
  }

  // The larger errors stay.
  void compare(const std::vector<char>& state, const std::vector<char>& window, Found& found) const {
    const auto s = conformance::compare_states(widened(state, model_.state_dtype), state_, model_.heads,
                                               model_.value_dim * model_.key_dim);
    const auto w = conformance::compare_flat(widened(window, model_.io_dtype), widened(window_, model_.io_dtype));
    if (!s.mask_fault.empty() || s.total >= found.state.total) found.state = s;
    if (!w.mask_fault.empty() || w.total >= found.window.total) found.window = w;
  }

  const Model& model_;
  const OraclePlan& plan_;
  const kda_layer_weights* weights_;
  Buffer workspace_;
  std::vector<double> state_, out_;
  std::vector<char> window_;
};

double error_of(const conformance::Comparison& c) {
  return c.mask_fault.empty() ? c.total : std::numeric_limits<double>::infinity();
}

void note(const LayerOracle::Found& found, int32_t layer, RequestError& e, VerifyReport& report) {
  const double out = error_of(found.out), state = error_of(found.state);
  if (layer == 0 || out > e.rel_out) e.out = found.out, e.out_layer = layer, e.rel_out = out;
  if (layer == 0 || state > e.rel_state) e.state = found.state, e.state_layer = layer, e.rel_state = state;
  report.max_rel_l2_out = std::max(report.max_rel_l2_out, out);
  report.max_rel_l2_state = std::max(report.max_rel_l2_state, state);
  const auto check = [&](const char* what, const conformance::Comparison& error, double limit) {
    if (error.within(limit)) return true;
    report.ok = false;
    report.failures.push_back(fmt::format("request {}, layer {}: {}: {} (limit {:.1e}, a head {:.1e})", e.index,
                                          layer, what, error.text(), limit, 2 * limit));
    return false;
  };
  check("output", found.out, report.tolerance.out);
  check("state", found.state, report.tolerance.state);
  if (!check("conv window", found.window, report.tolerance.out)) e.window_equal = false;
}

}  // namespace

Tolerance layer_tolerance(const Model& model) {
  const double limit = model.io_dtype == KDA_FP32 ? 1e-5 : 1e-2;
  const double pool = std::sqrt(static_cast<double>(model.key_dim)) * conformance::pool_rounding(model.state_dtype);
  return {limit + pool, limit + pool};
}

Result<VerifyReport> verify_layers(const Model& model, const ModelWeights& weights,
                                   const std::vector<std::unique_ptr<Request>>& requests, const kda_context* host,
                                   const std::atomic<bool>& stop) {
  const auto begin = std::chrono::steady_clock::now();
  VerifyReport report;
  report.tolerance = layer_tolerance(model);
  std::vector<const Request*> chosen;
  for (const auto& r : requests) {
    if (!r->capture || r->phase != Phase::kFinished) continue;
    chosen.push_back(r.get());
    RequestError e;
    e.index = r->trace.index;
    report.errors.push_back(e);
  }
  report.requests = static_cast<int64_t>(chosen.size());
  OraclePlan plan;
  if (!chosen.empty()) KDA_SERVE_TRY(make_plan(model, plan));
  for (int32_t layer = 0; layer < model.layers && !chosen.empty(); ++layer) {
    auto loaded = weights.load(plan.context.get(), layer, "reference", host);
    if (!loaded.ok()) return loaded.status();
    std::atomic<size_t> next{0};
    std::mutex lock;
    Status first;
    auto work = [&] {
      LayerOracle oracle(model, plan, loaded.value().get());
      for (size_t i; (i = next.fetch_add(1)) < chosen.size();) {
        auto found = oracle.run(*chosen[i], layer, stop);
        const std::lock_guard<std::mutex> guard(lock);
        if (found.ok()) note(found.value(), layer, report.errors[i], report);
        if (!found.ok() && first.ok()) first = found.status();
      }
    };
    const auto workers = static_cast<int32_t>(
        std::min(chosen.size(), static_cast<size_t>(std::max(kda_context_num_threads(host), 1))));
    const auto body = [](void* arg, int32_t) { (*static_cast<decltype(work)*>(arg))(); };
    KDA_SERVE_TRY(from_kda(kda_context_parallel_for(host, workers, body, &work)));
    if (!first.ok()) return first;
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

}  // namespace kda::serve

#include "serve/verify_layers.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "conformance/limits.h"
#include "serve/handles.h"
#include "serve/parallel.h"

namespace kda::serve {
namespace {

// Rows of all requests that the oracle takes at a time, so that a weight is widened once for many rows. Its states
// are fp64: neither the cuts nor the neighbours change anything.
constexpr int64_t kPiece = 2048;
// Requests that go through a layer together, bounded by their rows, whose outputs are kept in fp64.
constexpr int64_t kGroupRows = 16384, kGroup = 64;

struct OraclePlan {
  ContextHandle context;
  PlanHandle plan;
  Buffer workspace;
};

Status make_plan(const Model& model, int64_t sequences, const kda_context* host, OraclePlan& o) {
  kda_context_options options{};
  options.struct_size = sizeof options;
  options.num_threads = std::max(kda_context_num_threads(host), 1);
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
  d.max_sequences = sequences;
  d.initial_state = KDA_INITIAL_FLAGS;
  kda_plan* plan = nullptr;
  KDA_SERVE_TRY(from_kda(kda_layer_plan_create(context, &d, &plan)));
  o.plan.reset(plan);
  size_t bytes = 0;
  KDA_SERVE_TRY(from_kda(kda_plan_workspace_size(plan, &bytes)));
  auto workspace = Buffer::allocate(static_cast<int64_t>(bytes));
  if (!workspace.ok()) return workspace.status();
  o.workspace = std::move(workspace.value());
  return {};
}

std::vector<double> widened(const std::vector<char>& bytes, kda_dtype dtype) {
  const auto count = static_cast<int64_t>(bytes.size() / kda_dtype_size(dtype));
  return conformance::values(view(bytes.data(), dtype, {count}));
}

struct Found {
  conformance::Comparison out, state, window;
};

// A request on its way through a layer: its captured rows are the first `head` of the prompt, then the decoded ones.
struct Walk {
  const Request* request = nullptr;
  int64_t head = 0, total = 0;
  int64_t done = 0;         // rows that the oracle has seen
  std::vector<double> out;  // [done, D]
  Found found;

  const Capture& capture() const { return *request->capture; }
  // Rows up to where the prompt's state is compared, or to the end.
  int64_t until_stop() const { return (done < head ? head : total) - done; }
};

// A group of requests in one layer. Errors of outputs, and of the states and windows at both ends.
class LayerOracle {
 public:
  LayerOracle(const Model& model, const OraclePlan& plan)
      : model_(model), plan_(plan), row_bytes_(model.hidden * static_cast<int64_t>(kda_dtype_size(model.io_dtype))) {}

  // Calls advanced(rows) after each piece.
  Status run(int32_t layer, const kda_layer_weights* weights, std::vector<Walk>& walks, const kda_context* host,
             const std::atomic<bool>& stop, const std::function<void(int64_t)>& advanced) {
    n_ = static_cast<size_t>(layer);
    weights_ = weights;
    const auto requests = static_cast<int64_t>(walks.size());
    const auto window = static_cast<int64_t>(walks.front().capture().windows[n_].size());
    states_.assign(static_cast<size_t>(requests * model_.state_size()), 0.0);
    windows_.assign(static_cast<size_t>(requests * window), 0);
    hidden_.resize(static_cast<size_t>(kPiece * row_bytes_));
    out_.resize(static_cast<size_t>(kPiece * model_.hidden));
    window_bytes_ = window;
    while (collect(walks)) {
      if (stop.load(std::memory_order_relaxed)) return error(KDA_FAILED_PRECONDITION, "verification was interrupted");
      KDA_SERVE_TRY(advance(requests));
      parallel_ranges(host, static_cast<int64_t>(pieces_.size()), 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) take(pieces_[static_cast<size_t>(i)]);
      });
      advanced(cu_.back());
    }
    return {};
  }

 private:
  struct Piece {
    Walk* walk;
    int32_t slot;
    int64_t first, rows;  // in the batch
  };

  // The next rows of every walk that is not at its end; false if all are.
  bool collect(std::vector<Walk>& walks) {
    pieces_.clear();
    int64_t left = std::count_if(walks.begin(), walks.end(), [](const Walk& w) { return w.done < w.total; });
    int64_t room = kPiece;
    for (size_t i = 0; i < walks.size(); ++i) {
      Walk& w = walks[i];
      if (w.done == w.total) continue;
      const int64_t rows = std::min(room / std::max<int64_t>(left--, 1), w.until_stop());
      std::memcpy(hidden_.data() + (kPiece - room) * row_bytes_, w.capture().inputs[n_].data() + w.done * row_bytes_,
                  static_cast<size_t>(rows * row_bytes_));
      pieces_.push_back({&w, static_cast<int32_t>(i), kPiece - room, rows});
      room -= rows;
    }
    return !pieces_.empty();
  }

  Status advance(int64_t requests) {
    cu_.assign(1, 0);
    slots_.clear();
    has_state_.clear();
    for (const Piece& p : pieces_) {
      cu_.push_back(static_cast<int32_t>(p.first + p.rows));
      slots_.push_back(p.slot);
      has_state_.push_back(p.walk->done > 0 ? 1 : 0);
    }
    const int64_t rows = cu_.back(), count = static_cast<int64_t>(pieces_.size());
    kda_layer_args a{};
    a.struct_size = sizeof a;
    a.weights = weights_;
    a.hidden = view(hidden_.data(), model_.io_dtype, {rows, model_.hidden});
    a.chunk.sequences.cu_seqlens = view(cu_.data(), KDA_INT32, {count + 1});
    a.chunk.slots = view(slots_.data(), KDA_INT32, {count});
    a.chunk.has_initial_state = view(has_state_.data(), KDA_BOOL, {count});
    a.state = view(states_.data(), KDA_FP64, {requests, model_.heads, model_.value_dim, model_.key_dim});
    a.conv_state = view(windows_.data(), model_.io_dtype, {requests, model_.conv_width - 1, model_.channels()});
    a.out = view(out_.data(), KDA_FP64, {rows, model_.hidden});
    return from_kda(kda_layer_run(plan_.plan.get(), &a, {plan_.workspace.data(), plan_.workspace.bytes()}, nullptr));
  }

  // Keeps a piece's outputs; compares where there is something to compare with.
  void take(const Piece& p) {
    Walk& w = *p.walk;
    w.out.reserve(static_cast<size_t>(w.total * model_.hidden));
    w.out.insert(w.out.end(), out_.begin() + p.first * model_.hidden,
                 out_.begin() + (p.first + p.rows) * model_.hidden);
    w.done += p.rows;
    const Capture& c = w.capture();
    if (w.done == w.head && w.head == w.request->trace.input_length) {
      compare(c.prompt_states[n_], c.prompt_windows[n_], p.slot, w.found);
    } else if (w.done == w.head) {
      const std::vector<double> state = widened(c.prompt_states[n_], model_.state_dtype);
      std::copy(state.begin(), state.end(), states_.begin() + p.slot * model_.state_size());
      std::copy(c.prompt_windows[n_].begin(), c.prompt_windows[n_].end(), windows_.begin() + p.slot * window_bytes_);
    }
    if (w.done < w.total) return;
    if (w.total > w.head) compare(c.states[n_], c.windows[n_], p.slot, w.found);
    w.found.out =
        conformance::compare_outputs(widened(c.outputs[n_], model_.io_dtype), w.out, {w.total}, 1, model_.hidden);
    w.out = {};
  }

  // The larger errors stay.
  void compare(const std::vector<char>& state, const std::vector<char>& window, int32_t slot, Found& found) const {
    const auto first = states_.begin() + slot * model_.state_size();
    const std::vector<double> own(first, first + model_.state_size());
    const std::vector<char> own_window(windows_.begin() + slot * window_bytes_,
                                       windows_.begin() + (slot + 1) * window_bytes_);
    const auto s = conformance::compare_states(widened(state, model_.state_dtype), own, model_.heads,
                                               model_.value_dim * model_.key_dim);
    const auto w = conformance::compare_flat(widened(window, model_.io_dtype), widened(own_window, model_.io_dtype));
    if (!s.mask_fault.empty() || s.total >= found.state.total) found.state = s;
    if (!w.mask_fault.empty() || w.total >= found.window.total) found.window = w;
  }

  const Model& model_;
  const OraclePlan& plan_;
  const kda_layer_weights* weights_ = nullptr;
  size_t n_ = 0;  // the layer
  int64_t row_bytes_, window_bytes_ = 0;
  std::vector<Piece> pieces_;
  std::vector<int32_t> cu_, slots_;
  std::vector<uint8_t> has_state_;
  std::vector<double> states_, out_;
  std::vector<char> windows_, hidden_;
};

double error_of(const conformance::Comparison& c) {
  return c.mask_fault.empty() ? c.total : std::numeric_limits<double>::infinity();
}

void note(const Found& found, int32_t layer, RequestError& e, VerifyReport& report) {
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

// The next requests from `first` on that go through a layer together.
std::vector<Walk> make_group(const std::vector<const Request*>& chosen, size_t first) {
  std::vector<Walk> group;
  int64_t rows = 0;
  for (size_t i = first; i < chosen.size() && group.size() < kGroup; ++i) {
    Walk w;
    w.request = chosen[i];
    w.head = std::min(chosen[i]->trace.input_length, kVerifiedPrompt);
    w.total = w.head + chosen[i]->decode_length();
    rows += w.total;
    if (!group.empty() && rows > kGroupRows) break;
    group.push_back(std::move(w));
  }
  return group;
}

}  // namespace

Tolerance layer_tolerance(const Model& model) {
  const double limit = model.io_dtype == KDA_FP32 ? 1e-5 : 1e-2;
  const double pool = std::sqrt(static_cast<double>(model.key_dim)) * conformance::pool_rounding(model.state_dtype);
  return {limit + pool, limit + pool};
}

Result<VerifyReport> verify_layers(const Model& model, const ModelWeights& weights,
                                   const std::vector<std::unique_ptr<Request>>& requests, const kda_context* host,
                                   const std::atomic<bool>& stop, const VerifyObserver& observer) {
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  VerifyReport report;
  report.tolerance = layer_tolerance(model);
  std::vector<const Request*> chosen;
  int64_t rows = 0, rows_done = 0;  // of all layers
  for (const auto& r : requests) {
    if (!r->capture || r->phase != Phase::kFinished) continue;
    chosen.push_back(r.get());
    rows += model.layers * make_group(chosen, chosen.size() - 1).front().total;
    RequestError e;
    e.index = r->trace.index;
    report.errors.push_back(e);
  }
  report.requests = static_cast<int64_t>(chosen.size());
  OraclePlan plan;
  if (!chosen.empty()) KDA_SERVE_TRY(make_plan(model, std::min(report.requests, kGroup), host, plan));
  LayerOracle oracle(model, plan);
  for (int32_t layer = 0; layer < model.layers && !chosen.empty(); ++layer) {
    auto loaded = weights.load(plan.context.get(), layer, "reference", host);
    if (!loaded.ok()) return loaded.status();
    for (size_t first = 0; first < chosen.size();) {
      std::vector<Walk> group = make_group(chosen, first);
      const auto advanced = [&](int64_t count) {
        rows_done += count;
        if (!observer) return;
        const auto ended = std::count_if(group.begin(), group.end(), [](const Walk& w) { return w.done == w.total; });
        const int64_t whole = layer + 1 < model.layers ? 0 : static_cast<int64_t>(first) + ended;
        observer({whole, report.requests, static_cast<double>(rows_done) / static_cast<double>(rows), seconds()});
      };
      KDA_SERVE_TRY(oracle.run(layer, loaded.value().get(), group, host, stop, advanced));
      for (size_t i = 0; i < group.size(); ++i) note(group[i].found, layer, report.errors[first + i], report);
      first += group.size();
    }
  }
  report.seconds = seconds();
  return report;
}

}  // namespace kda::serve

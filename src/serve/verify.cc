#include "serve/verify.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "conformance/limits.h"
#include "serve/handles.h"

namespace kda::serve {
namespace {

// Tokens that the oracle takes at a time; the state is carried in fp64, so the cut changes nothing.
constexpr int64_t kPiece = 1024;

struct OraclePlans {
  ContextHandle context;
  PlanHandle conv, prefill, norm;
  size_t workspace = 0;
};

Status raise(OraclePlans& plans, kda_plan* plan, PlanHandle& out) {
  out.reset(plan);
  size_t bytes = 0;
  KDA_SERVE_TRY(from_kda(kda_plan_workspace_size(plan, &bytes)));
  plans.workspace = std::max(plans.workspace, bytes);
  return {};
}

Status make_plans(const Model& model, int32_t threads, OraclePlans& plans) {
  kda_context_options options{};
  options.struct_size = sizeof options;
  options.num_threads = threads;
  options.allow_late_plans = 1;
  kda_context* context = nullptr;
  KDA_SERVE_TRY(from_kda(kda_context_create(&options, &context)));
  plans.context.reset(context);
  kda_plan* plan = nullptr;

  kda_conv_desc conv;
  kda_conv_desc_init(&conv);
  conv.backend = "reference";
  conv.mode = KDA_CONV_PREFILL;
  conv.width = model.conv_width;
  conv.parts = 1;
  conv.channels[0] = model.channels();
  conv.io_dtype = model.io_dtype;
  conv.layout = KDA_CONV_SD;
  conv.max_tokens = kPiece;
  conv.max_sequences = 1;
  conv.initial_state = KDA_INITIAL_FLAGS;
  KDA_SERVE_TRY(from_kda(kda_conv_plan_create(context, &conv, &plan)));
  KDA_SERVE_TRY(raise(plans, plan, plans.conv));

  kda_prefill_desc prefill;
  kda_prefill_desc_init(&prefill);
  prefill.backend = "reference";
  kda_attention_spec& a = prefill.attention;
  a.num_heads = model.query_heads;
  a.num_value_heads = model.heads;
  a.key_dim = model.key_dim;
  a.value_dim = model.value_dim;
  a.io_dtype = model.io_dtype;
  a.state_dtype = KDA_FP64;
  a.gate_family = model.gate_family;
  a.lower_bound = model.lower_bound;
  prefill.max_tokens = kPiece;
  prefill.max_sequences = 1;
  prefill.initial_state = KDA_INITIAL_FLAGS;
  KDA_SERVE_TRY(from_kda(kda_prefill_plan_create(context, &prefill, &plan)));
  KDA_SERVE_TRY(raise(plans, plan, plans.prefill));

  kda_gated_norm_desc norm{};
  norm.struct_size = sizeof norm;
  norm.backend = "reference";
  norm.num_value_heads = model.heads;
  norm.value_dim = model.value_dim;
  norm.io_dtype = model.io_dtype;
  norm.out_dtype = KDA_FP64;
  norm.eps = model.norm_eps;
  norm.max_tokens = kPiece;
  KDA_SERVE_TRY(from_kda(kda_gated_norm_plan_create(context, &norm, &plan)));
  return raise(plans, plan, plans.norm);
}

// One layer of one request; owns the scratch of one thread.
class Oracle {
 public:
  static Result<Oracle> create(const Model& model, const Content& content, const OraclePlans& plans) {
    Oracle o(model, content, plans);
    const auto io = static_cast<int64_t>(kda_dtype_size(model.io_dtype));
    struct Wanted {
      Buffer& buffer;
      int64_t bytes;
    };
    for (const Wanted& w :
         {Wanted{o.raw_, kPiece * content.row_bytes()}, Wanted{o.post_, kPiece * model.channels() * io},
          Wanted{o.attention_, kPiece * model.out_size() * io},
          Wanted{o.workspace_, static_cast<int64_t>(plans.workspace)}}) {
      auto buffer = Buffer::allocate(w.bytes);
      if (!buffer.ok()) return buffer.status();
      w.buffer = std::move(buffer.value());
    }
    o.window_.resize(static_cast<size_t>((model.conv_width - 1) * model.channels() * io));
    o.state_.resize(static_cast<size_t>(model.state_size()));
    return o;
  }

  // Fills in out(), state() and window(),
  // and calls advanced(tokens) after each piece.
  template <class Advanced>
  Status run(const Request& request, const LayerWeights& weights, const std::atomic<bool>& stop,
             const Advanced& advanced) {
    const int64_t prompt = request.trace.input_length;
    const int64_t total = prompt + request.decode_length();
    first_row_ = request.trace.output_length > 0 ? prompt - 1 : total;
    out_.resize(static_cast<size_t>((total - first_row_) * model_.out_size()));
    for (int64_t at = 0; at < total; at += kPiece) {
      if (stop.load(std::memory_order_relaxed)) return error(KDA_FAILED_PRECONDITION, "verification was interrupted");
      const int64_t tokens = std::min(kPiece, total - at);
      KDA_SERVE_TRY(run_piece(request, weights, at, tokens));
      advanced(tokens);
    }
    return {};
  }

  const std::vector<double>& out() const { return out_; }      // [m, HV, V]
  const std::vector<double>& state() const { return state_; }  // [HV, V, K]
  const std::vector<char>& window() const { return window_; }  // [W-1, channels], io

 private:
  Oracle(const Model& model, const Content& content, const OraclePlans& plans)
      : model_(model), content_(&content), plans_(&plans), rows_(kPiece) {}

  kda_workspace scratch() const { return {workspace_.data(), workspace_.bytes()}; }

  kda_tensor raw(int64_t tokens, int64_t part, int64_t heads, int64_t dim) const {
    const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
    return rows_view(raw_.data() + part * io, model_.io_dtype, {tokens, heads, dim}, content_->layout().stride);
  }
  kda_tensor raw_flat(int64_t tokens, int64_t part, int64_t size) const {
    const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
    return rows_view(raw_.data() + part * io, model_.io_dtype, {tokens, size}, content_->layout().stride);
  }

  void gather(const Request& request, int64_t first, int64_t tokens) {
    const int64_t prompt = request.trace.input_length;
    const int64_t from_prompt = std::clamp<int64_t>(prompt - first, 0, tokens);
    const std::span<uint32_t> rows(rows_.data(), static_cast<size_t>(tokens));
    content_->prompt_rows(request.owner, first, rows.first(static_cast<size_t>(from_prompt)));
    content_->generated_rows(request.owner, first + from_prompt - prompt,
                             rows.subspan(static_cast<size_t>(from_prompt)));
    content_->gather(rows, raw_.data(), nullptr);
  }

  Status run_piece(const Request& request, const LayerWeights& weights, int64_t first, int64_t tokens) {
    gather(request, first, tokens);
    const uint8_t has_state = first > 0 ? 1 : 0;
    const int32_t cu[2] = {0, static_cast<int32_t>(tokens)};
    const int32_t slot = 0;
    const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
    const int64_t keys = model_.heads * model_.key_dim;

    kda_conv_args conv{};
    conv.struct_size = sizeof conv;
    conv.x[0] = raw_flat(tokens, content_->layout().qkv, model_.channels());
    conv.weight[0] = view(weights.conv.data(), KDA_FP32, {model_.channels(), model_.conv_width});
    conv.sequences.cu_seqlens = view(cu, KDA_INT32, {2});
    conv.state[0] = view(window_.data(), model_.io_dtype, {1, model_.conv_width - 1, model_.channels()});
    conv.slots = view(&slot, KDA_INT32, {1});
    conv.has_initial_state = view(&has_state, KDA_BOOL, {1});
    conv.out[0] = view(post_.data(), model_.io_dtype, {tokens, model_.channels()});
    KDA_SERVE_TRY(from_kda(kda_conv_run(plans_->conv.get(), &conv, scratch(), nullptr)));

    const auto part = [&](int64_t offset, int64_t dim) {
      return rows_view(post_.data() + offset * io, model_.io_dtype, {tokens, model_.heads, dim}, model_.channels());
    };
    kda_prefill_args prefill{};
    prefill.struct_size = sizeof prefill;
    prefill.q = part(0, model_.key_dim);
    prefill.k = part(keys, model_.key_dim);
    prefill.v = part(2 * keys, model_.value_dim);
    prefill.gate = raw(tokens, content_->layout().gate, model_.heads, model_.key_dim);
    prefill.beta = raw_flat(tokens, content_->layout().beta, model_.heads);
    prefill.A_log = view(weights.A_log.data(), KDA_FP32, {model_.heads});
    prefill.dt_bias = view(weights.dt_bias.data(), KDA_FP32, {model_.heads, model_.key_dim});
    prefill.sequences.cu_seqlens = conv.sequences.cu_seqlens;
    prefill.state = view(state_.data(), KDA_FP64, {1, model_.heads, model_.value_dim, model_.key_dim});
    prefill.has_initial_state = conv.has_initial_state;
    prefill.out = view(attention_.data(), model_.io_dtype, {tokens, model_.heads, model_.value_dim});
    KDA_SERVE_TRY(from_kda(kda_prefill_run(plans_->prefill.get(), &prefill, scratch(), nullptr)));
    return run_norm(weights, first, tokens);
  }

  // Only the rows that the request's outputs came from.
  Status run_norm(const LayerWeights& weights, int64_t first, int64_t tokens) {
    const int64_t skip = std::max<int64_t>(0, first_row_ - first);
    if (skip >= tokens) return {};
    const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
    const int64_t rows = tokens - skip;
    kda_gated_norm_args norm{};
    norm.struct_size = sizeof norm;
    norm.o = view(attention_.data() + skip * model_.out_size() * io, model_.io_dtype,
                  {rows, model_.heads, model_.value_dim});
    norm.z = raw(rows, content_->layout().z, model_.heads, model_.value_dim);
    norm.z.data = static_cast<char*>(norm.z.data) + skip * content_->row_bytes();
    norm.weight = view(weights.norm.data(), KDA_FP32, {model_.value_dim});
    norm.out = view(out_.data() + (first + skip - first_row_) * model_.out_size(), KDA_FP64,
                    {rows, model_.heads, model_.value_dim});
    return from_kda(kda_gated_norm_run(plans_->norm.get(), &norm, scratch(), nullptr));
  }

  Model model_;
  const Content* content_;
  const OraclePlans* plans_;
  std::vector<uint32_t> rows_;
  Buffer raw_, post_, attention_, workspace_;
  std::vector<char> window_;
  std::vector<double> state_, out_;
  int64_t first_row_ = 0;
};

struct Task {
  const Request* request;
  int32_t layer;
  size_t slot;  // of the request in the report

  int64_t tokens() const { return request->trace.input_length + request->decode_length(); }
};

// The longest first, so that the threads end together.
std::vector<Task> make_tasks(const Model& model, const std::vector<std::unique_ptr<Request>>& requests,
                             VerifyReport& report) {
  std::vector<const Request*> chosen;
  for (const auto& r : requests) {
    if (r->capture && r->phase == Phase::kFinished) chosen.push_back(r.get());
  }
  const auto length = [](const Request* r) { return r->trace.input_length + r->decode_length(); };
  std::stable_sort(chosen.begin(), chosen.end(),
                   [&](const Request* a, const Request* b) { return length(a) > length(b); });
  std::vector<Task> tasks;
  for (const Request* r : chosen) {
    for (int32_t layer = 0; layer < model.layers; ++layer) tasks.push_back({r, layer, report.errors.size()});
    RequestError e;
    e.index = r->trace.index;
    report.errors.push_back(e);
  }
  report.requests = static_cast<int64_t>(chosen.size());
  return tasks;
}

// Tokens that are left, of each request and of all.
class Tally {
 public:
  Tally(const std::vector<Task>& tasks, const VerifyReport& report) : left_(report.errors.size()) {
    for (const Task& t : tasks) {
      left_[t.slot] += t.tokens();
      total_ += t.tokens();
    }
  }
  void add(const Task& task, int64_t tokens) {
    left_[task.slot] -= tokens;
    done_ += tokens;
  }
  VerifyProgress progress(double seconds) const {
    const auto whole = std::count(left_.begin(), left_.end(), 0);
    return {whole, static_cast<int64_t>(left_.size()), static_cast<double>(done_) / static_cast<double>(total_),
            seconds};
  }

 private:
  std::vector<int64_t> left_;
  int64_t total_ = 0, done_ = 0;
};

std::vector<double> widened(const std::vector<char>& bytes, kda_dtype dtype) {
  const auto count = static_cast<int64_t>(bytes.size() / kda_dtype_size(dtype));
  return conformance::values(view(bytes.data(), dtype, {count}));
}

// Over the finite elements alone a result with a NaN would look right.
double error_of(const conformance::Comparison& c) {
  return c.mask_fault.empty() ? c.total : std::numeric_limits<double>::infinity();
}

void note(const Model& model, const Oracle& oracle, const Task& task, VerifyReport& report) {
  const Capture& c = *task.request->capture;
  const auto layer = static_cast<size_t>(task.layer);
  const auto rows = static_cast<int64_t>(oracle.out().size()) / model.out_size();
  const auto out = conformance::compare_outputs(widened(c.rows[layer], model.io_dtype), oracle.out(), {rows},
                                                model.heads, model.value_dim);
  const auto state = conformance::compare_states(widened(c.states[layer], model.state_dtype), oracle.state(),
                                                 model.heads, model.value_dim * model.key_dim);
  RequestError& e = report.errors[task.slot];
  const double rel_out = error_of(out), rel_state = error_of(state);
  if (task.layer == 0 || rel_out > e.rel_out) e.out = out, e.out_layer = task.layer, e.rel_out = rel_out;
  if (task.layer == 0 || rel_state > e.rel_state)
    e.state = state, e.state_layer = task.layer, e.rel_state = rel_state;
  report.max_rel_l2_out = std::max(report.max_rel_l2_out, rel_out);
  report.max_rel_l2_state = std::max(report.max_rel_l2_state, rel_state);

  const auto fail = [&](const std::string& what) {
    report.ok = false;
    report.failures.push_back(fmt::format("request {}, layer {}: {}", e.index, task.layer, what));
  };
  const auto check = [&](const char* what, const conformance::Comparison& error, double limit) {
    if (!error.within(limit))
      fail(fmt::format("{}: {} (limit {:.1e}, a head {:.1e})", what, error.text(), limit, 2 * limit));
  };
  check("output", out, report.tolerance.out);
  check("state", state, report.tolerance.state);
  if (c.windows[layer] != oracle.window()) {
    e.window_equal = false;
    fail("conv window: differs from the last raw inputs");
  }
}

}  // namespace

Tolerance tolerance_of(const Model& model) {
  const conformance::Limits chain = conformance::chained_limits(model.io_dtype);
  Tolerance t{chain.out, chain.state};
  // N-9 gives the error of one store, and a request is stored at every step. The delta rule rewrites each of the K
  // directions of a state about every K / beta tokens, so that the errors of no more than about K stores are alive at
  // once; they are independent.
  const double store = conformance::pool_rounding(model.state_dtype);
  const double alive = std::sqrt(static_cast<double>(model.key_dim));
  t.out += alive * store;
  t.state += alive * store;
  return t;
}

std::vector<int64_t> choose_verified(const Trace& trace, int64_t count, uint64_t seed) {
  std::vector<std::pair<uint64_t, int64_t>> order;
  for (const TraceRequest& r : trace.requests) {
    order.emplace_back(mix(uint64_t{kTagVerify}, seed, static_cast<uint64_t>(r.index)), r.index);
  }
  std::sort(order.begin(), order.end());
  std::vector<int64_t> chosen;
  for (size_t i = 0; i < order.size() && static_cast<int64_t>(i) < count; ++i) chosen.push_back(order[i].second);
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

Result<VerifyReport> verify(const Model& model, const std::vector<LayerWeights>& weights, const Content& content,
                            const std::vector<std::unique_ptr<Request>>& requests, const kda_context* host,
                            const std::atomic<bool>& stop, const VerifyObserver& observer) {
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  VerifyReport report;
  report.tolerance = tolerance_of(model);
  const std::vector<Task> tasks = make_tasks(model, requests, report);
  // A thread for each task; where there are fewer tasks than threads, all threads on one task after another.
  const int32_t threads = std::max(kda_context_num_threads(host), 1);
  const bool apart = tasks.size() >= static_cast<size_t>(threads);
  OraclePlans plans;
  if (!tasks.empty()) KDA_SERVE_TRY(make_plans(model, apart ? 1 : threads, plans));
  std::atomic<size_t> next{0};
  std::mutex lock;
  Status first;
  Tally tally(tasks, report);
  auto work = [&] {
    auto oracle = Oracle::create(model, content, plans);
    Status status = oracle.ok() ? Status() : oracle.status();
    for (size_t i; status.ok() && (i = next.fetch_add(1)) < tasks.size();) {
      const Task& task = tasks[i];
      status = oracle.value().run(*task.request, weights[static_cast<size_t>(task.layer)], stop, [&](int64_t tokens) {
        const std::lock_guard<std::mutex> guard(lock);
        tally.add(task, tokens);
        if (observer) observer(tally.progress(seconds()));
      });
      const std::lock_guard<std::mutex> guard(lock);
      if (status.ok()) note(model, oracle.value(), task, report);
    }
    const std::lock_guard<std::mutex> guard(lock);
    if (!status.ok() && first.ok()) first = status;
  };
  const auto workers = apart ? threads : std::min<int32_t>(1, static_cast<int32_t>(tasks.size()));
  const auto body = [](void* arg, int32_t) { (*static_cast<decltype(work)*>(arg))(); };
  KDA_SERVE_TRY(from_kda(kda_context_parallel_for(host, workers, body, &work)));
  if (!first.ok()) return first;
  report.seconds = seconds();
  return report;
}

}  // namespace kda::serve

#include "serve/replay.h"

#include <algorithm>
#include <limits>

#include "serve/verify_layers.h"

namespace kda::serve {
namespace {

constexpr int64_t kMiB = 1048576;

Status between(const char* option, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return {};
  return invalid_argument("{}: wanted an integer in {}..{}, got {}", option, least, most, value);
}

Status one_of(const char* option, const std::string& value, std::initializer_list<const char*> known) {
  std::string names;
  for (const char* name : known) {
    if (value == name) return {};
    names += fmt::format("{}{}", names.empty() ? "" : ", ", name);
  }
  return invalid_argument("{}: wanted one of {}, got \"{}\"", option, names, value);
}

// Which options asked for the memory that there is none of.
Status blame(const Status& status, const std::string& options) {
  if (status.code() != KDA_OUT_OF_MEMORY) return status;
  return error(KDA_OUT_OF_MEMORY, "{}: wanted what fits into memory: {}", options, status.message());
}

Status probability(const char* option, double value) {
  if (value >= 0 && value <= 1) return {};
  return invalid_argument("{}: wanted a probability in [0, 1], got {}", option, value);
}

}  // namespace

Status check_options(const ReplayOptions& o) {
  constexpr int64_t kRows = int64_t{1} << 30;
  KDA_SERVE_TRY(between("--limit", o.input.limit, 0, std::numeric_limits<int64_t>::max()));
  KDA_SERVE_TRY(between("--heads", o.model.heads, 0, 65536));
  KDA_SERVE_TRY(between("--layers", o.model.layers, 0, 4096));
  KDA_SERVE_TRY(between("--tp", o.model.tp, 1, 65536));
  KDA_SERVE_TRY(between("--max-batch-tokens", o.max_batch_tokens, KDA_PREFILL_GRID, kRows));
  KDA_SERVE_TRY(between("--max-requests", o.max_requests, 1, kRows));
  KDA_SERVE_TRY(between("--slots", o.slots, 1, kRows));
  KDA_SERVE_TRY(between("--threads", o.threads, 0, 4096));
  KDA_SERVE_TRY(between("--cache-mib", o.cache_mib, 0, int64_t{1} << 32));
  KDA_SERVE_TRY(between("--spec", o.spec, 0, kda_max_verify() - 1));
  KDA_SERVE_TRY(between("--verify", o.verify, 0, std::numeric_limits<int64_t>::max()));
  KDA_SERVE_TRY(probability("--accept", o.accept));
  KDA_SERVE_TRY(probability("--preempt", o.preempt));
  KDA_SERVE_TRY(one_of("--format", o.input.format, {"auto", "mooncake", "azure", "burstgpt"}));
  KDA_SERVE_TRY(one_of("--spec-mode", o.spec_mode, {"columns", "records"}));
  KDA_SERVE_TRY(one_of("--pace", o.pace, {"max", "trace"}));
  KDA_SERVE_TRY(one_of("--device", o.device, {"cpu", "cuda"}));
  KDA_SERVE_TRY(one_of("--mode", o.mode, {"core", "layer"}));
  if (!o.checkpoint.empty() && o.mode != "layer") {
    return invalid_argument("--checkpoint: wanted --mode layer beside it, got --mode {}", o.mode);
  }
  if (!o.checkpoint.empty() && o.model.heads > 0) {
    return invalid_argument("--heads: wanted the checkpoint's own, got {}", o.model.heads);
  }
  if (!(o.speed > 0 && o.speed < std::numeric_limits<double>::infinity())) {
    return invalid_argument("--speed: wanted a number > 0, got {}", o.speed);
  }
  return {};
}

Status Replay::prepare_device() {
  auto device = Device::open(options_.device == "cuda" ? KDA_CUDA : KDA_CPU, options_.threads);
  if (!device.ok()) return device.status();
  device_ = std::move(device.value());
  threads_ = kda_context_num_threads(device_->host());
  isa_ = kda_context_isa(device_->context());
  return {};
}

// Pages of live requests and of snapshots lie in one pool: prefill writes a checkpoint where the snapshot stays.
Status Replay::prepare_pool() {
  const bool records = options_.spec_mode == "records";
  kda_state_pool_desc d;
  kda_state_pool_desc_init(&d);
  d.num_layers = model_.layers;
  d.num_value_heads = model_.heads;
  d.first_value_head = model_.first_head;
  d.key_dim = model_.key_dim;
  d.value_dim = model_.value_dim;
  d.state_dtype = model_.state_dtype;
  d.conv_channels = model_.channels();
  d.conv_width = model_.conv_width;
  d.conv_columns = model_.conv_width + options_.spec - (records ? 0 : 1);  // spec P-2
  d.conv_dtype = model_.io_dtype;
  d.conv_layout = KDA_CONV_SD;
  d.pages = 1;
  size_t page_bytes = 0;
  KDA_SERVE_TRY(from_kda(kda_state_pool_size(&d, nullptr, &page_bytes)));
  page_bytes_ = static_cast<int64_t>(page_bytes);
  cache_pages_ = options_.prefix_cache ? options_.cache_mib * kMiB / page_bytes_ : 0;
  if (cache_pages_ == 0 && options_.prefix_cache && options_.cache_mib > 0) {
    return invalid_argument("--cache-mib: wanted 0 (no cache) or at least {}, room for one snapshot, got {}",
                            (page_bytes_ + kMiB - 1) / kMiB, options_.cache_mib);
  }
  d.pages = options_.slots * (records ? 1 : 1 + options_.spec) + cache_pages_;
  KDA_SERVE_TRY(between("--slots and --cache-mib: pages", d.pages, 1, std::numeric_limits<int32_t>::max()));
  kda_state_pool* pool = nullptr;
  KDA_SERVE_TRY(blame(from_kda(kda_state_pool_create(device_->context(), &d, &pool)),
                      fmt::format("--slots {} and --cache-mib {}", options_.slots, options_.cache_mib)));
  pool_.reset(pool);
  if (cache_pages_ > 0) cache_ = std::make_unique<PrefixCache>(pool, cache_pages_);
  return {};
}

Status Replay::prepare_model() {
  if (!layer_mode() || options_.checkpoint.empty()) {
    auto model = make_model(options_.model);
    if (!model.ok()) return model.status();
    model_ = model.value();
    if (layer_mode()) model_weights_ = std::make_unique<ModelWeights>(ModelWeights::seeded(model_, options_.seed));
    return {};
  }
  auto weights = ModelWeights::open(options_.checkpoint, options_.model, model_);
  if (!weights.ok()) return weights.status();
  model_weights_ = std::make_unique<ModelWeights>(std::move(weights.value()));
  return {};
}

Status Replay::prepare_content() {
  auto content = layer_mode() ? Content::hidden(model_, options_.seed, device_->host())
                              : Content::seeded(model_, options_.seed, device_->host());
  if (!content.ok()) {
    return blame(content.status(), fmt::format("--model {}, {} heads", options_.model.name, model_.heads));
  }
  content_ = std::make_unique<Content>(std::move(content.value()));
  if (!layer_mode()) weights_ = seeded_weights(model_, options_.seed);
  return {};
}

Status Replay::prepare_executor(const ExecutorOptions& e) {
  const std::string blamed = fmt::format("--max-batch-tokens {}", options_.max_batch_tokens);
  if (layer_mode()) {
    auto made = ModelExecutor::create(*device_, model_, *model_weights_, *content_, pool_.get(), e, timeline_.get());
    if (!made.ok()) return blame(made.status(), blamed + ", --layers and the model's size");
    weight_bytes_ = made.value()->weight_bytes();
    executor_ = std::move(made.value());
    return {};
  }
  auto made = LayerExecutor::create(*device_, model_, weights_, *content_, pool_.get(), e, timeline_.get());
  if (!made.ok()) return blame(made.status(), blamed);
  executor_ = std::move(made.value());
  return {};
}

Result<std::unique_ptr<Replay>> Replay::prepare(const ReplayOptions& options) {
  KDA_SERVE_TRY(check_options(options));
  std::unique_ptr<Replay> r(new Replay());
  r->options_ = options;
  const ReplayOptions& o = r->options_;
  r->options_.model.whole_layers = r->layer_mode();
  KDA_SERVE_TRY(r->prepare_model());
  KDA_SERVE_TRY(r->prepare_device());
  auto trace = read_trace(o.trace, o.input);
  if (!trace.ok()) return trace.status();
  r->trace_ = std::move(trace.value());
  KDA_SERVE_TRY(r->prepare_pool());
  KDA_SERVE_TRY(r->prepare_content());
  if (o.timeline) r->timeline_ = std::make_unique<Timeline>(Clock());

  ExecutorOptions e;
  e.max_batch_tokens = o.max_batch_tokens;
  e.max_requests = std::min(o.max_requests, o.slots);
  e.spec = o.spec;
  e.records = o.spec_mode == "records";
  e.seats = o.slots;
  e.max_checkpoints = r->cache_ ? max_checkpoints(o.max_batch_tokens) : 0;
  e.batch_invariant = o.batch_invariant;
  e.prefill_backend = o.prefill_backend == "auto" && o.backend != "auto" ? o.backend : o.prefill_backend;
  e.backend = o.backend;
  KDA_SERVE_TRY(r->prepare_executor(e));

  EngineOptions g;
  g.limits = {o.max_batch_tokens, e.max_requests, o.spec};
  g.slots = o.slots;
  g.records = e.records;
  g.accept = o.accept;
  g.preempt = o.preempt;
  g.seed = o.seed;
  g.pace_trace = o.pace == "trace";
  g.speed = o.speed;
  g.digests = o.digests;
  g.hidden = r->layer_mode();
  r->engine_ = std::make_unique<Engine>(*r->device_, r->model_, g, r->pool_.get(), r->cache_.get(), *r->content_,
                                        *r->executor_, r->timeline_.get());
  KDA_SERVE_TRY(r->engine_->load(r->trace_, choose_verified(r->trace_, o.verify, o.seed)));
  return r;
}

Status Replay::run(const std::atomic<bool>& stop, const std::function<void(const Engine&)>& on_step) {
  return engine_->run(stop, on_step);
}

Status Replay::verify_results(const std::atomic<bool>& stop, const VerifyObserver& observer) {
  verification_.tolerance = layer_mode() ? layer_tolerance(model_) : tolerance_of(model_);
  if (stats().interrupted || options_.verify == 0) return {};
  auto report = layer_mode()
                    ? verify_layers(model_, *model_weights_, engine_->requests(), device_->host(), stop, observer)
                    : verify(model_, weights_, *content_, engine_->requests(), device_->host(), stop, observer);
  if (!report.ok()) {
    verify_interrupted_ = stop.load();
    return report.status();
  }
  verification_ = std::move(report.value());
  return {};
}

std::string Replay::digests_text() const {
  std::vector<const Request*> finished;
  for (const auto& r : engine_->requests()) {
    if (r->phase == Phase::kFinished) finished.push_back(r.get());
  }
  std::sort(finished.begin(), finished.end(),
            [](const Request* a, const Request* b) { return a->trace.index < b->trace.index; });
  std::string text;
  for (const Request* r : finished) {
    text += fmt::format("{} {} {} {}\n", r->trace.index, r->trace.input_length, r->trace.output_length,
                        to_hex(r->result));
  }
  return text;
}

std::string Replay::timeline_text() const { return timeline_ ? timeline_->to_json() : ""; }

}  // namespace kda::serve

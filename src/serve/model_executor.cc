#include "serve/model_executor.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "serve/convert.h"
#include "serve/parallel.h"

namespace kda::serve {
namespace {

float widened(const char* row, kda_dtype dtype, int64_t i) {
  if (dtype == KDA_FP32) return reinterpret_cast<const float*>(row)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[i];
  if (dtype == KDA_BF16) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  // fp16: exponent and fraction moved into place; scaling by 2^112 is exact, subnormals included.
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  const float value = (bits & 0x7c00u) == 0x7c00u ? std::bit_cast<float>(magnitude | 0x7f800000u)
                                                  : std::bit_cast<float>(magnitude) * 0x1p112f;
  return (bits & 0x8000u) != 0 ? -value : value;
}

// io(h / sqrt(mean h² + eps)), weight 1. Eight sums, so that any compiler may use vectors.
void normalise_row(const char* h, kda_dtype dtype, int64_t n, float eps, char* x) {
  float sums[8] = {};
  for (int64_t i = 0; i < n; ++i) {
    const float v = widened(h, dtype, i);
    sums[i % 8] += v * v;
  }
  float total = 0;
  for (float s : sums) total += s;
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; ++i) store(x, dtype, i, widened(h, dtype, i) * scale);
}

}  // namespace

Result<std::unique_ptr<ModelExecutor>> ModelExecutor::create(const Device& device, const Model& model,
                                                             const ModelWeights& weights, const Content& content,
                                                             const kda_state_pool* pool,
                                                             const ExecutorOptions& options, Timeline* timeline) {
  if (!device.is_host()) {
    return error(KDA_UNSUPPORTED, "--mode layer: wanted --device cpu: this build has no dense projections elsewhere");
  }
  std::unique_ptr<ModelExecutor> e(new ModelExecutor(device, model, options, timeline));
  KDA_SERVE_TRY(e->create_plans());
  KDA_SERVE_TRY(e->tables_.create(device, options));
  KDA_SERVE_TRY(e->rows_.create(device, content, options.max_batch_tokens));
  e->stride_ = content.layout().stride;
  const auto io = static_cast<int64_t>(kda_dtype_size(model.io_dtype));
  KDA_SERVE_TRY(device.allocate(options.max_batch_tokens * model.hidden * io, e->x_));
  KDA_SERVE_TRY(device.allocate(options.max_batch_tokens * model.out_size() * io, e->y_));
  KDA_SERVE_TRY(device.allocate(options.max_batch_tokens * model.hidden * io, e->out_));
  for (int32_t n = 0; n < model.layers; ++n) KDA_SERVE_TRY(e->add_layer(weights, pool, n));
  return e;
}

Status ModelExecutor::create_plans() {
  kda_layer_desc d;
  kda_layer_desc_init(&d);
  d.layer = model_.spec;
  d.backend = options_.backend.c_str();
  d.prefill_backend = options_.prefill_backend.c_str();
  d.io_dtype = model_.io_dtype;
  d.state_dtype = model_.state_dtype;
  d.max_tokens = options_.max_batch_tokens;
  d.max_sequences = options_.max_requests;
  d.width = options_.width();
  d.mode = options_.records ? KDA_DECODE_RECORDS : KDA_DECODE_COLUMNS;
  d.fold = options_.records ? 1 : 0;
  d.initial_state = KDA_INITIAL_FLAGS;
  d.max_checkpoints = options_.max_checkpoints;
  d.flags = options_.batch_invariant ? KDA_PLAN_BATCH_INVARIANT : 0;
  kda_plan* plan = nullptr;
  KDA_SERVE_TRY(from_kda(kda_layer_plan_create(device_.context(), &d, &plan)));
  plan_.reset(plan);
  size_t bytes = 0, commit_bytes = 0;
  KDA_SERVE_TRY(from_kda(kda_plan_workspace_size(plan, &bytes)));
  if (options_.records) {
    auto commit = make_commit_plan(device_.context(), model_, options_);
    if (!commit.ok()) return commit.status();
    commit_ = std::move(commit.value());
    KDA_SERVE_TRY(from_kda(kda_plan_workspace_size(commit_.get(), &commit_bytes)));
  }
  return device_.allocate(static_cast<int64_t>(std::max(bytes, commit_bytes)), workspace_);
}

Status ModelExecutor::add_layer(const ModelWeights& weights, const kda_state_pool* pool, int32_t number) {
  Layer layer;
  KDA_SERVE_TRY(from_kda(kda_state_pool_state(pool, number, &layer.state)));
  KDA_SERVE_TRY(from_kda(kda_state_pool_conv(pool, number, &layer.conv)));
  const bool reference = options_.backend == "reference";
  auto loaded = weights.load(device_.context(), number, reference ? "reference" : nullptr);
  if (!loaded.ok()) return loaded.status();
  layer.weights = std::move(loaded.value());
  size_t bytes = 0;
  KDA_SERVE_TRY(from_kda(kda_layer_weights_size(layer.weights.get(), &bytes)));
  weight_bytes_ += static_cast<int64_t>(bytes);
  if (options_.records) {
    const int64_t width = options_.width(), seats = options_.seats, HV = model_.heads;
    const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
    KDA_SERVE_TRY(device_.allocate(seats * HV * width * model_.value_dim * 4, layer.u));
    KDA_SERVE_TRY(device_.allocate(seats * HV * width * 2 * model_.key_dim * io, layer.kg));
    const std::vector<int32_t> none(static_cast<size_t>(seats), 0);
    KDA_SERVE_TRY(device_.upload(none.data(), seats * 4, layer.count));
    layer.records.u = device_.at(layer.u.data(), KDA_FP32, {seats, HV, width, model_.value_dim});
    layer.records.kg = device_.at(layer.kg.data(), model_.io_dtype, {seats, HV, width, 2 * model_.key_dim});
    layer.records.count = device_.at(layer.count.data(), KDA_INT32, {seats});
  }
  layers_.push_back(std::move(layer));
  return {};
}

kda_tensor ModelExecutor::rows(const DeviceBuffer& buffer, int64_t tokens) const {
  return device_.at(buffer.data(), model_.io_dtype, {tokens, model_.hidden});
}

void ModelExecutor::normalise(int64_t tokens) {
  const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  parallel_ranges(device_.host(), tokens, 32, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      normalise_row(rows_.data() + t * stride_ * io, model_.io_dtype, model_.hidden,
                    static_cast<float>(model_.norm_eps), x_.data() + t * model_.hidden * io);
    }
  });
}

void ModelExecutor::add_residual(int64_t tokens) {
  const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  parallel_ranges(device_.host(), tokens, 32, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      char* h = rows_.data() + t * stride_ * io;
      const char* out = out_.data() + t * model_.hidden * io;
      for (int64_t i = 0; i < model_.hidden; ++i) {
        store(h, model_.io_dtype, i, widened(h, model_.io_dtype, i) + widened(out, model_.io_dtype, i));
      }
    }
  });
}

Status ModelExecutor::run_layer(const StepViews& step, const Layer& layer) {
  kda_layer_args a{};
  a.struct_size = sizeof a;
  a.weights = layer.weights.get();
  a.hidden = rows(x_, step.tokens);
  if (step.chunk > 0) {
    a.chunk.sequences.begin = step.chunk_begin;
    a.chunk.sequences.length = step.chunk_length;
    a.chunk.slots = step.chunk_slots;
    a.chunk.has_initial_state = step.chunk_has_state;
    a.chunk.checkpoint_offsets = step.checkpoint_offsets;
    a.chunk.checkpoint_slots = step.checkpoint_slots;
  }
  if (step.recurrent > 0) {
    a.recurrent.sequences.begin = step.recurrent_begin;
    a.recurrent.sequences.length = step.recurrent_length;
    a.recurrent.slots = step.recurrent_slots;
    a.recurrent.accepted = step.recurrent_accepted;
    if (options_.records) {
      a.records = layer.records;
      a.records.record_rows = step.recurrent_seat;
    }
  }
  a.state = layer.state;
  a.conv_state = layer.conv;
  a.normed = device_.at(y_.data(), model_.io_dtype, {step.tokens, model_.heads, model_.value_dim});
  a.out = rows(out_, step.tokens);
  return from_kda(kda_layer_run(plan_.get(), &a, {workspace_.data(), workspace_.bytes()}, device_.stream()));
}

Status ModelExecutor::run(const Step& step, LayerObserver& observer) {
  KDA_SERVE_TRY(spans_.start_step(step.number));
  StepViews views;
  KDA_SERVE_TRY(tables_.place(step, views));
  KDA_SERVE_TRY(rows_.gather(step, views));
  for (size_t n = 0; n < layers_.size(); ++n) {
    const auto number = static_cast<int32_t>(n);
    KDA_SERVE_TRY(spans_.timed("layer", number, step.tokens, views.recurrent + views.chunk, [&] {
      normalise(step.tokens);
      return run_layer(views, layers_[n]);
    }));
    observer.layer_done(step, number, y_.data());
    observer.hidden_done(step, number, x_.data(), out_.data());
    if (n + 1 < layers_.size()) add_residual(step.tokens);
  }
  return spans_.finish_step();
}

Status ModelExecutor::commit(std::span<Request* const> requests) {
  commit_slots_.clear();
  commit_accepted_.clear();
  commit_seats_.clear();
  for (const Request* r : requests) {
    commit_slots_.push_back(static_cast<int32_t>(r->pages[0]));
    commit_accepted_.push_back(r->accepted);
    commit_seats_.push_back(r->seat);
  }
  CommitViews views;
  KDA_SERVE_TRY(tables_.place(commit_slots_, commit_accepted_, commit_seats_, views));
  for (const Layer& layer : layers_) {
    kda_commit_args a{};
    a.struct_size = sizeof a;
    KDA_SERVE_TRY(from_kda(kda_layer_weights_parameter(layer.weights.get(), "A_log", &a.A_log)));
    KDA_SERVE_TRY(from_kda(kda_layer_weights_parameter(layer.weights.get(), "dt_bias", &a.dt_bias)));
    a.state = layer.state;
    a.slots = views.slots;
    a.accepted = views.accepted;
    a.records = layer.records;
    a.records.record_rows = views.seats;
    a.conv_state[0] = layer.conv;
    KDA_SERVE_TRY(
        from_kda(kda_commit_run(commit_.get(), &a, {workspace_.data(), workspace_.bytes()}, device_.stream())));
  }
  return device_.synchronize();
}

std::vector<OperatorChoice> ModelExecutor::choices() const {
  std::vector<OperatorChoice> all = {choice_of("projection", plan_.get())};
  const kda_plan* part = nullptr;
  for (size_t i = 0; kda_layer_plan_part(plan_.get(), i, &part) == KDA_OK; ++i) {
    all.push_back(choice_of(kda_operator_name(kda_plan_operator(part)), part));
  }
  if (commit_) all.push_back(choice_of("commit", commit_.get()));
  return all;
}

}  // namespace kda::serve

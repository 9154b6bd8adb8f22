#include "serve/model_executor.h"

#include <algorithm>

namespace kda::serve {

// ---- Preparation -----------------------------------------------------------------------------------

Result<std::unique_ptr<ModelExecutor>> ModelExecutor::create(const Device& device, const Model& model,
                                                             const ModelWeights& weights, const Content& content,
                                                             const kda_state_pool* pool,
                                                             const ExecutorOptions& options, Timeline* timeline) {
  std::unique_ptr<ModelExecutor> e(new ModelExecutor(device, model, options, timeline));
  KDA_SERVE_TRY(e->create_plans());
  KDA_SERVE_TRY(e->tables_.create(device, options));
  KDA_SERVE_TRY(e->rows_.create(device, content, options.max_batch_tokens));
  e->stride_ = content.layout().stride;
  e->commits_.reserve(options.max_requests);
  KDA_SERVE_TRY(e->create_rows(options.max_batch_tokens, KDA_MEMORY_DEVICE, e->eager_));
  if (!device.is_host()) KDA_SERVE_TRY(e->create_rows(options.max_batch_tokens, KDA_MEMORY_HOST, e->shown_));
  for (int32_t n = 0; n < model.layers; ++n) KDA_SERVE_TRY(e->add_layer(weights, pool, n));
  KDA_SERVE_TRY(
      e->graphs_.record(device, options, e->tables_, [&](const StepViews& views) { return e->run_recorded(views); }));
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

  kda_residual_norm_desc norm{};
  norm.struct_size = sizeof norm;
  norm.backend = options_.backend.c_str();
  norm.hidden = model_.hidden;
  norm.io_dtype = model_.io_dtype;
  norm.eps = model_.norm_eps;
  norm.max_tokens = options_.max_batch_tokens;
  KDA_SERVE_TRY(from_kda(kda_residual_norm_plan_create(device_.context(), &norm, &plan)));
  norm_.reset(plan);

  if (options_.records) {
    auto commit = make_commit_plan(device_.context(), model_, options_);
    if (!commit.ok()) return commit.status();
    commit_ = std::move(commit.value());
  }
  size_t most = 0;
  for (const PlanHandle* p : {&plan_, &norm_, &commit_}) {
    size_t bytes = 0;
    if (*p) KDA_SERVE_TRY(from_kda(kda_plan_workspace_size(p->get(), &bytes)));
    most = std::max(most, bytes);
  }
  return device_.allocate(static_cast<int64_t>(most), workspace_);
}

int64_t ModelExecutor::row_bytes(int64_t elements) const {
  return elements * static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
}

Status ModelExecutor::create_rows(int64_t tokens, kda_memory_kind kind, RowBuffers& out) const {
  KDA_SERVE_TRY(device_.allocate(tokens * row_bytes(model_.hidden), out.x, kind));
  KDA_SERVE_TRY(device_.allocate(tokens * row_bytes(model_.out_size()), out.y, kind));
  return device_.allocate(tokens * row_bytes(model_.hidden), out.out, kind);
}

Status ModelExecutor::add_layer(const ModelWeights& weights, const kda_state_pool* pool, int32_t number) {
  Layer layer;
  KDA_SERVE_TRY(from_kda(kda_state_pool_state(pool, number, &layer.state)));
  KDA_SERVE_TRY(from_kda(kda_state_pool_conv(pool, number, &layer.conv)));
  const bool reference = options_.backend == "reference";
  auto loaded = weights.load(device_.context(), number, reference ? "reference" : nullptr, device_.host());
  if (!loaded.ok()) return loaded.status();
  layer.weights = std::move(loaded.value());
  size_t bytes = 0;
  KDA_SERVE_TRY(from_kda(kda_layer_weights_size(layer.weights.get(), &bytes)));
  weight_bytes_ += static_cast<int64_t>(bytes);
  if (options_.records) {
    KDA_SERVE_TRY(add_records(layer));
    CommitLayer c{{}, {}, layer.state, layer.conv, layer.records};
    KDA_SERVE_TRY(from_kda(kda_layer_weights_parameter(layer.weights.get(), "A_log", &c.A_log)));
    KDA_SERVE_TRY(from_kda(kda_layer_weights_parameter(layer.weights.get(), "dt_bias", &c.dt_bias)));
    commit_layers_.push_back(c);
  }
  if (!device_.is_host()) {
    KDA_SERVE_TRY(create_rows(options_.max_recurrent_tokens(), KDA_MEMORY_DEVICE, layer.graph));
  }
  layers_.push_back(std::move(layer));
  return {};
}

Status ModelExecutor::add_records(Layer& layer) const {
  const int64_t width = options_.width(), seats = options_.seats, HV = model_.heads;
  KDA_SERVE_TRY(device_.allocate(seats * HV * width * model_.value_dim * 4, layer.u));
  KDA_SERVE_TRY(device_.allocate(seats * HV * width * row_bytes(2 * model_.key_dim), layer.kg));
  const std::vector<int32_t> none(static_cast<size_t>(seats), 0);
  KDA_SERVE_TRY(device_.upload(none.data(), seats * 4, layer.count));
  layer.records.u = device_.at(layer.u.data(), KDA_FP32, {seats, HV, width, model_.value_dim});
  layer.records.kg = device_.at(layer.kg.data(), model_.io_dtype, {seats, HV, width, 2 * model_.key_dim});
  layer.records.count = device_.at(layer.count.data(), KDA_INT32, {seats});
  return {};
}

// ---- A layer ---------------------------------------------------------------------------------------

Status ModelExecutor::run_layer(const StepViews& step, const Layer& layer, const char* before,
                                const Rows& rows) const {
  kda_residual_norm_args a{};
  a.struct_size = sizeof a;
  a.residual = device_.rows_at(rows_.data(), model_.io_dtype, {step.tokens, model_.hidden}, stride_);
  if (before != nullptr) a.add = device_.at(before, model_.io_dtype, {step.tokens, model_.hidden});
  a.out = device_.at(rows.x, model_.io_dtype, {step.tokens, model_.hidden});
  KDA_SERVE_TRY(from_kda(kda_residual_norm_run(norm_.get(), &a, workspace(), device_.stream())));
  return run_kda(step, layer, rows);
}

Status ModelExecutor::run_recorded(const StepViews& step) const {
  KDA_SERVE_TRY(rows_.gather(Step(), step));
  const char* before = nullptr;
  for (const Layer& layer : layers_) {
    KDA_SERVE_TRY(run_layer(step, layer, before, layer.graph.rows()));
    before = layer.graph.out.data();
  }
  return {};
}

Status ModelExecutor::run_kda(const StepViews& step, const Layer& layer, const Rows& rows) const {
  kda_layer_args a{};
  a.struct_size = sizeof a;
  a.weights = layer.weights.get();
  a.hidden = device_.at(rows.x, model_.io_dtype, {step.tokens, model_.hidden});
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
  a.normed = device_.at(rows.y, model_.io_dtype, {step.tokens, model_.heads, model_.value_dim});
  a.out = device_.at(rows.out, model_.io_dtype, {step.tokens, model_.hidden});
  return from_kda(kda_layer_run(plan_.get(), &a, workspace(), device_.stream()));
}

// ---- Steps -----------------------------------------------------------------------------------------

bool ModelExecutor::wanted(const Step& step, const LayerObserver& observer) const {
  const auto any = [&](const std::vector<StepRow>& rows) {
    return std::any_of(rows.begin(), rows.end(), [&](const StepRow& row) {
      return (row.outputs > 0 && observer.wants(row)) || observer.wants_hidden(row);
    });
  };
  return device_.is_host() || any(step.recurrent) || any(step.chunk);
}

Status ModelExecutor::show(const Step& step, const Rows& rows, int32_t number, LayerObserver& observer) const {
  if (!device_.is_host()) return show_from_device(step, rows, number, observer);
  observer.layer_done(step, number, rows.y);
  observer.hidden_done(step, number, rows.x, rows.out);
  return {};
}

Status ModelExecutor::show_from_device(const Step& step, const Rows& rows, int32_t number,
                                       LayerObserver& observer) const {
  const int64_t hidden = row_bytes(model_.hidden), normed = row_bytes(model_.out_size());
  const auto fetch = [&](const DeviceBuffer& to, const char* from, int64_t first, int64_t count, int64_t bytes) {
    return device_.copy(to.data() + first * bytes, from + first * bytes, count * bytes);
  };
  const auto wants_outputs = [&](const StepRow& row) { return row.outputs > 0 && observer.wants(row); };
  if (std::any_of(step.recurrent.begin(), step.recurrent.end(), wants_outputs)) {
    KDA_SERVE_TRY(fetch(shown_.y, rows.y, 0, step.recurrent_tokens, normed));  // one copy: most of them are wanted
  }
  for (const auto* group : {&step.recurrent, &step.chunk}) {
    for (const StepRow& row : *group) {
      if (group == &step.chunk && wants_outputs(row)) {
        KDA_SERVE_TRY(fetch(shown_.y, rows.y, row.begin + row.first_output, row.outputs, normed));
      }
      if (!observer.wants_hidden(row)) continue;
      KDA_SERVE_TRY(fetch(shown_.x, rows.x, row.begin, row.length, hidden));
      KDA_SERVE_TRY(fetch(shown_.out, rows.out, row.begin, row.length, hidden));
    }
  }
  KDA_SERVE_TRY(device_.synchronize());
  observer.layer_done(step, number, shown_.y.data());
  observer.hidden_done(step, number, shown_.x.data(), shown_.out.data());
  return {};
}

Status ModelExecutor::run(const Step& step, LayerObserver& observer) {
  KDA_SERVE_TRY(spans_.start_step(step.number));
  const bool graph = graphs_.serves(step), shows = wanted(step, observer);
  StepViews views;
  if (graph) {
    KDA_SERVE_TRY(graphs_.launch(step, tables_, spans_));
  } else {
    KDA_SERVE_TRY(tables_.place(step, views));
    KDA_SERVE_TRY(rows_.gather(step, views));
  }
  const Rows eager = eager_.rows();
  for (size_t n = 0; !graph && n < layers_.size(); ++n) {
    const auto number = static_cast<int32_t>(n);
    KDA_SERVE_TRY(spans_.timed("layer", number, step.tokens, views.recurrent + views.chunk,
                               [&] { return run_layer(views, layers_[n], n > 0 ? eager.out : nullptr, eager); }));
    if (n == 0 && !device_.is_host()) observer.device_works();
    if (shows) KDA_SERVE_TRY(show(step, eager, number, observer));
  }
  if (graph) observer.device_works();
  if (!device_.is_host()) KDA_SERVE_TRY(device_.synchronize());
  for (size_t n = 0; graph && shows && n < layers_.size(); ++n) {
    KDA_SERVE_TRY(show(step, layers_[n].graph.rows(), static_cast<int32_t>(n), observer));
  }
  return spans_.finish_step();
}

Status ModelExecutor::commit(std::span<Request* const> requests) {
  return commits_.run(device_, commit_.get(), requests, commit_layers_, tables_, workspace());
}

std::vector<OperatorChoice> ModelExecutor::choices() const {
  std::vector<OperatorChoice> all = {choice_of("projection", plan_.get())};
  const kda_plan* part = nullptr;
  for (size_t i = 0; kda_layer_plan_part(plan_.get(), i, &part) == KDA_OK; ++i) {
    all.push_back(choice_of(kda_operator_name(kda_plan_operator(part)), part));
  }
  all.push_back(choice_of("residual_norm", norm_.get()));
  if (commit_) all.push_back(choice_of("commit", commit_.get()));
  return all;
}

}  // namespace kda::serve

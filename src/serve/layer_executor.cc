#include "serve/layer_executor.h"

#include <algorithm>

namespace kda::serve {

// ---- Preparation -----------------------------------------------------------------------------------

Result<std::unique_ptr<LayerExecutor>> LayerExecutor::create(const Device& device, const Model& model,
                                                             const std::vector<LayerWeights>& weights,
                                                             const Content& content, const kda_state_pool* pool,
                                                             const ExecutorOptions& options, Timeline* timeline) {
  std::unique_ptr<LayerExecutor> e(new LayerExecutor(device, model, content, options, timeline));
  auto plans = LayerPlans::create(device.context(), model, options);
  if (!plans.ok()) return plans.status();
  e->plans_ = std::move(plans.value());
  KDA_SERVE_TRY(e->tables_.create(device, options));
  KDA_SERVE_TRY(e->rows_.create(device, content, options.max_batch_tokens));
  KDA_SERVE_TRY(e->create_buffers(weights, pool));
  KDA_SERVE_TRY(
      e->graphs_.record(device, options, e->tables_, [&](const StepViews& views) { return e->run_recorded(views); }));
  return e;
}

Status LayerExecutor::create_buffers(const std::vector<LayerWeights>& weights, const kda_state_pool* pool) {
  const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  const int64_t tokens = options_.max_batch_tokens;
  KDA_SERVE_TRY(device_.allocate(tokens * model_.channels() * io, post_conv_));
  KDA_SERVE_TRY(device_.allocate(tokens * model_.out_size() * io, attention_));
  KDA_SERVE_TRY(device_.allocate(static_cast<int64_t>(plans_.workspace), workspace_));
  if (device_.is_host()) {
    KDA_SERVE_TRY(device_.allocate(tokens * model_.out_size() * io, out_));
  } else {
    KDA_SERVE_TRY(device_.allocate(tokens * model_.out_size() * io, shown_, KDA_MEMORY_HOST));
  }
  for (size_t n = 0; n < weights.size(); ++n) {
    KDA_SERVE_TRY(add_layer(weights[n], pool, static_cast<int32_t>(n)));
  }
  commits_.reserve(options_.max_requests);
  return {};
}

Status LayerExecutor::add_layer(const LayerWeights& weights, const kda_state_pool* pool, int32_t number) {
  Layer layer;
  KDA_SERVE_TRY(from_kda(kda_state_pool_state(pool, number, &layer.state)));
  KDA_SERVE_TRY(from_kda(kda_state_pool_conv(pool, number, &layer.conv)));
  KDA_SERVE_TRY(add_weights(weights, layer));
  if (options_.records) KDA_SERVE_TRY(add_records(layer));
  if (!device_.is_host()) {
    const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
    KDA_SERVE_TRY(device_.allocate(options_.max_batch_tokens * model_.out_size() * io, layer.own_out));
  }
  layer.out = device_.is_host() ? out_.data() : layer.own_out.data();
  if (options_.records)
    commit_layers_.push_back({layer.A_log, layer.dt_bias, layer.state, layer.conv, layer.records});
  layers_.push_back(std::move(layer));
  return {};
}

Status LayerExecutor::add_weights(const LayerWeights& weights, Layer& layer) {
  struct Part {
    const std::vector<float>& values;
    kda_tensor& view;
    std::initializer_list<int64_t> shape;
  };
  const Part parts[] = {{weights.conv, layer.taps, {model_.channels(), model_.conv_width}},
                        {weights.A_log, layer.A_log, {model_.heads}},
                        {weights.dt_bias, layer.dt_bias, {model_.heads, model_.key_dim}},
                        {weights.norm, layer.norm, {model_.value_dim}}};
  constexpr size_t kFloats = 64;  // parts lie at multiples of 256 bytes
  std::vector<float> all;
  for (const Part& part : parts) {
    all.insert(all.end(), part.values.begin(), part.values.end());
    all.resize((all.size() + kFloats - 1) / kFloats * kFloats);
  }
  KDA_SERVE_TRY(device_.upload(all.data(), static_cast<int64_t>(all.size() * sizeof(float)), layer.weights));
  const float* at = reinterpret_cast<const float*>(layer.weights.data());
  for (const Part& part : parts) {
    part.view = device_.at(at, KDA_FP32, part.shape);
    at += (part.values.size() + kFloats - 1) / kFloats * kFloats;
  }
  return {};
}

Status LayerExecutor::add_records(Layer& layer) {
  const int64_t width = options_.width(), seats = options_.seats;
  const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  KDA_SERVE_TRY(device_.allocate(seats * model_.heads * width * model_.value_dim * 4, layer.u));
  KDA_SERVE_TRY(device_.allocate(seats * model_.heads * width * 2 * model_.key_dim * io, layer.kg));
  const std::vector<int32_t> none(static_cast<size_t>(seats), 0);
  KDA_SERVE_TRY(device_.upload(none.data(), seats * 4, layer.count));
  layer.records.u = device_.at(layer.u.data(), KDA_FP32, {seats, model_.heads, width, model_.value_dim});
  layer.records.kg = device_.at(layer.kg.data(), model_.io_dtype, {seats, model_.heads, width, 2 * model_.key_dim});
  layer.records.count = device_.at(layer.count.data(), KDA_INT32, {seats});
  return {};
}

// ---- Operators -------------------------------------------------------------------------------------

kda_tensor LayerExecutor::raw(int64_t first, int64_t tokens, int64_t part, int64_t heads, int64_t dim) const {
  const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  return device_.rows_at(rows_.data() + first * content_.row_bytes() + part * io, model_.io_dtype,
                         {tokens, heads, dim}, content_.layout().stride);
}

kda_tensor LayerExecutor::raw_flat(int64_t tokens, int64_t part, int64_t size) const {
  const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  return device_.rows_at(rows_.data() + part * io, model_.io_dtype, {tokens, size}, content_.layout().stride);
}

Status LayerExecutor::run_recurrent(const StepViews& step, const Layer& layer) {
  const RowLayout& row = content_.layout();
  const int64_t tokens = step.recurrent_tokens;
  kda_decode_step_args a{};
  a.struct_size = sizeof a;
  kda_decode_args& d = a.decode;
  d.struct_size = sizeof d;
  d.gate = raw(0, tokens, row.gate, model_.heads, model_.key_dim);
  d.beta = raw_flat(tokens, row.beta, model_.heads);
  d.A_log = layer.A_log;
  d.dt_bias = layer.dt_bias;
  d.sequences.begin = step.recurrent_begin;
  d.sequences.length = step.recurrent_length;
  d.state = layer.state;
  d.slots = step.recurrent_slots;
  d.accepted = step.recurrent_accepted;
  if (options_.records) {
    d.records = layer.records;
    d.records.record_rows = step.recurrent_seat;
  }
  d.out = device_.at(layer.out, model_.io_dtype, {tokens, model_.heads, model_.value_dim});
  a.x[0] = raw_flat(tokens, row.qkv, model_.channels());
  a.conv_weight[0] = layer.taps;
  a.conv_state[0] = layer.conv;
  a.z = raw(0, tokens, row.z, model_.heads, model_.value_dim);
  a.norm_weight = layer.norm;
  return from_kda(kda_decode_step_run(plans_.decode_step.get(), &a, workspace(), device_.stream()));
}

// All layers of a step without chunk rows.
Status LayerExecutor::run_recorded(const StepViews& step) {
  KDA_SERVE_TRY(rows_.gather(Step(), step));
  for (const Layer& layer : layers_) KDA_SERVE_TRY(run_recurrent(step, layer));
  return {};
}

Status LayerExecutor::run_conv(const StepViews& step, const Layer& layer) {
  kda_conv_args a{};
  a.struct_size = sizeof a;
  a.x[0] = raw_flat(step.tokens, content_.layout().qkv, model_.channels());
  a.weight[0] = layer.taps;
  a.sequences.begin = step.chunk_begin;
  a.sequences.length = step.chunk_length;
  a.state[0] = layer.conv;
  a.slots = step.chunk_slots;
  a.has_initial_state = step.chunk_has_state;
  a.checkpoint_offsets = step.checkpoint_offsets;
  a.checkpoint_slots = step.checkpoint_slots;
  a.out[0] = device_.at(post_conv_.data(), model_.io_dtype, {step.tokens, model_.channels()});
  return from_kda(kda_conv_run(plans_.conv.get(), &a, workspace(), device_.stream()));
}

Status LayerExecutor::run_prefill(const StepViews& step, const Layer& layer) {
  const RowLayout& row = content_.layout();
  const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  const int64_t keys = model_.heads * model_.key_dim;
  const auto part = [&](int64_t offset, int64_t dim) {
    return device_.rows_at(post_conv_.data() + offset * io, model_.io_dtype, {step.tokens, model_.heads, dim},
                           model_.channels());
  };
  kda_prefill_args a{};
  a.struct_size = sizeof a;
  a.q = part(0, model_.key_dim);
  a.k = part(keys, model_.key_dim);
  a.v = part(2 * keys, model_.value_dim);
  a.gate = raw(0, step.tokens, row.gate, model_.heads, model_.key_dim);
  a.beta = raw_flat(step.tokens, row.beta, model_.heads);
  a.A_log = layer.A_log;
  a.dt_bias = layer.dt_bias;
  a.sequences.begin = step.chunk_begin;
  a.sequences.length = step.chunk_length;
  a.state = layer.state;
  a.slots = step.chunk_slots;
  a.has_initial_state = step.chunk_has_state;
  a.checkpoint_offsets = step.checkpoint_offsets;
  a.checkpoint_slots = step.checkpoint_slots;
  a.out = device_.at(attention_.data(), model_.io_dtype, {step.tokens, model_.heads, model_.value_dim});
  return from_kda(kda_prefill_run(plans_.prefill.get(), &a, workspace(), device_.stream()));
}

// On the chunk rows only: decode_step has written the recurrent ones.
Status LayerExecutor::run_norm(const StepViews& step, const Layer& layer) {
  const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  const int64_t first = step.recurrent_tokens, tokens = step.tokens - first;
  const auto rows = [&](char* base) {
    return device_.at(base + first * model_.out_size() * io, model_.io_dtype,
                      {tokens, model_.heads, model_.value_dim});
  };
  kda_gated_norm_args a{};
  a.struct_size = sizeof a;
  a.o = rows(attention_.data());
  a.z = raw(first, tokens, content_.layout().z, model_.heads, model_.value_dim);
  a.weight = layer.norm;
  a.out = rows(layer.out);
  return from_kda(kda_gated_norm_run(plans_.norm.get(), &a, workspace(), device_.stream()));
}

Status LayerExecutor::run_layer(const StepViews& step, const Layer& layer, int32_t number) {
  if (step.recurrent > 0) {
    KDA_SERVE_TRY(spans_.timed("decode_step", number, step.recurrent_tokens, step.recurrent,
                               [&] { return run_recurrent(step, layer); }));
  }
  if (step.chunk == 0) return {};
  const int64_t tokens = step.tokens - step.recurrent_tokens;
  KDA_SERVE_TRY(spans_.timed("conv", number, tokens, step.chunk, [&] { return run_conv(step, layer); }));
  KDA_SERVE_TRY(spans_.timed("prefill", number, tokens, step.chunk, [&] { return run_prefill(step, layer); }));
  return spans_.timed("gated_norm", number, tokens, step.chunk, [&] { return run_norm(step, layer); });
}

// ---- Steps -----------------------------------------------------------------------------------------

Status LayerExecutor::show(const Step& step, const Layer& layer, int32_t number, LayerObserver& observer) {
  if (device_.is_host()) {
    observer.layer_done(step, number, layer.out);
    return {};
  }
  const int64_t row_bytes = model_.out_size() * static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  bool any = false;
  const auto fetch = [&](int64_t first, int64_t rows) {
    any = true;
    return device_.copy(shown_.data() + first * row_bytes, layer.out + first * row_bytes, rows * row_bytes);
  };
  const auto wanted = [&](const StepRow& row) { return row.outputs > 0 && observer.wants(row); };
  if (std::any_of(step.recurrent.begin(), step.recurrent.end(), wanted)) {
    KDA_SERVE_TRY(fetch(0, step.recurrent_tokens));  // one copy: most of them are wanted
  }
  for (const StepRow& row : step.chunk) {
    if (wanted(row)) KDA_SERVE_TRY(fetch(row.begin + row.first_output, row.outputs));
  }
  if (!any) return {};
  KDA_SERVE_TRY(device_.synchronize());
  observer.layer_done(step, number, shown_.data());
  return {};
}

Status LayerExecutor::run(const Step& step, LayerObserver& observer) {
  KDA_SERVE_TRY(spans_.start_step(step.number));
  const bool graph = graphs_.serves(step);
  StepViews views;
  if (graph) {
    KDA_SERVE_TRY(graphs_.launch(step, tables_, spans_));
  } else {
    KDA_SERVE_TRY(tables_.place(step, views));
    // In core mode the dense projections are a table look-up; every layer reads the same rows.
    KDA_SERVE_TRY(spans_.timed("projections", 0, step.tokens, views.recurrent + views.chunk,
                               [&] { return rows_.gather(step, views); }));
  }
  for (size_t n = 0; n < layers_.size(); ++n) {
    const auto number = static_cast<int32_t>(n);
    if (!graph) KDA_SERVE_TRY(run_layer(views, layers_[n], number));
    if (device_.is_host()) KDA_SERVE_TRY(show(step, layers_[n], number, observer));
  }
  if (!device_.is_host()) {
    observer.device_works();
    KDA_SERVE_TRY(device_.synchronize());
    for (size_t n = 0; n < layers_.size(); ++n) {
      KDA_SERVE_TRY(show(step, layers_[n], static_cast<int32_t>(n), observer));
    }
  }
  return spans_.finish_step();
}

Status LayerExecutor::commit(std::span<Request* const> requests) {
  return commits_.run(device_, plans_.commit.get(), requests, commit_layers_, tables_, workspace());
}

}  // namespace kda::serve

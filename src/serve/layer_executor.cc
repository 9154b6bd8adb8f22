#include "serve/layer_executor.h"

#include <algorithm>
#include <cstring>

namespace kda::serve {
namespace {

kda_tensor int_vector(const std::vector<int32_t>& v) {
  return view(v.data(), KDA_INT32, {static_cast<int64_t>(v.size())});
}

kda_tensor int_table(const std::vector<int32_t>& v, size_t rows, int64_t columns) {
  return view(v.data(), KDA_INT32, {static_cast<int64_t>(rows), columns});
}

OperatorChoice choice_of(const char* op, const kda_plan* plan) {
  OperatorChoice choice{op, kda_plan_backend(plan), kda_plan_isa(plan), {}};
  const char *candidate = nullptr, *reasons = nullptr;
  for (size_t i = 0; kda_plan_refusal(plan, i, &candidate, &reasons) == KDA_OK; ++i) {
    OperatorChoice::Skipped skipped{candidate, {}};
    std::string text = reasons;
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find('\n', at), text.size());
      skipped.reasons.push_back(text.substr(at, end - at));
      at = end + 1;
    }
    choice.skipped.push_back(std::move(skipped));
  }
  return choice;
}

// Creates a plan and raises `workspace` to what its runs need.
template <class Desc>
Status make_plan(kda_status (*create)(kda_context*, const Desc*, kda_plan**), kda_context* context, const Desc& desc,
                 PlanHandle& out, size_t& workspace) {
  kda_plan* plan = nullptr;
  KDA_SERVE_TRY(from_kda(create(context, &desc, &plan)));
  out.reset(plan);
  size_t bytes = 0;
  KDA_SERVE_TRY(from_kda(kda_plan_workspace_size(plan, &bytes)));
  workspace = std::max(workspace, bytes);
  return {};
}

}  // namespace

kda_attention_spec LayerExecutor::attention() const {
  kda_attention_spec a{};
  a.num_heads = a.num_value_heads = model_.heads;
  a.key_dim = model_.key_dim;
  a.value_dim = model_.value_dim;
  a.io_dtype = model_.io_dtype;
  a.state_dtype = model_.state_dtype;
  a.gate_family = model_.gate_family;
  a.lower_bound = model_.lower_bound;
  return a;
}

uint32_t LayerExecutor::flags() const { return options_.batch_invariant ? KDA_PLAN_BATCH_INVARIANT : 0; }

Status LayerExecutor::create_plans(kda_context* context) {
  size_t workspace = 0;
  kda_conv_desc conv;
  kda_conv_desc_init(&conv);
  conv.backend = options_.backend.c_str();
  conv.mode = KDA_CONV_PREFILL;
  conv.width = model_.conv_width;
  conv.parts = 1;
  conv.channels[0] = model_.channels();
  conv.io_dtype = model_.io_dtype;
  conv.layout = KDA_CONV_SD;
  conv.max_tokens = options_.max_batch_tokens;
  conv.max_sequences = options_.max_requests;
  conv.initial_state = KDA_INITIAL_FLAGS;
  conv.max_checkpoints = options_.max_checkpoints;
  conv.flags = flags();
  KDA_SERVE_TRY(make_plan(kda_conv_plan_create, context, conv, conv_, workspace));

  kda_prefill_desc prefill;
  kda_prefill_desc_init(&prefill);
  prefill.attention = attention();
  prefill.backend = options_.prefill_backend.c_str();
  prefill.max_tokens = options_.max_batch_tokens;
  prefill.max_sequences = options_.max_requests;
  prefill.initial_state = KDA_INITIAL_FLAGS;
  prefill.max_checkpoints = options_.max_checkpoints;
  prefill.flags = flags();
  KDA_SERVE_TRY(make_plan(kda_prefill_plan_create, context, prefill, prefill_, workspace));

  kda_gated_norm_desc norm{};
  norm.struct_size = sizeof norm;
  norm.backend = options_.backend.c_str();
  norm.num_value_heads = model_.heads;
  norm.value_dim = model_.value_dim;
  norm.io_dtype = model_.io_dtype;
  norm.eps = model_.norm_eps;
  norm.max_tokens = options_.max_batch_tokens;
  KDA_SERVE_TRY(make_plan(kda_gated_norm_plan_create, context, norm, norm_, workspace));

  kda_decode_step_desc step;
  kda_decode_step_desc_init(&step);
  step.decode.attention = attention();
  step.decode.backend = options_.backend.c_str();
  step.decode.max_sequences = options_.max_requests;
  step.decode.max_tokens = std::min(options_.max_batch_tokens, options_.max_requests * (1 + options_.spec));
  step.decode.width = 1 + options_.spec;
  step.decode.mode = options_.records ? KDA_DECODE_RECORDS : KDA_DECODE_COLUMNS;
  step.decode.fold = options_.records ? 1 : 0;
  step.decode.flags = flags();
  step.conv_width = model_.conv_width;
  step.conv_parts = 1;
  step.conv_layout = KDA_CONV_SD;
  step.norm_eps = model_.norm_eps;
  KDA_SERVE_TRY(make_plan(kda_decode_step_plan_create, context, step, decode_, workspace));

  if (options_.records) {
    kda_commit_desc commit;
    kda_commit_desc_init(&commit);
    commit.attention = attention();
    commit.backend = options_.backend.c_str();
    commit.max_sequences = options_.max_requests;
    commit.width = 1 + options_.spec;
    commit.conv_width = model_.conv_width;
    commit.conv_parts = 1;
    commit.conv_layout = KDA_CONV_SD;
    commit.flags = flags();
    KDA_SERVE_TRY(make_plan(kda_commit_plan_create, context, commit, commit_, workspace));
  }
  auto buffer = Buffer::allocate(static_cast<int64_t>(workspace));
  if (!buffer.ok()) return buffer.status();
  workspace_ = std::move(buffer.value());
  return {};
}

Status LayerExecutor::add_layer(const LayerWeights& weights, const kda_state_pool* pool, int32_t number) {
  Layer layer;
  KDA_SERVE_TRY(from_kda(kda_state_pool_state(pool, number, &layer.state)));
  KDA_SERVE_TRY(from_kda(kda_state_pool_conv(pool, number, &layer.conv)));
  layer.taps = view(weights.conv.data(), KDA_FP32, {model_.channels(), model_.conv_width});
  layer.A_log = view(weights.A_log.data(), KDA_FP32, {model_.heads});
  layer.dt_bias = view(weights.dt_bias.data(), KDA_FP32, {model_.heads, model_.key_dim});
  layer.norm = view(weights.norm.data(), KDA_FP32, {model_.value_dim});
  if (options_.records) {
    const int64_t width = 1 + options_.spec;
    const int64_t per_seat = model_.heads * width;
    const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
    auto u = Buffer::allocate(options_.seats * per_seat * model_.value_dim * 4);
    auto kg = Buffer::allocate(options_.seats * per_seat * 2 * model_.key_dim * io);
    auto count = Buffer::allocate(options_.seats * 4);
    if (!u.ok()) return u.status();
    if (!kg.ok()) return kg.status();
    if (!count.ok()) return count.status();
    layer.u = std::move(u.value());
    layer.kg = std::move(kg.value());
    layer.count = std::move(count.value());
    std::memset(layer.count.data(), 0, layer.count.bytes());
    layer.records.u = view(layer.u.data(), KDA_FP32, {options_.seats, model_.heads, width, model_.value_dim});
    layer.records.kg =
        view(layer.kg.data(), model_.io_dtype, {options_.seats, model_.heads, width, 2 * model_.key_dim});
    layer.records.count = view(layer.count.data(), KDA_INT32, {options_.seats});
  }
  layers_.push_back(std::move(layer));
  return {};
}

Status LayerExecutor::create_buffers(const std::vector<LayerWeights>& weights, const kda_state_pool* pool) {
  const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  const int64_t tokens = options_.max_batch_tokens;
  struct Wanted {
    Buffer& buffer;
    int64_t bytes;
  };
  for (const Wanted& w :
       {Wanted{raw_, tokens * content_.row_bytes()}, Wanted{post_conv_, tokens * model_.channels() * io},
        Wanted{attention_, tokens * model_.out_size() * io}, Wanted{out_, tokens * model_.out_size() * io}}) {
    auto buffer = Buffer::allocate(w.bytes);
    if (!buffer.ok()) return buffer.status();
    w.buffer = std::move(buffer.value());
  }
  for (size_t n = 0; n < weights.size(); ++n) {
    KDA_SERVE_TRY(add_layer(weights[n], pool, static_cast<int32_t>(n)));
  }
  for (auto* v : {&commit_slots_, &commit_accepted_, &commit_seats_}) {
    v->reserve(static_cast<size_t>(options_.max_requests));
  }
  return {};
}

Result<std::unique_ptr<LayerExecutor>> LayerExecutor::create(kda_context* context, const Model& model,
                                                             const std::vector<LayerWeights>& weights,
                                                             const Content& content, const kda_state_pool* pool,
                                                             const ExecutorOptions& options, Timeline* timeline) {
  std::unique_ptr<LayerExecutor> e(new LayerExecutor(context, model, content, options, timeline));
  KDA_SERVE_TRY(e->create_plans(context));
  KDA_SERVE_TRY(e->create_buffers(weights, pool));
  return e;
}

template <class Body>
Status LayerExecutor::timed(const char* name, const Step& step, int32_t layer, int64_t tokens, size_t sequences,
                            const Body& body) {
  if (timeline_ == nullptr) return body();
  const double begin = timeline_->clock().seconds();
  Status status = body();
  timeline_->add(
      {name, begin, timeline_->clock().seconds(), step.number, layer, tokens, static_cast<int64_t>(sequences)});
  return status;
}

kda_tensor LayerExecutor::raw(int64_t tokens, int64_t part, int64_t heads, int64_t dim) const {
  const int64_t io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  return rows_view(raw_.data() + part * io, model_.io_dtype, {tokens, heads, dim}, content_.layout().stride);
}

kda_tensor LayerExecutor::raw_flat(int64_t tokens, int64_t part, int64_t size) const {
  const int64_t io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  return rows_view(raw_.data() + part * io, model_.io_dtype, {tokens, size}, content_.layout().stride);
}

Status LayerExecutor::run_recurrent(const Step& step, const Layer& layer) {
  const RowLayout& row = content_.layout();
  const int64_t tokens = step.recurrent_tokens;
  kda_decode_step_args a{};
  a.struct_size = sizeof a;
  kda_decode_args& d = a.decode;
  d.struct_size = sizeof d;
  d.gate = raw(tokens, row.gate, model_.heads, model_.key_dim);
  d.beta = raw_flat(tokens, row.beta, model_.heads);
  d.A_log = layer.A_log;
  d.dt_bias = layer.dt_bias;
  d.sequences.begin = int_vector(step.recurrent_begin);
  d.sequences.length = int_vector(step.recurrent_length);
  d.state = layer.state;
  d.slots = options_.records ? int_vector(step.recurrent_slots)
                             : int_table(step.recurrent_slots, step.recurrent.size(), 1 + options_.spec);
  d.accepted = int_vector(step.recurrent_accepted);
  if (options_.records) {
    d.records = layer.records;
    d.records.record_rows = int_vector(step.recurrent_seat);
  }
  d.out = view(out_.data(), model_.io_dtype, {tokens, model_.heads, model_.value_dim});
  a.x[0] = raw_flat(tokens, row.qkv, model_.channels());
  a.conv_weight[0] = layer.taps;
  a.conv_state[0] = layer.conv;
  a.z = raw(tokens, row.z, model_.heads, model_.value_dim);
  a.norm_weight = layer.norm;
  return from_kda(kda_decode_step_run(decode_.get(), &a, {workspace_.data(), workspace_.bytes()}, nullptr));
}

Status LayerExecutor::run_conv(const Step& step, const Layer& layer) {
  kda_conv_args a{};
  a.struct_size = sizeof a;
  a.x[0] = raw_flat(step.tokens, content_.layout().qkv, model_.channels());
  a.weight[0] = layer.taps;
  a.sequences.begin = int_vector(step.chunk_begin);
  a.sequences.length = int_vector(step.chunk_length);
  a.state[0] = layer.conv;
  a.slots = int_vector(step.chunk_slots);
  a.has_initial_state = view(step.chunk_has_state.data(), KDA_BOOL, {static_cast<int64_t>(step.chunk.size())});
  if (!step.snapshots.empty()) {
    a.checkpoint_offsets = int_table(step.checkpoint_offsets, step.chunk.size(), options_.max_checkpoints);
    a.checkpoint_slots = int_table(step.checkpoint_slots, step.chunk.size(), options_.max_checkpoints);
  }
  a.out[0] = view(post_conv_.data(), model_.io_dtype, {step.tokens, model_.channels()});
  return from_kda(kda_conv_run(conv_.get(), &a, {workspace_.data(), workspace_.bytes()}, nullptr));
}

Status LayerExecutor::run_prefill(const Step& step, const Layer& layer) {
  const RowLayout& row = content_.layout();
  const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  const int64_t keys = model_.heads * model_.key_dim;
  const auto part = [&](int64_t offset, int64_t dim) {
    return rows_view(post_conv_.data() + offset * io, model_.io_dtype, {step.tokens, model_.heads, dim},
                     model_.channels());
  };
  kda_prefill_args a{};
  a.struct_size = sizeof a;
  a.q = part(0, model_.key_dim);
  a.k = part(keys, model_.key_dim);
  a.v = part(2 * keys, model_.value_dim);
  a.gate = raw(step.tokens, row.gate, model_.heads, model_.key_dim);
  a.beta = raw_flat(step.tokens, row.beta, model_.heads);
  a.A_log = layer.A_log;
  a.dt_bias = layer.dt_bias;
  a.sequences.begin = int_vector(step.chunk_begin);
  a.sequences.length = int_vector(step.chunk_length);
  a.state = layer.state;
  a.slots = int_vector(step.chunk_slots);
  a.has_initial_state = view(step.chunk_has_state.data(), KDA_BOOL, {static_cast<int64_t>(step.chunk.size())});
  if (!step.snapshots.empty()) {
    a.checkpoint_offsets = int_table(step.checkpoint_offsets, step.chunk.size(), options_.max_checkpoints);
    a.checkpoint_slots = int_table(step.checkpoint_slots, step.chunk.size(), options_.max_checkpoints);
  }
  a.out = view(attention_.data(), model_.io_dtype, {step.tokens, model_.heads, model_.value_dim});
  return from_kda(kda_prefill_run(prefill_.get(), &a, {workspace_.data(), workspace_.bytes()}, nullptr));
}

// On the chunk rows only: decode_step has written the recurrent ones.
Status LayerExecutor::run_norm(const Step& step, const Layer& layer) {
  const auto io = static_cast<int64_t>(kda_dtype_size(model_.io_dtype));
  const int64_t first = step.recurrent_tokens, tokens = step.tokens - first;
  const int64_t skipped = first * model_.out_size() * io;
  const auto rows = [&](char* base) {
    return view(base + skipped, model_.io_dtype, {tokens, model_.heads, model_.value_dim});
  };
  kda_gated_norm_args a{};
  a.struct_size = sizeof a;
  a.o = rows(attention_.data());
  a.z = raw(tokens, content_.layout().z, model_.heads, model_.value_dim);
  a.z.data = static_cast<char*>(a.z.data) + first * content_.row_bytes();
  a.weight = layer.norm;
  a.out = rows(out_.data());
  return from_kda(kda_gated_norm_run(norm_.get(), &a, {workspace_.data(), workspace_.bytes()}, nullptr));
}

Status LayerExecutor::run(const Step& step, LayerObserver& observer) {
  // In core mode the dense projections are a table look-up; every layer reads the same rows.
  KDA_SERVE_TRY(timed("projections", step, 0, step.tokens, step.recurrent.size() + step.chunk.size(), [&] {
    content_.gather(step.content, raw_.data(), context_);
    return Status();
  }));
  const int64_t chunk_tokens = step.tokens - step.recurrent_tokens;
  for (size_t n = 0; n < layers_.size(); ++n) {
    const Layer& layer = layers_[n];
    const auto number = static_cast<int32_t>(n);
    if (!step.recurrent.empty()) {
      KDA_SERVE_TRY(timed("decode_step", step, number, step.recurrent_tokens, step.recurrent.size(),
                          [&] { return run_recurrent(step, layer); }));
    }
    if (!step.chunk.empty()) {
      const size_t sequences = step.chunk.size();
      KDA_SERVE_TRY(timed("conv", step, number, chunk_tokens, sequences, [&] { return run_conv(step, layer); }));
      KDA_SERVE_TRY(
          timed("prefill", step, number, chunk_tokens, sequences, [&] { return run_prefill(step, layer); }));
      KDA_SERVE_TRY(
          timed("gated_norm", step, number, chunk_tokens, sequences, [&] { return run_norm(step, layer); }));
    }
    observer.layer_done(step, number, out_.data());
  }
  return {};
}

Status LayerExecutor::commit(std::span<Request* const> requests) {
  commit_slots_.clear();
  commit_accepted_.clear();
  commit_seats_.clear();
  for (const Request* r : requests) {
    commit_slots_.push_back(static_cast<int32_t>(r->pages[0]));
    commit_accepted_.push_back(r->accepted);
    commit_seats_.push_back(r->seat);
  }
  for (const Layer& layer : layers_) {
    kda_commit_args a{};
    a.struct_size = sizeof a;
    a.A_log = layer.A_log;
    a.dt_bias = layer.dt_bias;
    a.state = layer.state;
    a.slots = int_vector(commit_slots_);
    a.accepted = int_vector(commit_accepted_);
    a.records = layer.records;
    a.records.record_rows = int_vector(commit_seats_);
    a.conv_state[0] = layer.conv;
    KDA_SERVE_TRY(from_kda(kda_commit_run(commit_.get(), &a, {workspace_.data(), workspace_.bytes()}, nullptr)));
  }
  return {};
}

std::vector<OperatorChoice> LayerExecutor::choices() const {
  std::vector<OperatorChoice> all = {choice_of("conv", conv_.get()), choice_of("prefill", prefill_.get()),
                                     choice_of("gated_norm", norm_.get()), choice_of("decode_step", decode_.get())};
  if (commit_) all.push_back(choice_of("commit", commit_.get()));
  return all;
}

}  // namespace kda::serve

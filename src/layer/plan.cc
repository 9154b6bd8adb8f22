#include "layer/plan.h"

#include <algorithm>

#include "core/device_runtime.h"

namespace kda::layer {
namespace {

Status normalize(kda_layer_desc& d) {
  KDA_RETURN_IF_ERROR(kda::layer::normalize(d.layer));
  if (d.io_dtype == 0) d.io_dtype = KDA_BF16;
  if (!is_io_dtype(d.io_dtype)) {
    return invalid_argument("io_dtype: wanted fp32, bf16 or fp16, got ", dtype_name(d.io_dtype));
  }
  if (d.conv_dtype == 0) d.conv_dtype = d.io_dtype;
  if (d.out_dtype == 0) d.out_dtype = d.io_dtype;
  if (d.conv_layout == 0) d.conv_layout = KDA_CONV_SD;
  if (d.width == 0) d.width = 1;
  KDA_RETURN_IF_ERROR(check_bound("max_tokens", d.max_tokens));
  return check_bound("max_sequences", d.max_sequences);
}

kda_attention_spec attention(const kda_layer_desc& d) {
  kda_attention_spec a{};
  a.num_heads = d.layer.num_heads;
  a.num_value_heads = d.layer.num_value_heads;
  a.key_dim = d.layer.key_dim;
  a.value_dim = d.layer.value_dim;
  a.io_dtype = d.io_dtype;
  a.state_dtype = d.state_dtype;
  a.gate_family = d.layer.gate_family;
  a.lower_bound = d.layer.lower_bound;
  a.allow_neg_eigval = d.layer.allow_neg_eigval;
  return a;
}

// Of either group's convolution; the mode is the group's.
kda_conv_desc conv_desc(const kda_layer_desc& d) {
  kda_conv_desc conv{};
  conv.struct_size = sizeof conv;
  conv.backend = d.backend;
  conv.width = d.layer.conv_width;
  conv.parts = 1;
  conv.channels[0] = channels(d.layer);
  conv.io_dtype = d.io_dtype;
  conv.state_dtype = d.conv_dtype;
  conv.layout = d.conv_layout;
  conv.max_tokens = d.max_tokens;
  conv.max_sequences = d.max_sequences;
  conv.null_slot = d.null_slot;
  conv.flags = d.flags;
  return conv;
}

template <class Op>
Status make(const Context& context, const typename Op::Desc& desc, std::unique_ptr<Plan<Op>>& out) {
  auto plan = create_plan<Op>(context, &desc);
  if (!plan.ok()) return plan.status().with_context("layer");
  out = std::move(plan.value());
  return {};
}

}  // namespace

Result<std::unique_ptr<LayerPlan>> LayerPlan::create(const Context& context, const kda_layer_desc* raw) {
  std::unique_ptr<LayerPlan> plan(new LayerPlan());
  KDA_RETURN_IF_ERROR(read_struct(raw, plan->desc_, "desc"));
  kda_layer_desc& d = plan->desc_;
  KDA_RETURN_IF_ERROR(normalize(d));
  const bool reference = d.backend != nullptr && std::string_view(d.backend) == "reference";
  if (d.out_dtype != d.io_dtype && !(reference && d.out_dtype == KDA_FP64)) {
    return invalid_argument("out_dtype: wanted io_dtype, or fp64 on the reference backend, got ",
                            dtype_name(d.out_dtype));
  }
  if (d.projection == nullptr && reference) d.projection = "reference";
  auto choice = select_projection(context, d.io_dtype, d.projection);
  if (!choice.ok()) return choice.status().with_context("layer");
  plan->projection_ = choice.value().backend;
  plan->refused = std::move(choice.value().refused);
  plan->op = KDA_OP_LAYER;
  plan->context = &context;
  plan->backend = plan->projection_->name();
  plan->isa = plan->backend == "reference" ? "fp64" : context.isa;
  plan->checked = checked_mode(d.flags);
  KDA_RETURN_IF_ERROR(plan->make_parts());
  KDA_RETURN_IF_ERROR(plan->make_projections().with_context("layer"));
  plan->book_sections();
  if (plan->book.overflowed()) return unsupported("layer: size: wanted a workspace below 2^63 bytes, got more");
  d.backend = d.prefill_backend = d.projection = nullptr;  // the caller's
  return plan;
}

Status LayerPlan::make_parts() {
  const kda_layer_desc& d = desc_;
  kda_conv_desc conv = conv_desc(d);
  conv.mode = KDA_CONV_PREFILL;
  conv.initial_state = d.initial_state;
  conv.max_checkpoints = d.max_checkpoints;
  KDA_RETURN_IF_ERROR(make<Conv>(*context, conv, conv_));

  kda_prefill_desc prefill{};
  prefill.struct_size = sizeof prefill;
  prefill.attention = attention(d);
  prefill.backend = d.prefill_backend != nullptr ? d.prefill_backend : d.backend;
  prefill.max_tokens = d.max_tokens;
  prefill.max_sequences = d.max_sequences;
  prefill.initial_state = d.initial_state;
  prefill.null_slot = d.null_slot;
  prefill.max_checkpoints = d.max_checkpoints;
  prefill.flags = d.flags;
  prefill.segments = d.segments;
  KDA_RETURN_IF_ERROR(make<Prefill>(*context, prefill, prefill_));

  kda_gated_norm_desc norm{};
  norm.struct_size = sizeof norm;
  norm.backend = d.backend;
  norm.num_value_heads = d.layer.num_value_heads;
  norm.value_dim = d.layer.value_dim;
  norm.io_dtype = d.io_dtype;
  norm.out_dtype = d.out_dtype;
  norm.eps = d.layer.norm_eps;
  norm.max_tokens = d.max_tokens;
  KDA_RETURN_IF_ERROR(make<GatedNorm>(*context, norm, norm_));
  return make_recurrent();
}

Status LayerPlan::make_recurrent() {
  const kda_layer_desc& d = desc_;
  kda_decode_desc decode{};
  decode.struct_size = sizeof decode;
  decode.attention = attention(d);
  decode.backend = d.backend;
  decode.max_tokens = d.max_tokens;
  decode.max_sequences = d.max_sequences;
  decode.width = d.width;
  decode.mode = d.mode;
  decode.fold = d.fold;
  decode.null_slot = d.null_slot;
  decode.flags = d.flags;
  if (d.layer.conv_bias != 0) {
    kda_conv_desc conv = conv_desc(d);
    conv.mode = d.mode == KDA_DECODE_RECORDS ? KDA_CONV_RECORDS : KDA_CONV_COLUMNS;
    conv.verify_width = d.width;
    conv.fold = d.fold;
    KDA_RETURN_IF_ERROR(make<Conv>(*context, conv, step_conv_));
    return make<Decode>(*context, decode, step_decode_);
  }
  kda_decode_step_desc step{};
  step.struct_size = sizeof step;
  step.decode = decode;
  step.decode.attention.out_dtype = d.out_dtype;
  step.conv_width = d.layer.conv_width;
  step.conv_parts = 1;
  step.conv_layout = d.conv_layout;
  step.conv_dtype = d.conv_dtype;
  step.norm_eps = d.layer.norm_eps;
  return make<DecodeStep>(*context, step, step_);
}

Status LayerPlan::make_projections() {
  const kda_layer_spec& s = desc_.layer;
  const ProjectionOptions options{desc_.io_dtype, desc_.max_tokens, (desc_.flags & KDA_PLAN_BATCH_INVARIANT) != 0};
  const auto make = [&](const ProjectionShape& shape, std::unique_ptr<PreparedProjection>& out) -> Status {
    auto made = projection_->prepare(*context, shape, options);
    if (!made.ok()) return made.status();
    out = std::move(made.value());
    return {};
  };
  const int64_t row = in_row(s).width;
  KDA_RETURN_IF_ERROR(make({s.hidden, row, s.hidden, row}, in_));
  KDA_RETURN_IF_ERROR(make({s.gate_rank, gates(s), row, gates(s)}, f_b_));
  if (s.output_gate == KDA_OUTPUT_GATE_LOW_RANK) {
    KDA_RETURN_IF_ERROR(make({s.output_gate_rank, values(s), row, values(s)}, g_b_));
  }
  return make({values(s), s.hidden, values(s), s.hidden}, o_proj_);
}

void LayerPlan::book_sections() {
  const kda_layer_desc& d = desc_;
  const kda_layer_spec& s = d.layer;
  const int64_t T = d.max_tokens;
  rows_ = book.book("projections of hidden", d.io_dtype, {T, in_row(s).width});
  f_ = book.book("gate logits", d.io_dtype, {T, gates(s)});
  z_ = book.book("output gate", d.io_dtype, {g_b_ ? T : 0, values(s)});
  post_ = book.book("q, k, v", d.io_dtype, {T, channels(s)});
  o_ = book.book("attention", d.io_dtype, {T, values(s)});
  y_ = book.book("normed", d.out_dtype, {T, values(s)});
  int64_t scratch = 0;
  for (const auto* p : {&in_, &f_b_, &g_b_, &o_proj_}) scratch = std::max(scratch, *p ? (*p)->workspace_bytes() : 0);
  projections_ = book.book_bytes("projections", scratch);
  int64_t bytes = 0;
  for (size_t i = 0; const kda_plan* p = part(i); ++i) bytes = std::max(bytes, p->book.total_bytes());
  operators_ = book.book_bytes("operators", bytes);
}

const kda_plan* LayerPlan::part(size_t i) const {
  const kda_plan* const step = step_ ? static_cast<const kda_plan*>(step_.get()) : step_conv_.get();
  const kda_plan* const parts[] = {conv_.get(), prefill_.get(), norm_.get(), step, step_decode_.get()};
  return i < std::size(parts) ? parts[i] : nullptr;
}

// ---- A run ---------------------------------------------------------------------------------------------

struct LayerPlan::Scratch {
  kda_tensor qkv, q_raw, k_raw, v_raw, b, f_a, f, g_a, z;  // raw projections; flat rows
  kda_tensor post, o, y;
  void* projections = nullptr;
  kda_workspace operators{};
};

namespace {

bool given(const kda_layer_group& g) {
  return present(g.sequences.cu_seqlens) || present(g.sequences.begin) || present(g.sequences.length) ||
         present(g.slots);
}

// Columns [first, first + count) of [T, n] rows.
kda_tensor columns(const kda_tensor& t, int64_t first, int64_t count) {
  kda_tensor c = t;
  c.data = static_cast<char*>(t.data) + first * static_cast<int64_t>(dtype_size(t.dtype));
  c.shape[1] = count;
  return c;
}

// [T, heads·dim] as [T, heads, dim].
kda_tensor heads(const kda_tensor& t, int64_t count, int64_t dim) {
  kda_tensor h = t;
  h.rank = 3;
  h.shape[1] = count;
  h.shape[2] = dim;
  h.strides[1] = dim;
  h.strides[2] = 1;
  return h;
}
kda_tensor flat(const kda_tensor& t) {
  kda_tensor f = t;
  f.rank = 2;
  f.shape[1] = t.shape[1] * t.shape[2];
  f.strides[1] = 1;
  return f;
}

// Zeros in the rows [T, n].
Status fill_zero(const Context& context, const kda_tensor& t, void* stream) {
  const auto size = static_cast<int64_t>(dtype_size(t.dtype));
  const int64_t bytes = t.shape[1] * size, pitch = t.strides[0] * size;
  if (t.shape[0] == 0 || bytes == 0) return {};
  if (context.device.type != KDA_CPU) return context.runtime->zero_rows(t.data, bytes, t.shape[0], pitch, stream);
  context.parallel.for_each(
      t.shape[0], [&](int64_t r, int32_t) { std::fill_n(static_cast<char*>(t.data) + r * pitch, bytes, char{0}); });
  return {};
}

void visit(const kda_layer_group& g, const TensorVisitor& visitor) {
  visit_sequences(g.sequences, visitor);
  visitor("slots", g.slots, false);
  visitor("write_slots", g.write_slots, false);
  visitor("has_initial_state", g.has_initial_state, false);
  visitor("accepted", g.accepted, false);
  visitor("checkpoint_offsets", g.checkpoint_offsets, false);
  visitor("checkpoint_slots", g.checkpoint_slots, false);
}

void visit(const kda_layer_args& a, const TensorVisitor& visitor) {
  visitor("hidden", a.hidden, false);
  visit(a.chunk, visitor);
  visit(a.recurrent, visitor);
  visitor("state", a.state, true);
  visitor("conv_state", a.conv_state, true);
  visitor("records.u", a.records.u, true);
  visitor("records.kg", a.records.kg, true);
  visitor("records.count", a.records.count, true);
  visitor("records.record_rows", a.records.record_rows, false);
  visitor("normed", a.normed, true);
  visitor("out", a.out, true);
}

}  // namespace

Status LayerPlan::check(const kda_layer_args& a, const Weights& w) const {
  KDA_RETURN_IF_ERROR(same(desc_.layer, w.spec()));
  if (w.io() != desc_.io_dtype) {
    return invalid_argument("weights: wanted packed for io ", dtype_name(desc_.io_dtype), ", got ",
                            dtype_name(w.io()));
  }
  if (&w.backend() != projection_ || &w.context() != context) {
    return invalid_argument("weights: wanted packed for projection '", projection_->name(),
                            "' in the plan's context, got '", w.backend().name(), "'",
                            &w.context() != context ? " in another one" : "");
  }
  KDA_RETURN_IF_ERROR(check_tensor("hidden", a.hidden, {desc_.io_dtype}, {kAny, desc_.layer.hidden}, 1));
  const int64_t T = a.hidden.shape[0];
  if (T > desc_.max_tokens) {
    return invalid_argument("hidden: wanted at most max_tokens = ", desc_.max_tokens, " rows, got ", T);
  }
  KDA_RETURN_IF_ERROR(check_tensor("out", a.out, {desc_.out_dtype}, {T, desc_.layer.hidden}, 1));
  if (!present(a.normed)) return {};
  return check_tensor("normed", a.normed, {desc_.out_dtype}, {T, desc_.layer.num_value_heads, desc_.layer.value_dim},
                      2);
}

Status LayerPlan::check_aliases(const kda_layer_args& args, const kda_workspace& workspace) const {
  Status first;
  AliasCheck aliases;
  visit(args, [&](const char* name, const kda_tensor& tensor, bool written) {
    if (first.ok()) first = check_view(name, tensor, context->device);
    if (first.ok()) aliases.add(name, tensor, written);
  });
  KDA_RETURN_IF_ERROR(first);
  return aliases.result(workspace);
}

LayerPlan::Scratch LayerPlan::scratch(const kda_layer_args& a, const kda_workspace& workspace) const {
  const WorkspaceGrant grant(book, workspace.data);
  const kda_layer_spec& s = desc_.layer;
  const int64_t T = a.hidden.shape[0];
  const auto rows = [&](WorkspaceBook::Id id, int64_t n, kda_dtype dtype) {
    return make_tensor(grant.get<char>(id), dtype, {T, n}, context->device);
  };
  Scratch x;
  const InRow in = in_row(s);
  const kda_tensor all = rows(rows_, in.width, desc_.io_dtype);
  x.qkv = columns(all, 0, channels(s));
  x.q_raw = columns(all, 0, keys(s));
  x.k_raw = columns(all, keys(s), keys(s));
  x.v_raw = columns(all, 2 * keys(s), values(s));
  x.f_a = columns(all, in.f_a, s.gate_rank);
  x.b = columns(all, in.b, s.num_value_heads);
  x.f = rows(f_, gates(s), desc_.io_dtype);
  x.g_a = columns(all, in.gate, s.output_gate_rank);
  x.z = g_b_ ? rows(z_, values(s), desc_.io_dtype) : columns(all, in.gate, values(s));
  x.post = rows(post_, channels(s), desc_.io_dtype);
  x.o = rows(o_, values(s), desc_.io_dtype);
  x.y = present(a.normed) ? flat(a.normed) : rows(y_, values(s), desc_.out_dtype);
  x.projections = grant.get<char>(projections_);
  x.operators = {grant.get<char>(operators_),
                 static_cast<size_t>(book.sections()[static_cast<size_t>(operators_)].bytes)};
  return x;
}

// Step 1 of L-7.
Status LayerPlan::project_in(const Weights& w, const kda_layer_args& a, const Scratch& s, void* stream) const {
  const kda_tensor in[] = {s.q_raw, s.k_raw, s.v_raw, g_b_ ? s.g_a : s.z, s.f_a, s.b};
  context->announce("projection");
  KDA_RETURN_IF_ERROR(in_->run({&w.in(), a.hidden, in, s.projections}, stream));
  KDA_RETURN_IF_ERROR(f_b_->run({&w.f_b(), s.f_a, {&s.f, 1}, s.projections}, stream));
  if (!g_b_) return {};
  return g_b_->run({w.g_b(), s.g_a, {&s.z, 1}, s.projections}, stream);
}

// Steps 2 to 4. The norm of a step with chunk rows goes over all rows: of nobody's it makes zeros, and what it leaves
// in recurrent rows decode_step writes over.
Status LayerPlan::run_operators(const Weights& w, const kda_layer_args& a, const Scratch& s, void* stream) const {
  const bool apart = given(a.recurrent) && !step_;
  if (given(a.chunk) || apart) {
    KDA_RETURN_IF_ERROR(fill_zero(*context, s.o, stream));
    if (given(a.chunk)) KDA_RETURN_IF_ERROR(attend_chunk(w, a, s, stream));
    if (apart) KDA_RETURN_IF_ERROR(attend_recurrent(w, a, s, stream));
    KDA_RETURN_IF_ERROR(run_norm(w, s, stream));
  } else {
    KDA_RETURN_IF_ERROR(fill_zero(*context, s.y, stream));
  }
  return given(a.recurrent) && step_ ? run_step(w, a, s, stream) : Status();
}

namespace {

// q, k, v of either group in the rows [T, channels] that the convolution wrote.
template <class Args>
void place_qkv(const kda_layer_spec& l, const kda_tensor& post, Args& a) {
  a.q = heads(columns(post, 0, keys(l)), l.num_heads, l.key_dim);
  a.k = heads(columns(post, keys(l), keys(l)), l.num_heads, l.key_dim);
  a.v = heads(columns(post, 2 * keys(l), values(l)), l.num_value_heads, l.value_dim);
}

kda_conv_args conv_args(const kda_layer_group& g, const kda_layer_args& a, const Weights::Parameters& p,
                        const kda_tensor& x, const kda_tensor& out) {
  kda_conv_args conv{};
  conv.struct_size = sizeof conv;
  conv.x[0] = x;
  conv.weight[0] = p.conv;
  conv.bias[0] = p.conv_bias;
  conv.sequences = g.sequences;
  conv.state[0] = a.conv_state;
  conv.slots = g.slots;
  conv.write_slots = g.write_slots;
  conv.has_initial_state = g.has_initial_state;
  conv.out[0] = out;
  return conv;
}

}  // namespace

Status LayerPlan::attend_chunk(const Weights& w, const kda_layer_args& a, const Scratch& s, void* stream) const {
  const kda_layer_spec& l = desc_.layer;
  const kda_layer_group& g = a.chunk;
  kda_conv_args conv = conv_args(g, a, w.parameters(), s.qkv, s.post);
  conv.checkpoint_offsets = g.checkpoint_offsets;
  conv.checkpoint_slots = g.checkpoint_slots;
  KDA_RETURN_IF_ERROR(run_plan<Conv>(conv_.get(), &conv, s.operators, stream));

  kda_prefill_args prefill{};
  prefill.struct_size = sizeof prefill;
  place_qkv(l, s.post, prefill);
  prefill.A_log = w.parameters().A_log;
  prefill.dt_bias = w.parameters().dt_bias;
  prefill.gate = heads(s.f, l.num_value_heads, l.key_dim);
  prefill.beta = s.b;
  prefill.sequences = g.sequences;
  prefill.state = a.state;
  prefill.slots = g.slots;
  prefill.write_slots = g.write_slots;
  prefill.has_initial_state = g.has_initial_state;
  prefill.checkpoint_offsets = g.checkpoint_offsets;
  prefill.checkpoint_slots = g.checkpoint_slots;
  prefill.out = heads(s.o, l.num_value_heads, l.value_dim);
  return run_plan<Prefill>(prefill_.get(), &prefill, s.operators, stream);
}

// Rows of nobody keep o = 0, and with it y.
Status LayerPlan::run_norm(const Weights& w, const Scratch& s, void* stream) const {
  const kda_layer_spec& l = desc_.layer;
  kda_gated_norm_args norm{};
  norm.struct_size = sizeof norm;
  norm.o = heads(s.o, l.num_value_heads, l.value_dim);
  norm.z = heads(s.z, l.num_value_heads, l.value_dim);
  norm.weight = w.parameters().norm;
  norm.out = heads(s.y, l.num_value_heads, l.value_dim);
  return run_plan<GatedNorm>(norm_.get(), &norm, s.operators, stream);
}

// What decode and decode_step have in common.
kda_decode_args LayerPlan::decode_args(const Weights& w, const kda_layer_args& a, const Scratch& s) const {
  const kda_layer_spec& l = desc_.layer;
  const kda_layer_group& g = a.recurrent;
  kda_decode_args d{};
  d.struct_size = sizeof d;
  d.gate = heads(s.f, l.num_value_heads, l.key_dim);
  d.beta = s.b;
  d.A_log = w.parameters().A_log;
  d.dt_bias = w.parameters().dt_bias;
  d.sequences = g.sequences;
  d.state = a.state;
  d.slots = g.slots;
  d.write_slots = g.write_slots;
  d.accepted = g.accepted;
  d.has_initial_state = g.has_initial_state;
  d.records = a.records;
  return d;
}

Status LayerPlan::attend_recurrent(const Weights& w, const kda_layer_args& a, const Scratch& s, void* stream) const {
  const kda_layer_spec& l = desc_.layer;
  kda_conv_args conv = conv_args(a.recurrent, a, w.parameters(), s.qkv, s.post);
  conv.accepted = a.recurrent.accepted;
  if (desc_.fold != 0) {
    conv.record_count = a.records.count;
    conv.record_rows = a.records.record_rows;
  }
  KDA_RETURN_IF_ERROR(run_plan<Conv>(step_conv_.get(), &conv, s.operators, stream));
  kda_decode_args d = decode_args(w, a, s);
  place_qkv(l, s.post, d);
  d.out = heads(s.o, l.num_value_heads, l.value_dim);
  return run_plan<Decode>(step_decode_.get(), &d, s.operators, stream);
}

// Over whatever the norm left in the recurrent rows.
Status LayerPlan::run_step(const Weights& w, const kda_layer_args& a, const Scratch& s, void* stream) const {
  const kda_layer_spec& l = desc_.layer;
  kda_decode_step_args step{};
  step.struct_size = sizeof step;
  step.decode = decode_args(w, a, s);
  step.decode.out = heads(s.y, l.num_value_heads, l.value_dim);
  step.x[0] = s.qkv;
  step.conv_weight[0] = w.parameters().conv;
  step.conv_state[0] = a.conv_state;
  step.z = heads(s.z, l.num_value_heads, l.value_dim);
  step.norm_weight = w.parameters().norm;
  return run_plan<DecodeStep>(step_.get(), &step, s.operators, stream);
}

// Step 5.
Status LayerPlan::project_out(const Weights& w, const kda_layer_args& a, const Scratch& s, void* stream) const {
  context->announce("projection");
  return o_proj_->run({&w.o(), s.y, {&a.out, 1}, s.projections}, stream);
}

Status LayerPlan::run(const kda_layer_args* raw, const kda_workspace& workspace, void* stream) const {
  KDA_RETURN_IF_ERROR(check_observer(*context, "layer"));
  kda_layer_args a{};
  KDA_RETURN_IF_ERROR(read_struct(raw, a, "args"));
  if (a.weights == nullptr) return invalid_argument("weights: wanted a pointer, got NULL");
  const Weights& w = *a.weights->weights;
  KDA_RETURN_IF_ERROR(check(a, w));
  KDA_RETURN_IF_ERROR(check_workspace(*this, workspace));
  KDA_RETURN_IF_ERROR(check_aliases(a, workspace));
  if (!given(a.chunk) && !given(a.recurrent)) {  // a dry run (spec L-12)
    KDA_RETURN_IF_ERROR(fill_zero(*context, a.out, stream));
    return present(a.normed) ? fill_zero(*context, flat(a.normed), stream) : Status();
  }
  const Scratch s = scratch(a, workspace);
  KDA_RETURN_IF_ERROR(project_in(w, a, s, stream));
  KDA_RETURN_IF_ERROR(run_operators(w, a, s, stream));
  return project_out(w, a, s, stream);
}

Status mask_sequences(const kda_tensor& mask, int64_t* begin, int64_t* length) {
  KDA_RETURN_IF_ERROR(check_view("mask", mask, {KDA_CPU, 0}));
  KDA_RETURN_IF_ERROR(check_tensor("mask", mask, {KDA_BOOL, KDA_UINT8}, {kAny, kAny}));
  const int64_t B = mask.shape[0], T = mask.shape[1];
  std::vector<int64_t> first(static_cast<size_t>(B), 0), count(static_cast<size_t>(B), 0);
  for (int64_t b = 0; b < B; ++b) {
    const auto* row = static_cast<const uint8_t*>(mask.data) + b * mask.strides[0];
    int64_t t0 = 0;
    while (t0 < T && row[t0 * mask.strides[1]] == 0) ++t0;
    int64_t t1 = t0;
    while (t1 < T && row[t1 * mask.strides[1]] != 0) ++t1;
    for (int64_t t = t1; t < T; ++t) {
      if (row[t * mask.strides[1]] == 0) continue;
      return invalid_argument("mask: wanted padding on the left or on the right alone, got row ", b,
                              " with a hole at ", t1, " before ", t);
    }
    if (t0 > 0 && t1 < T && t1 > t0) {
      return invalid_argument("mask: wanted padding on the left or on the right alone, got row ", b,
                              " with both: tokens ", t0, " to ", t1 - 1, " of ", T);
    }
    first[static_cast<size_t>(b)] = b * T + (t1 > t0 ? t0 : 0);
    count[static_cast<size_t>(b)] = t1 - t0;
  }
  std::copy(first.begin(), first.end(), begin);
  std::copy(count.begin(), count.end(), length);
  return {};
}

}  // namespace kda::layer

// A run of the layer: L-7 step by step, between tensors in the workspace.
#include <algorithm>

#include "core/device_runtime.h"
#include "layer/plan.h"

namespace kda::layer {

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

}  // namespace kda::layer

#include "layer/plan.h"

#include <algorithm>

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

#include "serve/layer_plans.h"

#include <algorithm>
#include <string>

namespace kda::serve {

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

namespace {

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

kda_attention_spec attention(const Model& model) {
  kda_attention_spec a{};
  a.num_heads = model.query_heads;
  a.num_value_heads = model.heads;
  a.key_dim = model.key_dim;
  a.value_dim = model.value_dim;
  a.io_dtype = model.io_dtype;
  a.state_dtype = model.state_dtype;
  a.gate_family = model.gate_family;
  a.lower_bound = model.lower_bound;
  a.allow_neg_eigval = model.spec.allow_neg_eigval;
  return a;
}

}  // namespace

Result<PlanHandle> make_commit_plan(kda_context* context, const Model& model, const ExecutorOptions& options) {
  kda_commit_desc commit;
  kda_commit_desc_init(&commit);
  commit.attention = attention(model);
  commit.backend = options.backend.c_str();
  commit.max_sequences = options.max_requests;
  commit.width = options.width();
  commit.conv_width = model.conv_width;
  commit.conv_parts = 1;
  commit.conv_layout = KDA_CONV_SD;
  commit.flags = options.batch_invariant ? KDA_PLAN_BATCH_INVARIANT : 0;
  kda_plan* plan = nullptr;
  KDA_SERVE_TRY(from_kda(kda_commit_plan_create(context, &commit, &plan)));
  return PlanHandle(plan);
}

Result<LayerPlans> LayerPlans::create(kda_context* context, const Model& model, const ExecutorOptions& options) {
  LayerPlans plans;
  const uint32_t flags = options.batch_invariant ? KDA_PLAN_BATCH_INVARIANT : 0;
  kda_conv_desc conv;
  kda_conv_desc_init(&conv);
  conv.backend = options.backend.c_str();
  conv.mode = KDA_CONV_PREFILL;
  conv.width = model.conv_width;
  conv.parts = 1;
  conv.channels[0] = model.channels();
  conv.io_dtype = model.io_dtype;
  conv.layout = KDA_CONV_SD;
  conv.max_tokens = options.max_batch_tokens;
  conv.max_sequences = options.max_requests;
  conv.initial_state = KDA_INITIAL_FLAGS;
  conv.max_checkpoints = options.max_checkpoints;
  conv.flags = flags;
  KDA_SERVE_TRY(make_plan(kda_conv_plan_create, context, conv, plans.conv, plans.workspace));

  kda_prefill_desc prefill;
  kda_prefill_desc_init(&prefill);
  prefill.attention = attention(model);
  prefill.backend = options.prefill_backend.c_str();
  prefill.max_tokens = options.max_batch_tokens;
  prefill.max_sequences = options.max_requests;
  prefill.initial_state = KDA_INITIAL_FLAGS;
  prefill.max_checkpoints = options.max_checkpoints;
  prefill.flags = flags;
  KDA_SERVE_TRY(make_plan(kda_prefill_plan_create, context, prefill, plans.prefill, plans.workspace));

  kda_gated_norm_desc norm{};
  norm.struct_size = sizeof norm;
  norm.backend = options.backend.c_str();
  norm.num_value_heads = model.heads;
  norm.value_dim = model.value_dim;
  norm.io_dtype = model.io_dtype;
  norm.eps = model.norm_eps;
  norm.max_tokens = options.max_batch_tokens;
  KDA_SERVE_TRY(make_plan(kda_gated_norm_plan_create, context, norm, plans.norm, plans.workspace));

  kda_decode_step_desc step;
  kda_decode_step_desc_init(&step);
  step.decode.attention = attention(model);
  step.decode.backend = options.backend.c_str();
  step.decode.max_sequences = options.max_requests;
  step.decode.max_tokens = options.max_recurrent_tokens();
  step.decode.width = options.width();
  step.decode.mode = options.records ? KDA_DECODE_RECORDS : KDA_DECODE_COLUMNS;
  step.decode.fold = options.records ? 1 : 0;
  step.decode.flags = flags;
  step.conv_width = model.conv_width;
  step.conv_parts = 1;
  step.conv_layout = KDA_CONV_SD;
  step.norm_eps = model.norm_eps;
  KDA_SERVE_TRY(make_plan(kda_decode_step_plan_create, context, step, plans.decode_step, plans.workspace));

  if (options.records) {
    auto commit = make_commit_plan(context, model, options);
    if (!commit.ok()) return commit.status();
    plans.commit = std::move(commit.value());
    size_t bytes = 0;
    KDA_SERVE_TRY(from_kda(kda_plan_workspace_size(plans.commit.get(), &bytes)));
    plans.workspace = std::max(plans.workspace, bytes);
  }
  return plans;
}

std::vector<OperatorChoice> LayerPlans::choices() const {
  std::vector<OperatorChoice> all = {choice_of("conv", conv.get()), choice_of("prefill", prefill.get()),
                                     choice_of("gated_norm", norm.get()),
                                     choice_of("decode_step", decode_step.get())};
  if (commit) all.push_back(choice_of("commit", commit.get()));
  return all;
}

}  // namespace kda::serve

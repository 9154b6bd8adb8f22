#include "problem.h"

#include <algorithm>
#include <map>
#include <sstream>

#include "values.h"
#include "verb.h"

namespace kda::tools {
namespace {

template <class T>
CLI::Option* add_enum(CLI::App& verb, const std::string& name, T& value, std::map<std::string, int> names,
                      const std::string& help) {
  CLI::Option* const option = verb.add_option(name, value, help);
  set_names(*option, std::move(names));
  return option;
}

uint32_t flags_of(const ProblemOptions& p) {
  return (p.batch_invariant ? KDA_PLAN_BATCH_INVARIANT : 0) | (p.checked ? KDA_PLAN_CHECKED : 0);
}

template <class Desc>
void fill_common(const ProblemOptions& p, Desc& d) {
  d.attention = p.attention;
  d.backend = p.backend.c_str();
  d.max_sequences = p.max_sequences;
  d.null_slot = p.null_slot;
  d.flags = flags_of(p);
}

kda_prefill_desc prefill_desc(const ProblemOptions& p) {
  auto d = make<kda_prefill_desc>();
  fill_common(p, d);
  d.max_tokens = p.max_tokens;
  d.max_checkpoints = p.max_checkpoints;
  d.initial_state = p.initial != 0 ? p.initial : KDA_INITIAL_FLAGS;
  d.segments = p.no_segments ? KDA_SEGMENTS_OFF : KDA_SEGMENTS_AUTO;
  return d;
}

kda_decode_desc decode_desc(const ProblemOptions& p) {
  auto d = make<kda_decode_desc>();
  fill_common(p, d);
  d.max_tokens = p.max_tokens;
  d.width = p.width;
  d.mode = p.records ? KDA_DECODE_RECORDS : KDA_DECODE_COLUMNS;
  d.fold = p.fold;
  d.store = p.store_final ? KDA_STORE_FINAL : KDA_STORE_PER_TOKEN;
  d.initial_state = p.initial;
  return d;
}

kda_commit_desc commit_desc(const ProblemOptions& p) {
  auto d = make<kda_commit_desc>();
  fill_common(p, d);
  d.width = p.width;
  d.conv_width = p.conv_width;
  d.conv_parts = p.conv_parts;
  d.conv_layout = p.conv_layout;
  d.conv_dtype = p.conv_dtype;
  return d;
}

kda_decode_step_desc decode_step_desc(const ProblemOptions& p) {
  auto d = make<kda_decode_step_desc>();
  d.decode = decode_desc(p);
  d.conv_width = p.conv_width;
  d.conv_parts = p.conv_parts;
  d.conv_layout = p.conv_layout;
  d.conv_dtype = p.conv_dtype;
  d.norm_eps = p.norm_eps;
  d.no_norm = p.no_norm;
  return d;
}

int64_t value_heads(const ProblemOptions& p) {
  return p.attention.num_value_heads ? p.attention.num_value_heads : p.attention.num_heads;
}

}  // namespace

kda_conv_desc conv_desc(const ProblemOptions& p) {
  auto d = make<kda_conv_desc>();
  d.backend = p.backend.c_str();
  d.mode = p.conv_mode;
  d.width = p.conv_width;
  d.parts = p.conv_parts;
  const std::vector<int64_t> channels = conv_channels(p);
  std::copy(channels.begin(), channels.end(), d.channels);
  d.io_dtype = p.attention.io_dtype;
  d.state_dtype = p.conv_dtype;
  d.out_dtype = p.attention.out_dtype;
  d.layout = p.conv_layout;
  d.verify_width = p.width;
  d.fold = p.fold;
  d.initial_state = p.initial;
  d.null_slot = p.null_slot;
  d.no_activation = p.no_activation;
  d.max_tokens = p.max_tokens;
  d.max_sequences = p.max_sequences;
  d.max_checkpoints = p.max_checkpoints;
  d.flags = flags_of(p);
  return d;
}

namespace {

kda_gated_norm_desc gated_norm_desc(const ProblemOptions& p) {
  auto d = make<kda_gated_norm_desc>();
  d.backend = p.backend.c_str();
  d.num_value_heads = value_heads(p);
  d.value_dim = p.attention.value_dim;
  d.io_dtype = p.attention.io_dtype;
  d.out_dtype = p.attention.out_dtype;
  d.eps = p.norm_eps;
  d.max_tokens = p.max_tokens;
  return d;
}

kda_residual_norm_desc residual_norm_desc(const ProblemOptions& p) {
  auto d = make<kda_residual_norm_desc>();
  d.backend = p.backend.c_str();
  d.hidden = p.hidden;
  d.io_dtype = p.attention.io_dtype;
  d.out_dtype = p.attention.out_dtype;
  d.eps = p.norm_eps;
  d.max_tokens = p.max_tokens;
  return d;
}

kda_segment_merge_desc merge_desc(const ProblemOptions& p) {
  auto d = make<kda_segment_merge_desc>();
  d.backend = p.backend.c_str();
  d.num_value_heads = value_heads(p);
  d.key_dim = p.attention.key_dim;
  d.value_dim = p.attention.value_dim;
  d.max_segments = p.max_sequences;
  return d;
}

// Calls f with the operator's description.
template <class F>
auto with_desc(kda_operator op, const ProblemOptions& p, const F& f) {
  switch (op) {
    case KDA_OP_PREFILL:
    case KDA_OP_SEGMENT_SUMMARY: return f(prefill_desc(p));
    case KDA_OP_DECODE: return f(decode_desc(p));
    case KDA_OP_COMMIT: return f(commit_desc(p));
    case KDA_OP_DECODE_STEP: return f(decode_step_desc(p));
    case KDA_OP_CONV: return f(conv_desc(p));
    case KDA_OP_GATED_NORM: return f(gated_norm_desc(p));
    case KDA_OP_SEGMENT_MERGE: return f(merge_desc(p));
    case KDA_OP_RESIDUAL_NORM: return f(residual_norm_desc(p));
    default: throw UsageError("this operator has no candidates to choose from");
  }
}

std::vector<std::string> lines(const char* text) {
  std::vector<std::string> list;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) list.push_back(line);
  return list;
}

}  // namespace

std::vector<int64_t> conv_channels(const ProblemOptions& p) {
  const int64_t keys = p.attention.num_heads * p.attention.key_dim, values = value_heads(p) * p.attention.value_dim;
  if (p.conv_parts == 3) return {keys, keys, values};
  return {2 * keys + values};
}

CLI::Option* add_dtype(CLI::App& verb, const std::string& name, kda_dtype& dtype, const std::string& help) {
  return add_enum(verb, name, dtype, {{"fp32", KDA_FP32}, {"bf16", KDA_BF16}, {"fp16", KDA_FP16}}, help);
}

CLI::Option* add_gate_family(CLI::App& verb, kda_gate_family& family, const std::string& help) {
  return add_enum(verb, "--gate-family", family,
                  {{"softplus", KDA_GATE_SOFTPLUS}, {"bounded", KDA_GATE_BOUNDED}, {"plain", KDA_GATE_PLAIN}}, help);
}

ProblemOptions::ProblemOptions() {
  attention.num_heads = 32;
  attention.key_dim = attention.value_dim = 128;
  attention.io_dtype = KDA_BF16;
}

void ProblemOptions::add_to(CLI::App& verb) {
  const std::string group = "Problem";
  verb.option_defaults()->always_capture_default();
  std::vector<CLI::Option*> added = {
      verb.add_option("--backend", backend, "auto, portable, fused or reference; aliases of the operator"),
      verb.add_option("--heads", attention.num_heads, "H, query and key heads"),
      verb.add_option("--value-heads", attention.num_value_heads, "HV, a multiple of H (default H)"),
      verb.add_option("--key-dim", attention.key_dim, "K"),
      verb.add_option("--value-dim", attention.value_dim, "V"),
      add_dtype(verb, "--io", attention.io_dtype, "dtype of q, k, v, out"),
      add_dtype(verb, "--gate-dtype", attention.gate_dtype, "dtype of the gate (default: io)"),
      add_dtype(verb, "--beta-dtype", attention.beta_dtype, "dtype of beta (default: io)"),
      add_dtype(verb, "--state-dtype", attention.state_dtype, "dtype of the recurrent pool (default fp32)"),
      family_ = add_gate_family(verb, attention.gate_family, "default: bounded with --lower-bound, else softplus"),
      bound_ = verb.add_option("--lower-bound", attention.lower_bound, "of the bounded family, < 0"),
      verb.add_flag("--plain-beta", plain_beta_, "beta is given, not its logit"),
      verb.add_flag("--neg-eigval", negative_, "beta up to 2"),
      verb.add_flag("--no-qk-norm", no_norm_, "q and k are used as they are"),
      verb.add_option("--width", width, "1 + drafts of a verify window"),
      verb.add_flag("--records", records, "recover mode instead of a state per draft"),
      verb.add_flag("--fold", fold, "recover mode: commit before verifying"),
      verb.add_option("--conv-width", conv_width, "W"),
      verb.add_option("--max-tokens", max_tokens, "T bound of the plan"),
      verb.add_option("--max-sequences", max_sequences, "N bound of the plan"),
      verb.add_option("--max-checkpoints", max_checkpoints, "checkpoints per sequence"),
      verb.add_flag("--batch-invariant", batch_invariant, "bits that depend on nothing but the sequence"),
  };
  for (CLI::Option* option : added) option->group(group);
}

void ProblemOptions::add_form_to(CLI::App& verb) {
  for (CLI::Option* option : {
           add_enum(verb, "--initial", initial,
                    {{"none", KDA_INITIAL_NONE}, {"all", KDA_INITIAL_ALL}, {"flags", KDA_INITIAL_FLAGS}},
                    "where states come from (default: by the tensors that are given)"),
           add_enum(verb, "--conv-mode", conv_mode,
                    {{"prefill", KDA_CONV_PREFILL}, {"columns", KDA_CONV_COLUMNS}, {"records", KDA_CONV_RECORDS}},
                    "of conv"),
           add_enum(verb, "--conv-layout", conv_layout, {{"sd", KDA_CONV_SD}, {"ds", KDA_CONV_DS}}, "of conv pools"),
           add_enum(verb, "--conv-dtype", conv_dtype, {{"fp32", KDA_FP32}, {"bf16", KDA_BF16}, {"fp16", KDA_FP16}},
                    "of conv pools (default: io)"),
           add_enum(verb, "--out-dtype", attention.out_dtype,
                    {{"fp32", KDA_FP32}, {"bf16", KDA_BF16}, {"fp16", KDA_FP16}, {"fp64", KDA_FP64}},
                    "default: io; fp64 on the reference backend"),
           verb.add_option("--conv-parts", conv_parts, "1 (q|k|v merged) or 3"),
           verb.add_option("--null-slot", null_slot, "slot that means nobody; -1: none"),
           verb.add_option("--scale", attention.scale, "0: K^-1/2"),
           verb.add_option("--norm-eps", norm_eps, "0: 1e-5"),
           verb.add_option("--hidden", hidden, "D of residual_norm"),
           verb.add_flag("--store-final", store_final, "decode: only the last state is stored"),
           verb.add_flag("--no-norm", no_norm, "decode_step: no gated norm"),
           verb.add_flag("--no-activation", no_activation, "conv: no SiLU"),
           verb.add_flag("--no-segments", no_segments, "prefill: sequences are never split"),
           verb.add_flag("--checked", checked, "refuse bad index values instead of ignoring their rows"),
       }) {
    option->group("Form");
  }
}

void ProblemOptions::resolve() {
  if (family_->count() == 0) attention.gate_family = bound_->count() ? KDA_GATE_BOUNDED : KDA_GATE_SOFTPLUS;
  // Zero reads as "no bound" in the ABI's struct; here it was asked for, and is as wrong as any bound >= 0 (spec
  // E-3).
  if (bound_->count() != 0 && attention.lower_bound == 0)
    throw UsageError("--lower-bound: wanted a number < 0, got 0");
  if (plain_beta_) attention.beta_form = KDA_BETA_PLAIN;
  attention.allow_neg_eigval = negative_;
  attention.no_qk_norm = no_norm_;
}

const std::vector<Operator>& operators() {
  static const std::vector<Operator> list = {
      {KDA_OP_PREFILL, "prefill"},
      {KDA_OP_DECODE, "decode"},
      {KDA_OP_COMMIT, "commit"},
      {KDA_OP_DECODE_STEP, "decode_step"},
      {KDA_OP_CONV, "conv"},
      {KDA_OP_GATED_NORM, "gated_norm"},
      {KDA_OP_SEGMENT_SUMMARY, "segment_summary"},
      {KDA_OP_SEGMENT_MERGE, "segment_merge"},
      {KDA_OP_RESIDUAL_NORM, "residual_norm"},
  };
  return list;
}

std::vector<Verdict> explain(const Context& context, kda_operator op, const ProblemOptions& problem) {
  std::vector<Verdict> verdicts;
  const auto add = [](void* user, const char* candidate, const char* reasons, int32_t chosen) {
    static_cast<std::vector<Verdict>*>(user)->push_back({candidate, lines(reasons), chosen != 0});
  };
  check(with_desc(op, problem, [&](const auto& d) { return kda_explain(context.get(), op, &d, add, &verdicts); }));
  return verdicts;
}

Plan create_plan(const Context& context, kda_operator op, const ProblemOptions& problem) {
  if (op == KDA_OP_SEGMENT_SUMMARY) return Plan::segment_summary(context, prefill_desc(problem));
  return with_desc(op, problem, [&](const auto& d) { return Plan(context, d); });
}

}  // namespace kda::tools

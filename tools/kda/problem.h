// A problem described on the command line: operator, heads, dims, dtypes, gate.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <kda/kda.hpp>
#include <string>
#include <vector>

namespace kda::tools {

// Defaults: the attention of Kimi-Linear (spec L-3).
struct ProblemOptions {
  std::string backend = "auto";
  kda_attention_spec attention{};
  int64_t max_tokens = 8192, max_sequences = 256, max_checkpoints = 0;
  int32_t width = 1, conv_width = 4;
  bool records = false, fold = false, batch_invariant = false;

  // What only a run needs to say; zero = the operator's own default.
  kda_initial_state initial{};
  kda_conv_mode conv_mode = KDA_CONV_PREFILL;
  kda_conv_layout conv_layout = KDA_CONV_SD;
  kda_dtype conv_dtype{};
  int32_t conv_parts = 1;
  int64_t null_slot = -1;
  double norm_eps = 0;
  int64_t hidden = 2304;  // of residual_norm
  bool store_final = false, no_norm = false, no_activation = false, no_segments = false, checked = false;

  ProblemOptions();
  void add_to(CLI::App& verb);
  void add_form_to(CLI::App& verb);
  // Settles what one option implies for another; call after parsing. A lower bound without a family means the
  // bounded family, no bound softplus (spec L-4).
  void resolve();

 private:
  CLI::Option *family_ = nullptr, *bound_ = nullptr;
  bool plain_beta_ = false, negative_ = false, no_norm_ = false;
};

// An option that takes fp32, bf16 or fp16.
CLI::Option* add_dtype(CLI::App& verb, const std::string& name, kda_dtype& dtype, const std::string& help);

// Channels of the merged q|k|v conv, or of its three parts.
std::vector<int64_t> conv_channels(const ProblemOptions& p);
kda_conv_desc conv_desc(const ProblemOptions& p);

CLI::Option* add_gate_family(CLI::App& verb, kda_gate_family& family, const std::string& help);

struct Operator {
  kda_operator op;
  const char* name;
};
// Every operator that has candidates, in the C ABI's order.
const std::vector<Operator>& operators();

// What one candidate says to a problem.
struct Verdict {
  std::string candidate;
  std::vector<std::string> refusals;  // "gate: wanted ..., got ..."
  bool chosen = false;                // by `auto`
};
// Throws kda::Error if the problem itself is wrong.
std::vector<Verdict> explain(const Context& context, kda_operator op, const ProblemOptions& problem);

// Creates the plan that the options ask for; throws kda::Error with the refusals if there is none.
Plan create_plan(const Context& context, kda_operator op, const ProblemOptions& problem);

}  // namespace kda::tools

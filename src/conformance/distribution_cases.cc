// D1..D11 of spec N-10 in bf16 and fp32 io, at the limits of N-9.
#include "conformance/api.h"
#include "conformance/cases.h"
#include "conformance/limits.h"

namespace kda::conformance {
namespace {

// Candidates that have no plain form get the gates as fp32 raw logits; the CPU has it.
void run(int number, bool degenerate, kda_dtype io, const Setting& setting, Report& report) {
  const Problem p = distribution(number, GateForm::kPlain, io);
  PrefillOptions options;
  options.backend = setting.backend.c_str();
  options.context = setting.context;
  kda_prefill_desc desc = prefill_desc(p, options.backend);
  if (!report.accept(make_plan(desc, setting.context))) return;
  Outcome got = prefill(p, options);
  options.context = setting.other;
  Outcome again = prefill(p, options);
  const Outcome wanted = oracle(p);
  if (!report.succeeded("run", got.status, got.message)) return;
  if (!report.succeeded("second run", again.status, again.message)) return;
  if (!report.succeeded("reference", wanted.status, wanted.message)) return;
  for (Outcome* o : {&got, &again}) {
    if (setting.spoil) setting.spoil("out", o->out);
  }
  report.expect_none("out bits of the second run (N-12)", first_difference(got.out, again.out));
  report.expect_none("state bits of the second run (N-12)", first_difference(got.state, again.state));
  const kda_attention_spec& a = p.spec;
  const Limits limit = limits(io, degenerate, report.arithmetic());
  report.measure("out",
                 compare_outputs(got.out.values(), wanted.out.values(), p.lengths, a.num_value_heads, a.value_dim,
                                 absolute_floor(io)),
                 limit.out, io, got.out.size(), got.out.size());
  report.measure("state",
                 compare_states(got.state.values(), wanted.state.values(), a.num_value_heads, a.value_dim * a.key_dim,
                                absolute_floor(KDA_FP32)),
                 limit.state, KDA_FP32, got.state.size(), a.value_dim * a.key_dim);
}

}  // namespace

std::vector<Case> distribution_cases() {
  std::vector<Case> cases;
  for (const Distribution& d : kDistributions) {
    for (const kda_dtype io : {KDA_FP32, KDA_BF16}) {
      cases.push_back({KDA_OP_PREFILL, "prefill/D" + std::to_string(d.number) + ",io=" + kda_dtype_name(io),
                       io == KDA_FP32 && d.number != 9, [d, io](const Setting& setting, Report& report) {
                         run(d.number, d.degenerate, io, setting, report);
                       }});
    }
  }
  return cases;
}

}  // namespace kda::conformance

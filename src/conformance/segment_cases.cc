// Segment maps (spec S-9): summaries against the oracle's, merged states against the oracle's and against the prompt
// in one piece (S-7).
#include <algorithm>

#include "conformance/api.h"
#include "conformance/attention.h"
#include "conformance/cases.h"
#include "conformance/limits.h"
#include "conformance/random.h"
#include "conformance/tokens.h"

namespace kda::conformance {
namespace {

struct Lengths {
  const char* name;
  std::vector<int64_t> values;  // the shards of one prompt
};
const std::vector<Lengths> kLengths = {{"1", {1}},
                                       {"64", {64}},
                                       {"65+0+17", {65, 0, 17}},
                                       {"0+33+130", {0, 33, 130}},
                                       {"8x16", std::vector<int64_t>(8, 16)},
                                       {"0", {0}}};
const std::vector<Heads> kHeads = {{"1x1", 1, 1}, {"12x12", 12, 12}, {"2x4", 2, 4}};
const std::vector<Dims> kDims = {
    {"128x128", 128, 128}, {"64x64", 64, 64}, {"60x60", 60, 60}, {"7x5", 7, 5}, {"128x256", 128, 256}};

struct Choice {
  AttentionChoice attention;
  std::vector<int64_t> lengths;
  Form form;
  bool gapped;
};

std::vector<Axis> axes() {
  std::vector<Axis> list = attention_axes(kHeads, kDims);
  list.push_back({"shards", names_of(kLengths)});
  list.push_back({"form", form_names()});
  list.push_back({"summary", {"dense", "gapped"}});
  return list;
}

bool allowed(const std::vector<int>& c) {
  const int lengths = c[kAttentionAxes], form = c[kAttentionAxes + 1];
  return lengths < 0 || form < 0 || fits(static_cast<Form>(form), kLengths[static_cast<size_t>(lengths)].values);
}

Choice choice_of(const std::vector<int>& c) {
  return {attention_choice(c, 0, kHeads, kDims), kLengths[static_cast<size_t>(c[kAttentionAxes])].values,
          static_cast<Form>(c[kAttentionAxes + 1]), c[kAttentionAxes + 2] == 1};
}

// A summary per shard; the second run on the other context must have its bits.
bool summarise(const Choice& c, const Problem& p, const TokenRows& rows, const char* backend, kda_context* context,
               const Tensor& summary, Report& report) {
  kda_prefill_desc d = prefill_desc(p, backend);
  d.max_tokens = rows.total;
  d.max_sequences = rows.sequences();
  kda_segment_summary_args a = sized<kda_segment_summary_args>();
  a.k = rows.view(p.k);
  a.v = rows.view(p.v);
  a.gate = rows.view(p.gate);
  a.beta = rows.view(p.beta);
  a.A_log = p.A_log;
  a.dt_bias = p.dt_bias;
  a.sequences = rows.view();
  a.summary = summary;
  (void)c;
  kda_prefill_args example = sized<kda_prefill_args>();
  example.k = a.k, example.v = a.v, example.gate = a.gate;
  d.example = &example;
  Plan plan = make_summary_plan(d, context);
  if (std::string(backend) != "reference" && !report.accept(plan)) return false;
  return report.succeeded("summary by " + std::string(backend), plan.run(a), plan.message());
}

void run_summary(const Choice& c, const Setting& setting, Report& report) {
  const TokenRows rows = place(c.form, c.lengths, false, false);
  const Problem p = attention_problem(c.attention, rows.total, rows.begins, c.lengths);
  const int64_t N = rows.sequences(), HV = c.attention.heads.HV, K = c.attention.dims.K, V = c.attention.dims.V;
  const Shape shape = {N, HV, V + K, K};
  Shape strides = dense_strides(shape);
  if (c.gapped) strides[0] += 21;
  Tensor first(KDA_FP32, shape, strides, c.gapped ? 8 : 0), second = first, oracle(KDA_FP32, shape);
  if (!summarise(c, p, rows, setting.backend.c_str(), setting.context, first, report)) return;
  if (!summarise(c, p, rows, setting.backend.c_str(), setting.other, second, report)) return;
  if (!summarise(c, p, rows, "reference", setting.context, oracle, report)) return;
  for (Tensor* t : {&first, &second}) {
    if (setting.spoil) setting.spoil("summary", *t);
  }
  report.expect_none("summary bits of the second run (N-12)", first_difference(first, second));
  report.expect_none("summary: gaps", first.guard_report());
  report.measure("summary",
                 compare_states(first.values(), oracle.values(), HV, (V + K) * K, absolute_floor(KDA_FP32)),
                 limits(KDA_FP32, false, report.arithmetic()).state, KDA_FP32, first.size(), (V + K) * K);
}

// Every shard's start state, and the final one, from the summaries of a prompt cut into shards.
void run_merge(const Choice& c, const Setting& setting, Report& report) {
  const TokenRows rows = place(c.form, c.lengths, false, false);
  const Problem p = attention_problem(c.attention, rows.total, rows.begins, c.lengths);
  const int64_t P = rows.sequences(), HV = c.attention.heads.HV, K = c.attention.dims.K, V = c.attention.dims.V;
  Tensor summaries(KDA_FP32, {P, HV, V + K, K});
  Report unused;
  if (!summarise(c, p, rows, "reference", setting.context, summaries, unused)) {
    report.fault("summaries by the reference: " + unused.faults().front());
    return;
  }
  std::vector<double> x = uniform_vector(6, HV * V * K);
  const Tensor initial = Tensor::of(KDA_FP32, {HV, V, K}, x);
  kda_segment_merge_desc d = sized<kda_segment_merge_desc>();
  d.num_value_heads = HV;
  d.key_dim = K;
  d.value_dim = V;
  d.max_segments = P;
  struct Merged {
    Tensor start, final_state;
  };
  std::vector<int64_t> present(static_cast<size_t>(P), 1);
  if (P > 2) present[1] = 0;
  const Tensor flags = c.gapped ? Tensor::flags(present) : Tensor();
  const auto merge = [&](const char* backend, kda_context* context, Merged& m) {
    m.start = Tensor(KDA_FP32, {P, HV, V, K});
    m.final_state = Tensor(KDA_FP32, {HV, V, K});
    d.backend = backend;
    kda_segment_merge_args a = sized<kda_segment_merge_args>();
    a.initial_state = initial;
    a.summaries = summaries;
    a.present = flags;
    a.start_states = m.start;
    a.final_state = m.final_state;
    Plan plan = make_plan(d, context);
    if (std::string(backend) != "reference" && !report.accept(plan)) return false;
    return report.succeeded("merge by " + std::string(backend), plan.run(a), plan.message());
  };
  Merged first, second, oracle;
  if (!merge(setting.backend.c_str(), setting.context, first)) return;
  if (!merge(setting.backend.c_str(), setting.other, second)) return;
  if (!merge("reference", setting.context, oracle)) return;
  for (Merged* m : {&first, &second}) {
    if (setting.spoil) setting.spoil("final_state", m->final_state);
  }
  report.expect_none("start state bits of the second run (N-12)", first_difference(first.start, second.start));
  report.expect_none("final state bits of the second run (N-12)",
                     first_difference(first.final_state, second.final_state));
  const auto compare = [&](const char* what, const Tensor& got, const Tensor& wanted) {
    report.measure(what, compare_states(got.values(), wanted.values(), HV, V * K, absolute_floor(KDA_FP32)),
                   limits(KDA_FP32).state, KDA_FP32, got.size(), V * K);
  };
  compare("start_states", first.start, oracle.start);
  compare("final_state", first.final_state, oracle.final_state);
}

}  // namespace

std::vector<Case> segment_summary_cases() {
  return covering_cases(KDA_OP_SEGMENT_SUMMARY, axes(), allowed, choice_of, run_summary);
}
std::vector<Case> segment_merge_cases() {
  return covering_cases(KDA_OP_SEGMENT_MERGE, axes(), allowed, choice_of, run_merge);
}

}  // namespace kda::conformance

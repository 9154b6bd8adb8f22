// Whole layers against the fp64 layer: a prefill with rows of nobody, a mixed step, and a step with a dead row.
#include <algorithm>

#include "conformance/cases.h"
#include "conformance/layer.h"
#include "conformance/limits.h"
#include "conformance/random.h"

namespace kda::conformance {
namespace {

struct Choice {
  kda_dtype io;
  kda_gate_family family;
  kda_output_gate gate;
  int32_t width;
  bool records;
  bool grouped;  // HV = 2 H, K != V
  bool ds;       // conv layout
  bool bias;     // of the convolution
};

const std::vector<Axis> kAxes = {{"io", {"fp32", "bf16", "fp16"}}, {"gate", {"softplus", "bounded"}},
                                 {"output_gate", {"low", "full"}}, {"width", {"1", "3"}},
                                 {"mode", {"columns", "records"}}, {"heads", {"2x2", "2x4"}},
                                 {"window", {"sd", "ds"}},         {"conv_bias", {"no", "yes"}}};

Choice choice_of(const std::vector<int>& c) {
  constexpr kda_dtype kIo[] = {KDA_FP32, KDA_BF16, KDA_FP16};
  return {kIo[c[0]],
          c[1] == 0 ? KDA_GATE_SOFTPLUS : KDA_GATE_BOUNDED,
          c[2] == 0 ? KDA_OUTPUT_GATE_LOW_RANK : KDA_OUTPUT_GATE_FULL_RANK,
          c[3] == 0 ? 1 : 3,
          c[4] == 1,
          c[5] == 1,
          c[6] == 1,
          c[7] == 1};
}

kda_layer_spec spec_of(const Choice& c) {
  kda_layer_spec s{};
  s.hidden = 96;
  s.num_heads = 2;
  s.num_value_heads = c.grouped ? 4 : 2;
  s.key_dim = c.grouped ? 32 : 64;
  s.value_dim = c.grouped ? 48 : 64;
  s.gate_rank = 24;
  s.output_gate = c.gate;
  s.output_gate_rank = c.gate == KDA_OUTPUT_GATE_LOW_RANK ? 16 : 0;
  s.conv_width = 4;
  s.gate_family = c.family;
  s.lower_bound = c.family == KDA_GATE_BOUNDED ? -5 : 0;
  s.conv_bias = c.bias;
  s.norm_eps = 1e-5;
  return s;
}

constexpr int64_t kSlots = 12;

// One implementation's run of the three steps: its pools and outputs, one tensor a step.
class Run {
 public:
  Run(const Choice& c, const kda_layer_spec& s, const Setting& setting, kda_context* context, bool reference)
      : c_(c), s_(s), context_(context) {
    const char* projection = reference ? "reference" : "auto";
    backend_ = reference ? "reference" : setting.backend;
    model_ = layer_model(s, 7);
    weights_ = pack(model_, context, c.io, projection, message_);
    kda_layer_desc d = layer_desc(s, backend_.c_str(), c.io);
    d.projection = projection;
    d.max_tokens = 96;
    d.max_sequences = 3;
    d.width = c.width;
    d.mode = c.records ? KDA_DECODE_RECORDS : KDA_DECODE_COLUMNS;
    d.fold = c.records;
    d.initial_state = KDA_INITIAL_FLAGS;
    d.conv_layout = c.ds ? KDA_CONV_DS : KDA_CONV_SD;
    d.flags = KDA_PLAN_BATCH_INVARIANT;
    if (reference) d.out_dtype = d.state_dtype = KDA_FP64;
    out_dtype_ = reference ? KDA_FP64 : c.io;
    plan = Plan(kda_layer_plan_create, context, d);
    const int64_t HV = s.num_value_heads, K = s.key_dim, V = s.value_dim, rows = 2 * s.num_heads * K + HV * V;
    const int64_t L = s.conv_width - 1 + c.width - (c.records ? 0 : 1);
    state = Tensor::full(reference ? KDA_FP64 : KDA_FP32, {kSlots, HV, V, K}, 0);
    conv_ = Tensor::full(c.io, c.ds ? Shape{kSlots, rows, L} : Shape{kSlots, L, rows}, 0);
    if (!c.records) return;
    u_ = Tensor::full(KDA_FP32, {3, HV, c.width, V}, 0);
    kg_ = Tensor::full(c.io, {3, HV, c.width, 2 * K}, 0);
    count_ = Tensor::ints({0, 0, 0});
  }

  bool ready(Report& report) {
    if (!report.accept(plan)) return false;
    if (weights_ == nullptr) report.fault("weights: " + message_);
    return weights_ != nullptr;
  }

  // Rows of `hidden` by group; an empty list leaves a group out.
  struct Rows {
    std::vector<int64_t> begin, length, slots, flags, accepted, records;
  };
  bool step(const Tensor& hidden, const Rows& chunk, const Rows& recurrent, Report& report) {
    const int64_t T = hidden.shape()[0];
    Tensor out(out_dtype_, {T, s_.hidden});
    auto a = sized<kda_layer_args>();
    a.weights = weights_.get();
    a.hidden = hidden;
    const Tensor chunk_begin = Tensor::ints(chunk.begin), chunk_length = Tensor::ints(chunk.length),
                 chunk_slots = Tensor::ints(chunk.slots), flags = Tensor::flags(chunk.flags);
    if (!chunk.begin.empty()) {
      a.chunk.sequences.begin = chunk_begin;
      a.chunk.sequences.length = chunk_length;
      a.chunk.slots = chunk_slots;
      a.chunk.has_initial_state = flags;
    }
    const Tensor begin = Tensor::ints(recurrent.begin), length = Tensor::ints(recurrent.length),
                 accepted = Tensor::ints(recurrent.accepted), rows = Tensor::ints(recurrent.records);
    Tensor slots = Tensor::ints(recurrent.slots);
    const auto n = static_cast<int64_t>(recurrent.begin.size());
    if (n > 0) {
      a.recurrent.sequences.begin = begin;
      a.recurrent.sequences.length = length;
      a.recurrent.slots = c_.records || c_.width == 1 ? slots.view() : reshape(slots, {n, c_.width});
      a.recurrent.accepted = accepted;
      if (c_.records) {
        a.records = {u_, kg_, count_, rows};
      }
    }
    a.state = state;
    a.conv_state = conv_;
    a.out = out;
    const bool done = report.succeeded(backend_ + " step", run_layer(context_, plan, a, message_), message_);
    outs.push_back(std::move(out));
    return done;
  }

  Plan plan;
  Tensor state;
  std::vector<Tensor> outs;

 private:
  Choice c_;
  kda_layer_spec s_;
  kda_context* context_;
  std::string backend_, message_;
  LayerModel model_;
  WeightsHandle weights_;
  kda_dtype out_dtype_ = KDA_FP32;
  Tensor conv_, u_, kg_, count_;
};

Tensor hidden_rows(kda_dtype io, int64_t rows, int64_t D, uint32_t stream) {
  std::vector<double> x = uniform_vector(stream, rows * D);
  for (double& v : x) v *= 1.7;  // of size 1
  return Tensor::of(io, {rows, D}, x);
}

// Columns of a row: slots a, a+1, a+2; only the first in records mode.
std::vector<int64_t> columns(const Choice& c, const std::vector<int64_t>& first) {
  std::vector<int64_t> all;
  for (const int64_t slot : first) {
    for (int32_t i = 0; i < (c.records ? 1 : c.width); ++i) all.push_back(slot < 0 ? -1 : slot + i);
  }
  return all;
}

bool run_steps(const Choice& c, const kda_layer_spec& s, Run& run, Report& report) {
  const int64_t D = s.hidden, w = c.width;
  using Rows = Run::Rows;
  // Two prompts between rows of nobody.
  const Rows prompts{{2, 72}, {70, 5}, {0, 3}, {0, 0}, {}, {}};
  if (!run.step(hidden_rows(c.io, 78, D, 101), prompts, {}, report)) return false;
  // A third prompt, then both of the first decode or verify: the step's groups side by side.
  const Rows third{{0}, {20}, {6}, {0}, {}, {}};
  const Rows decode{{20, 20 + w}, {w, w}, columns(c, {0, 3}), {}, {c.records ? 0 : 1, c.records ? 0 : 1}, {0, 1}};
  if (!run.step(hidden_rows(c.io, 20 + 2 * w, D, 102), third, decode, report)) return false;
  // What was accepted differs; the row in the middle is dead.
  const Rows last{{0, w, 2 * w}, {w, w, 1}, columns(c, {0, -1, 3}), {}, {w, 1, 1}, {0, 2, 1}};
  return run.step(hidden_rows(c.io, 2 * w + 1, D, 103), {}, last, report);
}

bool zero_row(const Tensor& out, int64_t row) {
  for (int64_t i = 0; i < out.shape()[1]; ++i) {
    if (out.get({row, i}) != 0) return false;
  }
  return true;
}

void run_case(const Choice& c, const Setting& setting, Report& report) {
  const kda_layer_spec s = spec_of(c);
  kda_context* const context = setting.context != nullptr ? setting.context : cpu_context();
  Run mine(c, s, setting, context, setting.backend == "reference");
  if (!mine.ready(report) || !run_steps(c, s, mine, report)) return;
  Report none;
  Run oracle(c, s, setting, cpu_context(), true);
  if (!oracle.ready(none) || !run_steps(c, s, oracle, none)) return report.fault("the oracle's run failed");
  if (setting.other != nullptr && setting.backend != "reference") {
    Run again(c, s, setting, setting.other, false);
    if (!again.ready(none) || !run_steps(c, s, again, none)) return report.fault("the second run failed");
    for (size_t i = 0; i < mine.outs.size(); ++i) {
      report.expect_none("other threads, step " + std::to_string(i), first_difference(mine.outs[i], again.outs[i]));
    }
  }
  const double limit = c.io == KDA_FP32 ? 1e-5 : 1e-2;
  for (size_t i = 0; i < mine.outs.size(); ++i) {
    if (setting.spoil) setting.spoil("out", mine.outs[i]);
    report.measure("out of step " + std::to_string(i),
                   compare_flat(mine.outs[i].values(), oracle.outs[i].values(), absolute_floor(c.io)), limit, c.io,
                   mine.outs[i].size(), mine.outs[i].size());
  }
  for (const int64_t row : {0, 1, 77}) {
    if (!zero_row(mine.outs[0], row)) report.fault("row " + std::to_string(row) + " of nobody: not zero");
  }
  if (!zero_row(mine.outs[2], c.width)) report.fault("row of a dead slot: not zero");
  for (const int64_t slot : {0, 3, 6}) {
    report.measure("state of slot " + std::to_string(slot),
                   compare_states(values(narrow(mine.state, 0, slot, 1)), values(narrow(oracle.state, 0, slot, 1)),
                                  s.num_value_heads, s.key_dim * s.value_dim),
                   limit, KDA_FP32, mine.state.size() / kSlots, s.key_dim * s.value_dim);
  }
}

}  // namespace

std::vector<Case> layer_cases() {
  return covering_cases(
      KDA_OP_LAYER, kAxes, [](const std::vector<int>&) { return true; }, choice_of, run_case, 4);
}

}  // namespace kda::conformance

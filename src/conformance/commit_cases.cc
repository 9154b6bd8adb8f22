// Commit of recover mode (spec V-10, W-4): records of an earlier verify replayed into states and windows.
#include <algorithm>

#include "conformance/api.h"
#include "conformance/attention.h"
#include "conformance/cases.h"
#include "conformance/limits.h"
#include "conformance/pools.h"
#include "conformance/records.h"
#include "conformance/windows.h"

namespace kda::conformance {
namespace {

const std::vector<Heads> kHeads = {{"1x1", 1, 1}, {"12x12", 12, 12}, {"32x32", 32, 32}, {"6x12", 6, 12}};
const std::vector<Dims> kDims = {{"128x128", 128, 128}, {"60x60", 60, 60}, {"7x5", 7, 5}, {"256x33", 256, 33}};
constexpr int32_t kWidths[] = {1, 2, 4, 8, 16};
constexpr int32_t kTaps[] = {0, 2, 4, 5};

struct Choice {
  AttentionChoice attention;
  RowChoice rows;
  int32_t taps;  // 0: no conv pools
  bool merged, ds, fp32_window, record_rows;
  kda_dtype pool;
};

// The attention axes that a commit can see: no token tensors come with it.
std::vector<Axis> axes() {
  std::vector<Axis> list = attention_axes(kHeads, kDims);
  list.push_back({"rows", row_patterns()});
  list.push_back({"width", {"1", "2", "4", "8", "16"}});
  list.push_back({"slots", slots_names()});
  list.push_back({"accepted", accepted_names()});
  list.push_back({"taps", {"none", "2", "4", "5"}});
  list.push_back({"parts", {"merged", "three"}});
  list.push_back({"window", {"SD", "DS"}});
  list.push_back({"window_dtype", {"io", "fp32"}});
  list.push_back({"pool", {"fp32", "bf16", "fp16"}});
  list.push_back({"index", {"int32", "int64"}});
  list.push_back({"record_rows", {"slot", "given"}});
  return list;
}
enum : size_t {
  kRowsAxis = kAttentionAxes,
  kWidthAxis,
  kSlotsAxis,
  kAcceptedAxis,
  kTapsAxis,
  kPartsAxis,
  kWindowAxis,
  kWindowDtypeAxis,
  kPoolAxis,
  kIndexAxis,
  kRecordRowsAxis
};
constexpr size_t kBetaAxis = 7, kLayoutAxis = 9;

bool allowed(const std::vector<int>& c) {
  const auto is = [&](size_t axis, Slots s) { return c[axis] == static_cast<int>(s); };
  // Always by slots, in place, with counts; beta and layouts concern tokens only.
  if (is(kSlotsAxis, Slots::kPacked) || is(kSlotsAxis, Slots::kApart)) return false;
  if (c[kAcceptedAxis] == static_cast<int>(Accepted::kAbsent) || c[kBetaAxis] > 0 || c[kLayoutAxis] > 0) return false;
  if (c[kTapsAxis] == 0 && (c[kPartsAxis] > 0 || c[kWindowAxis] > 0 || c[kWindowDtypeAxis] > 0)) return false;
  if (c[0] < 0 || c[1] < 0 || c[kRowsAxis] < 0) return true;
  const Heads& h = kHeads[static_cast<size_t>(c[0])];
  const Dims& d = kDims[static_cast<size_t>(c[1])];
  const int64_t rows = std::max(1, std::atoi(row_patterns()[static_cast<size_t>(c[kRowsAxis])].c_str()));
  return rows * h.HV * d.K * d.V <= int64_t{1} << 21;
}

Choice choice_of(const std::vector<int>& c) {
  constexpr kda_dtype kPools[] = {KDA_FP32, KDA_BF16, KDA_FP16};
  const auto at = [&](size_t axis) { return static_cast<size_t>(c[axis]); };
  Choice x;
  x.attention = attention_choice(c, 0, kHeads, kDims);
  x.rows.pattern = row_patterns()[at(kRowsAxis)];
  x.rows.width = kWidths[at(kWidthAxis)];
  x.rows.slots = static_cast<Slots>(at(kSlotsAxis));
  x.rows.accepted = static_cast<Accepted>(at(kAcceptedAxis));
  x.rows.wide_index = c[kIndexAxis] == 1;
  x.taps = kTaps[at(kTapsAxis)];
  x.merged = c[kPartsAxis] == 0;
  x.ds = c[kWindowAxis] == 1;
  x.fp32_window = c[kWindowDtypeAxis] == 1;
  x.pool = kPools[at(kPoolAxis)];
  x.record_rows = c[kRecordRowsAxis] == 1;
  return x;
}

struct Call {
  kda_commit_desc desc;
  kda_commit_args args;
  RecordsMade made;
  Tensor active;
  WindowPools windows;
};

void bind(const Problem& p, Call& call) {
  kda_commit_args& a = call.args = sized<kda_commit_args>();
  a.A_log = p.A_log;
  a.dt_bias = p.dt_bias;
  a.state = call.made.pool;
  a.slots = call.made.tables.slots;
  a.accepted = call.made.tables.accepted;
  a.num_active = call.active;
  a.records = call.made.records.view();
  for (size_t i = 0; i < call.windows.parts.size(); ++i) a.conv_state[i] = call.windows.view(i);
}

Call make_call(const Choice& c, const Problem& p, int64_t rows) {
  Call call;
  call.made = make_rows(c.attention, c.rows, rows, 1, c.pool, true, true, c.record_rows);
  kda_commit_desc& d = call.desc;
  kda_commit_desc_init(&d);
  d.attention = p.spec;
  d.attention.state_dtype = c.pool;
  d.max_sequences = rows;
  d.width = c.rows.width;
  d.null_slot = call.made.tables.null_slot;
  if (c.rows.slots == Slots::kActive) call.active = Tensor::ints({std::max<int64_t>(rows - 1, 0)});
  if (c.taps == 0) return call;
  d.conv_width = c.taps;
  d.conv_parts = c.merged ? 1 : 3;
  d.conv_layout = c.ds ? KDA_CONV_DS : KDA_CONV_SD;
  d.conv_dtype = c.fp32_window ? KDA_FP32 : c.attention.io;
  const int64_t qk = c.attention.heads.H * c.attention.dims.K, v = c.attention.heads.HV * c.attention.dims.V;
  const std::vector<int64_t> channels = c.merged ? std::vector<int64_t>{2 * qk + v} : std::vector<int64_t>{qk, qk, v};
  call.windows = make_windows(d.conv_layout, channels, call.made.tables.slots_in_pool, c.taps - 1 + c.rows.width,
                              d.conv_dtype, c.rows.slots == Slots::kGapped);
  return call;
}

void run(const Choice& c, const Setting& setting, Report& report) {
  const auto rows = static_cast<int64_t>(row_lengths(c.rows).size());
  const Problem p = attention_problem(c.attention, 0, {}, {});
  const Call before = make_call(c, p, rows);
  Call first = before, second = before, oracle = before;
  oracle.desc.backend = "reference";
  oracle.desc.attention.state_dtype = KDA_FP64;
  oracle.made.pool = before.made.pool.copy(KDA_FP64);
  const Tensor oracle_before = oracle.made.pool;
  for (Call* call : {&first, &second, &oracle}) bind(p, *call);
  first.desc.backend = second.desc.backend = setting.backend.c_str();
  Plan plan = make_plan(first.desc, setting.context), again = make_plan(second.desc, setting.other);
  Plan reference = make_plan(oracle.desc, setting.context);
  if (!report.accept(plan)) return;
  if (!report.succeeded("run", plan.run(first.args), plan.message())) return;
  if (!report.succeeded("second run", again.run(second.args), again.message())) return;
  if (!report.succeeded("reference", reference.run(oracle.args), reference.message())) return;
  for (Call* call : {&first, &second}) {
    if (setting.spoil) setting.spoil("state", call->made.pool);
  }
  report.expect_none("pool bits of the second run (N-12)", first_difference(first.made.pool, second.made.pool));
  check_states(report, "state", {before.made.pool, first.made.pool, oracle_before, oracle.made.pool},
               c.attention.heads.HV, c.attention.dims.V * c.attention.dims.K,
               limits(KDA_FP32).state + pool_rounding(c.pool));
  report.expect_none("records.count", first_difference(first.made.records.count, oracle.made.records.count));
  report.expect_none("records.u", Snapshot(before.made.records.u).changes_outside(first.made.records.u));
  report.expect_none("records.kg", Snapshot(before.made.records.kg).changes_outside(first.made.records.kg));
  const std::vector<int64_t> columns(static_cast<size_t>(before.made.tables.slots_in_pool), std::max(c.taps - 1, 0));
  check_windows(report, "window", before.windows, first.windows, oracle.windows, columns);
}

}  // namespace

std::vector<Case> commit_cases() { return covering_cases(KDA_OP_COMMIT, axes(), allowed, choice_of, run); }

}  // namespace kda::conformance

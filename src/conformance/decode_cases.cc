// Decode and verify: columns, final store and recover mode with and without folded commit (spec V), as a pairwise
// covering over everything a call can vary; checks as for prefill.
#include <algorithm>

#include "conformance/api.h"
#include "conformance/attention.h"
#include "conformance/cases.h"
#include "conformance/decode_rows.h"
#include "conformance/limits.h"
#include "conformance/pools.h"
#include "conformance/random.h"
#include "conformance/records.h"
#include "conformance/tokens.h"

namespace kda::conformance {
namespace {

const std::vector<Heads> kHeads = {{"1x1", 1, 1},     {"12x12", 12, 12}, {"32x32", 32, 32},
                                   {"96x96", 96, 96}, {"6x12", 6, 12},   {"3x12", 3, 12}};
const std::vector<Dims> kDims = {{"128x128", 128, 128}, {"64x64", 64, 64},     {"128x256", 128, 256},
                                 {"60x60", 60, 60},     {"100x100", 100, 100}, {"7x5", 7, 5},
                                 {"256x33", 256, 33},   {"48x512", 48, 512}};
constexpr int32_t kWidths[] = {1, 2, 3, 5, 8, 16};

enum Mode { kColumns, kFinal, kRecords, kFold };

struct Choice {
  AttentionChoice attention;
  RowChoice rows;
  Mode mode;
  Form form;
  bool flags, out_rows, record_rows, invariant;
  kda_dtype pool;

  bool records() const { return mode >= kRecords; }
  int64_t columns() const { return mode == kColumns ? rows.width : 1; }
};

std::vector<Axis> axes() {
  std::vector<Axis> list = attention_axes(kHeads, kDims);
  list.push_back({"rows", row_patterns()});
  list.push_back({"width", {"1", "2", "3", "5", "8", "16"}});
  list.push_back({"mode", {"columns", "final", "records", "fold"}});
  list.push_back({"form", form_names()});
  list.push_back({"slots", slots_names()});
  list.push_back({"accepted", accepted_names()});
  list.push_back({"initial", {"all", "flags"}});
  list.push_back({"pool", {"fp32", "bf16", "fp16"}});
  list.push_back({"index", {"int32", "int64"}});
  list.push_back({"out", {"direct", "rows"}});
  list.push_back({"record_rows", {"slot", "given"}});
  list.push_back({"invariant", {"off", "on"}});
  return list;
}
enum : size_t {
  kRowsAxis = kAttentionAxes,
  kWidthAxis,
  kModeAxis,
  kFormAxis,
  kSlotsAxis,
  kAcceptedAxis,
  kInitialAxis,
  kPoolAxis,
  kIndexAxis,
  kOutAxis,
  kRecordRowsAxis
};

// Combinations that the ABI refuses, and a bound on memory and work.
bool allowed(const std::vector<int>& c) {
  const auto is = [&](size_t axis, int value) { return c[axis] == value; };
  const auto chosen = [&](size_t axis) { return c[axis] >= 0; };
  const int packed = static_cast<int>(Slots::kPacked), batched = static_cast<int>(Form::kBatched);
  const bool records = is(kModeAxis, kRecords) || is(kModeAxis, kFold);
  if (records && (is(kInitialAxis, 1) || is(kSlotsAxis, static_cast<int>(Slots::kApart)))) return false;
  if (chosen(kModeAxis) && !records && is(kRecordRowsAxis, 1)) return false;
  if (is(kModeAxis, kFold) && is(kAcceptedAxis, static_cast<int>(Accepted::kAbsent))) return false;
  if (is(kSlotsAxis, packed) && is(kModeAxis, kColumns) && c[kWidthAxis] > 0) return false;
  if (is(kFormAxis, batched) && (is(kSlotsAxis, static_cast<int>(Slots::kActive)) || is(kOutAxis, 1))) return false;
  if (!chosen(kRowsAxis) || !chosen(kWidthAxis)) return true;
  RowChoice rows;
  rows.pattern = row_patterns()[static_cast<size_t>(c[kRowsAxis])];
  rows.width = kWidths[c[kWidthAxis]];
  const std::vector<int64_t> lengths = row_lengths(rows);
  if (chosen(kFormAxis) && !fits(static_cast<Form>(c[kFormAxis]), lengths)) return false;
  const int64_t HV = chosen(0) ? kHeads[static_cast<size_t>(c[0])].HV : 1;
  const int64_t KV = chosen(1) ? kDims[static_cast<size_t>(c[1])].K * kDims[static_cast<size_t>(c[1])].V : 1;
  const int64_t states = static_cast<int64_t>(lengths.size()) * (is(kModeAxis, kColumns) ? rows.width : 1);
  return states * HV * KV <= int64_t{3} << 20 && rows.width * HV * KV <= int64_t{3} << 20;
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
  x.rows.wide_index = at(kIndexAxis) == 1;
  x.mode = static_cast<Mode>(at(kModeAxis));
  x.form = static_cast<Form>(at(kFormAxis));
  x.flags = at(kInitialAxis) == 1;
  x.pool = kPools[at(kPoolAxis)];
  x.out_rows = at(kOutAxis) == 1;
  x.record_rows = at(kRecordRowsAxis) == 1;
  x.invariant = c[kRecordRowsAxis + 1] == 1;
  return x;
}

struct Call {
  kda_decode_desc desc;
  kda_decode_args args;
  RowTables tables;
  Tensor flags, out_rows, pool, out;
  Records records;
};

Call make_call(const Choice& c, const Problem& p, const TokenRows& rows, const RecordsMade& made) {
  Call call;
  call.desc = decode_desc(p, "auto", c.rows.width);
  kda_decode_desc& d = call.desc;
  d.attention.state_dtype = c.pool;
  d.max_tokens = rows.total;
  d.max_sequences = rows.sequences();
  d.mode = c.records() ? KDA_DECODE_RECORDS : KDA_DECODE_COLUMNS;
  d.fold = c.mode == kFold;
  d.store = c.mode == kFinal ? KDA_STORE_FINAL : KDA_STORE_PER_TOKEN;
  d.initial_state = c.flags ? KDA_INITIAL_FLAGS : KDA_INITIAL_ALL;
  d.flags = c.invariant ? KDA_PLAN_BATCH_INVARIANT : 0;
  call.tables = made.tables;
  d.null_slot = call.tables.null_slot;
  call.pool = made.pool;
  call.records = made.records;
  const int64_t HV = c.attention.heads.HV;
  if (c.flags) {
    std::vector<int64_t> flags;
    for (int64_t n = 0; n < rows.sequences(); ++n) flags.push_back(n % 3 != 0);
    call.flags = Tensor::flags(flags);
  }
  call.out = out_buffer(c.attention.io, rows.total, HV, c.attention.dims.V, c.attention.layout != Layout::kDense);
  if (c.out_rows) call.out_rows = reversed_rows(rows.total, c.rows.wide_index ? KDA_INT64 : KDA_INT32);
  return call;
}

void bind(const Problem& p, const TokenRows& rows, Call& call) {
  kda_decode_args& a = call.args = decode_args(p);
  a.q = rows.view(p.q);
  a.k = rows.view(p.k);
  a.v = rows.view(p.v);
  a.gate = rows.view(p.gate);
  a.beta = rows.view(p.beta);
  a.out = rows.view(call.out);
  a.sequences = rows.view();
  a.state = call.pool;
  a.slots = call.tables.slots;
  a.write_slots = call.tables.write_slots;
  a.accepted = call.tables.accepted;
  a.has_initial_state = call.flags;
  a.records = call.records.view();
  a.out_rows = call.out_rows;
}

// The oracle's pool is fp64, but a folded commit goes on from the state as the pool stored it (V-10b): there it has
// the pool's own dtype.
Call oracle_call(const Choice& c, const Call& call) {
  Call o = call;
  o.desc.backend = "reference";
  o.desc.flags = 0;
  o.desc.attention.out_dtype = KDA_FP64;
  o.out = Tensor(KDA_FP64, call.out.shape());
  if (c.mode == kFold) return o;
  o.desc.attention.state_dtype = KDA_FP64;
  o.pool = call.pool.copy(KDA_FP64);
  return o;
}

void run(const Choice& c, const Setting& setting, Report& report) {
  const std::vector<int64_t> lengths = row_lengths(c.rows);
  const TokenRows rows = place(c.form, lengths, c.rows.wide_index, c.rows.slots == Slots::kActive);
  const Problem p = attention_problem(c.attention, rows.total, rows.begins, lengths);
  const RecordsMade made = make_rows(c.attention, c.rows, rows.sequences(), c.columns(), c.pool, c.records(),
                                     c.mode == kFold, c.record_rows);
  const Call before = make_call(c, p, rows, made);
  Call first = before, second = before, oracle = oracle_call(c, before);
  const Call oracle_before = oracle;
  for (Call* call : {&first, &second, &oracle}) bind(p, rows, *call);
  first.desc.backend = second.desc.backend = setting.backend.c_str();
  Plan plan = make_plan(first.desc, setting.context), again = make_plan(second.desc, setting.other);
  Plan reference = make_plan(oracle.desc, setting.context);
  if (!report.accept(plan)) return;
  if (!report.succeeded("run", plan.run(first.args), plan.message())) return;
  if (!report.succeeded("second run", again.run(second.args), again.message())) return;
  if (!report.succeeded("reference", reference.run(oracle.args), reference.message())) return;
  for (Call* call : {&first, &second}) {
    if (setting.spoil) setting.spoil("out", call->out);
  }
  report.expect_none("out bits of the second run (N-12)", first_difference(first.out, second.out));
  report.expect_none("pool bits of the second run (N-12)", first_difference(first.pool, second.pool));
  const AttentionChoice& a = c.attention;
  const Limits limit = limits(a.io);
  // A folded commit is a store within the call (N-9's last row).
  const double folded = c.mode == kFold ? pool_rounding(c.pool) : 0;
  check_out(report, "out", rows, first.out_rows, before.out, first.out, oracle.out, limit.out + folded);
  check_states(report, "state", {before.pool, first.pool, oracle_before.pool, oracle.pool}, a.heads.HV,
               a.dims.V * a.dims.K, limit.state + pool_rounding(c.pool));
  if (c.records())
    check_records(report, before.records, first.records, oracle.records, limits(KDA_FP32).state + folded);
}

}  // namespace

std::vector<Case> decode_cases() { return covering_cases(KDA_OP_DECODE, axes(), allowed, choice_of, run); }

}  // namespace kda::conformance

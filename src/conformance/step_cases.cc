// decode_step (spec V-15): against the oracle's chain at the limits of chained runs, and against the same backend's
// own conv -> decode -> gated norm, bit for bit (L-8).
#include <algorithm>
#include <cmath>

#include "conformance/api.h"
#include "conformance/attention.h"
#include "conformance/cases.h"
#include "conformance/decode_rows.h"
#include "conformance/limits.h"
#include "conformance/pools.h"
#include "conformance/random.h"
#include "conformance/records.h"
#include "conformance/tokens.h"
#include "conformance/windows.h"

namespace kda::conformance {
namespace {

const std::vector<Heads> kHeads = {{"2x2", 2, 2}, {"12x12", 12, 12}, {"6x12", 6, 12}, {"1x4", 1, 4}};
const std::vector<Dims> kDims = {{"128x128", 128, 128}, {"64x64", 64, 64}, {"60x60", 60, 60}, {"32x200", 32, 200}};
constexpr int32_t kWidths[] = {1, 2, 4, 8};
constexpr int32_t kTaps[] = {4, 2, 5};

enum Mode { kColumns, kFinal, kRecords, kFold };

struct Choice {
  AttentionChoice attention;
  RowChoice rows;
  Mode mode;
  Form form;
  int32_t taps;
  bool merged, ds, fp32_window, no_norm, flags, out_rows, record_rows, invariant;
  kda_dtype pool;

  bool records() const { return mode >= kRecords; }
  int64_t columns() const { return mode == kColumns ? rows.width : 1; }
  std::vector<int64_t> channels() const {
    const int64_t qk = attention.heads.H * attention.dims.K, v = attention.heads.HV * attention.dims.V;
    return merged ? std::vector<int64_t>{2 * qk + v} : std::vector<int64_t>{qk, qk, v};
  }
};

std::vector<Axis> axes() {
  std::vector<Axis> list = attention_axes(kHeads, kDims);
  list.push_back({"rows", row_patterns()});
  list.push_back({"width", {"1", "2", "4", "8"}});
  list.push_back({"mode", {"columns", "final", "records", "fold"}});
  list.push_back({"form", form_names()});
  list.push_back({"slots", slots_names()});
  list.push_back({"accepted", accepted_names()});
  list.push_back({"initial", {"all", "flags"}});
  list.push_back({"pool", {"fp32", "bf16", "fp16"}});
  list.push_back({"index", {"int32", "int64"}});
  list.push_back({"out", {"direct", "rows"}});
  list.push_back({"record_rows", {"slot", "given"}});
  list.push_back({"taps", {"4", "2", "5"}});
  list.push_back({"parts", {"merged", "three"}});
  list.push_back({"window", {"SD", "DS"}});
  list.push_back({"window_dtype", {"io", "fp32"}});
  list.push_back({"norm", {"gated", "none"}});
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
  kRecordRowsAxis,
  kTapsAxis,
  kPartsAxis,
  kWindowAxis,
  kWindowDtypeAxis,
  kNormAxis,
  kInvariantAxis
};

bool allowed(const std::vector<int>& c) {
  const auto is = [&](size_t axis, int value) { return c[axis] == value; };
  const int batched = static_cast<int>(Form::kBatched), active = static_cast<int>(Slots::kActive);
  const bool records = c[kModeAxis] >= kRecords;
  if (records && (is(kInitialAxis, 1) || is(kSlotsAxis, static_cast<int>(Slots::kApart)))) return false;
  if (c[kModeAxis] >= 0 && !records && is(kRecordRowsAxis, 1)) return false;
  if (is(kModeAxis, kFold) && is(kAcceptedAxis, static_cast<int>(Accepted::kAbsent))) return false;
  if (is(kSlotsAxis, static_cast<int>(Slots::kPacked)) && is(kModeAxis, kColumns) && c[kWidthAxis] > 0) return false;
  if (is(kFormAxis, batched) && (is(kSlotsAxis, active) || is(kOutAxis, 1))) return false;
  if (c[kRowsAxis] < 0 || c[kWidthAxis] < 0) return true;
  RowChoice rows;
  rows.pattern = row_patterns()[static_cast<size_t>(c[kRowsAxis])];
  rows.width = kWidths[c[kWidthAxis]];
  const std::vector<int64_t> lengths = row_lengths(rows);
  if (c[kFormAxis] >= 0 && !fits(static_cast<Form>(c[kFormAxis]), lengths)) return false;
  const int64_t HV = c[0] >= 0 ? kHeads[static_cast<size_t>(c[0])].HV : 1;
  const int64_t KV = c[1] >= 0 ? kDims[static_cast<size_t>(c[1])].K * kDims[static_cast<size_t>(c[1])].V : 1;
  const int64_t states = static_cast<int64_t>(lengths.size()) * (is(kModeAxis, kColumns) ? rows.width : 1);
  return states * HV * KV <= int64_t{1} << 21;
}

Choice choice_of(const std::vector<int>& c) {
  constexpr kda_dtype kPools[] = {KDA_FP32, KDA_BF16, KDA_FP16};
  const auto at = [&](size_t axis) { return static_cast<size_t>(c[axis]); };
  const auto on = [&](size_t axis) { return c[axis] == 1; };
  Choice x;
  x.attention = attention_choice(c, 0, kHeads, kDims);
  x.rows.pattern = row_patterns()[at(kRowsAxis)];
  x.rows.width = kWidths[at(kWidthAxis)];
  x.rows.slots = static_cast<Slots>(at(kSlotsAxis));
  x.rows.accepted = static_cast<Accepted>(at(kAcceptedAxis));
  x.rows.wide_index = on(kIndexAxis);
  x.mode = static_cast<Mode>(at(kModeAxis));
  x.form = static_cast<Form>(at(kFormAxis));
  x.flags = on(kInitialAxis);
  x.pool = kPools[at(kPoolAxis)];
  x.out_rows = on(kOutAxis);
  x.record_rows = on(kRecordRowsAxis);
  x.taps = kTaps[at(kTapsAxis)];
  x.merged = !on(kPartsAxis);
  x.ds = on(kWindowAxis);
  x.fp32_window = on(kWindowDtypeAxis);
  x.no_norm = on(kNormAxis);
  x.invariant = on(kInvariantAxis);
  return x;
}

struct Inputs {
  Problem p;  // gate, beta and their parameters; q, k, v are not used
  std::vector<Tensor> x, weight;
  Tensor z, norm_weight;
};

// Positive on the whole, so that q.k of a fresh row does not cancel; the norm after it would show that as error.
std::vector<double> leaning(uint32_t stream, int64_t count) {
  std::vector<double> x = uniform_vector(stream, count);
  for (double& v : x) v = 0.6 * v + 0.4;
  return x;
}

Inputs make_inputs(const Choice& c, const TokenRows& rows) {
  Inputs in;
  in.p = attention_problem(c.attention, rows.total, rows.begins, rows.lengths);
  const kda_dtype io = c.attention.io;
  const std::vector<int64_t> channels = c.channels();
  const int64_t gap = c.attention.layout == Layout::kDense ? 0 : 9;
  for (size_t i = 0; i < channels.size(); ++i) {
    const int64_t C = channels[i];
    Tensor x(io, {rows.total, C}, {C + gap, 1}, gap / 3);
    x.assign(leaning(static_cast<uint32_t>(40 + i), x.size()));
    in.x.push_back(std::move(x));
    in.weight.push_back(Tensor::of(KDA_FP32, {C, c.taps}, leaning(static_cast<uint32_t>(50 + i), C * c.taps)));
  }
  if (c.no_norm) return in;
  const int64_t HV = c.attention.heads.HV, V = c.attention.dims.V;
  in.z = Tensor::of(io, {rows.total, HV, V}, uniform_vector(60, rows.total * HV * V));
  in.norm_weight = Tensor::of(KDA_FP32, {V}, uniform_vector(61, V));
  return in;
}

struct Call {
  kda_decode_step_desc desc;
  kda_decode_step_args args;
  RowTables tables;
  Tensor flags, out_rows, pool, out;
  Records records;
  WindowPools windows;
};

Call make_call(const Choice& c, const Inputs& in, const TokenRows& rows, const RecordsMade& made) {
  Call call;
  kda_decode_step_desc& d = call.desc;
  kda_decode_step_desc_init(&d);
  d.decode = decode_desc(in.p, "auto", c.rows.width);
  d.decode.attention.state_dtype = c.pool;
  d.decode.max_tokens = rows.total;
  d.decode.max_sequences = rows.sequences();
  d.decode.mode = c.records() ? KDA_DECODE_RECORDS : KDA_DECODE_COLUMNS;
  d.decode.fold = c.mode == kFold;
  d.decode.store = c.mode == kFinal ? KDA_STORE_FINAL : KDA_STORE_PER_TOKEN;
  d.decode.initial_state = c.flags ? KDA_INITIAL_FLAGS : KDA_INITIAL_ALL;
  d.decode.flags = c.invariant ? KDA_PLAN_BATCH_INVARIANT : 0;
  d.decode.null_slot = made.tables.null_slot;
  d.conv_width = c.taps;
  d.conv_parts = c.merged ? 1 : 3;
  d.conv_layout = c.ds ? KDA_CONV_DS : KDA_CONV_SD;
  d.conv_dtype = c.fp32_window ? KDA_FP32 : c.attention.io;
  d.no_norm = c.no_norm;
  call.tables = made.tables;
  call.pool = made.pool;
  call.records = made.records;
  call.windows =
      make_windows(d.conv_layout, c.channels(), made.tables.slots_in_pool,
                   c.taps - 1 + c.rows.width - (c.records() ? 0 : 1), d.conv_dtype, c.rows.slots == Slots::kGapped);
  if (c.flags) {
    std::vector<int64_t> flags;
    for (int64_t n = 0; n < rows.sequences(); ++n) flags.push_back(n % 3 != 0);
    call.flags = Tensor::flags(flags);
  }
  const AttentionChoice& a = c.attention;
  call.out = out_buffer(a.io, rows.total, a.heads.HV, a.dims.V, a.layout != Layout::kDense);
  if (c.out_rows) call.out_rows = reversed_rows(rows.total, c.rows.wide_index ? KDA_INT64 : KDA_INT32);
  return call;
}

// What decode_step and the chain's decode have in common.
kda_decode_args decode_part(const Inputs& in, const TokenRows& rows, const Call& call) {
  kda_decode_args d = decode_args(in.p);
  d.q = d.k = d.v = kda_tensor{};
  d.gate = rows.view(in.p.gate);
  d.beta = rows.view(in.p.beta);
  d.sequences = rows.view();
  d.state = call.pool;
  d.slots = call.tables.slots;
  d.write_slots = call.tables.write_slots;
  d.accepted = call.tables.accepted;
  d.has_initial_state = call.flags;
  d.records = call.records.view();
  return d;
}

void bind(const Inputs& in, const TokenRows& rows, Call& call) {
  kda_decode_step_args& a = call.args = sized<kda_decode_step_args>();
  a.decode = decode_part(in, rows, call);
  a.decode.out = rows.view(call.out);
  a.decode.out_rows = call.out_rows;
  for (size_t i = 0; i < in.x.size(); ++i) {
    a.x[i] = rows.view(in.x[i]);
    a.conv_weight[i] = in.weight[i];
    a.conv_state[i] = call.windows.view(i);
  }
  if (in.z.present()) a.z = rows.view(in.z);
  a.norm_weight = in.norm_weight;
}

// The same step by the backend's three operators; `call` receives pools, records and windows, `out` rows in place.
bool run_chain(const Choice& c, const Inputs& in, const TokenRows& rows, const Setting& setting, Call& call,
               Tensor& out, Report& report) {
  const AttentionChoice& a = c.attention;
  const int64_t H = a.heads.H, HV = a.heads.HV, K = a.dims.K, V = a.dims.V, qk = H * K;
  kda_conv_desc conv;
  kda_conv_desc_init(&conv);
  conv.backend = setting.backend.c_str();
  conv.mode = c.records() ? KDA_CONV_RECORDS : KDA_CONV_COLUMNS;
  conv.width = c.taps;
  conv.parts = call.desc.conv_parts;
  const std::vector<int64_t> channels = c.channels();
  std::copy(channels.begin(), channels.end(), conv.channels);
  conv.io_dtype = a.io;
  conv.state_dtype = call.desc.conv_dtype;
  conv.layout = call.desc.conv_layout;
  conv.verify_width = c.rows.width;
  conv.fold = c.mode == kFold;
  conv.max_tokens = rows.total;
  conv.max_sequences = rows.sequences();
  conv.initial_state = call.desc.decode.initial_state;
  conv.null_slot = call.desc.decode.null_slot;
  // q|k|v of a token in one row, whether it comes in one part or three.
  const Tensor qkv(a.io, {rows.total, 2 * qk + HV * V});
  kda_conv_args ca = sized<kda_conv_args>();
  for (size_t i = 0, first = 0; i < channels.size(); first += static_cast<size_t>(channels[i]), ++i) {
    ca.x[i] = rows.view(in.x[i]);
    ca.weight[i] = in.weight[i];
    ca.state[i] = call.windows.view(i);
    const kda_tensor all = rows.view(qkv);
    ca.out[i] = narrow(all, all.rank - 1, static_cast<int64_t>(first), channels[i]);
  }
  ca.sequences = rows.view();
  ca.slots = call.tables.slots;
  ca.write_slots = call.tables.write_slots;
  ca.has_initial_state = call.flags;
  ca.accepted = call.tables.accepted;
  if (c.mode == kFold) ca.record_count = call.records.count;
  if (c.mode == kFold) ca.record_rows = call.records.record_rows;
  Plan conv_plan = make_plan(conv, setting.context);
  if (!report.succeeded("chain: conv", conv_plan.run(ca), conv_plan.message())) return false;

  kda_decode_desc d = call.desc.decode;
  d.backend = setting.backend.c_str();
  kda_decode_args da = decode_part(in, rows, call);
  const auto heads = [&](int64_t first, int64_t count, int64_t dim) {
    kda_tensor t = narrow(rows.view(qkv), rows.view(qkv).rank - 1, first, count * dim);
    t.shape[t.rank] = dim;
    t.strides[t.rank] = 1;
    t.shape[t.rank - 1] = count;
    t.strides[t.rank - 1] = dim;
    ++t.rank;
    return t;
  };
  da.q = heads(0, H, K);
  da.k = heads(qk, H, K);
  da.v = heads(2 * qk, HV, V);
  Tensor o = c.no_norm ? out : Tensor(a.io, {rows.total, HV, V});
  da.out = rows.view(o);
  Plan decode_plan = make_plan(d, setting.context);
  if (!report.succeeded("chain: decode", decode_plan.run(da), decode_plan.message())) return false;
  if (c.no_norm) {
    out = std::move(o);
    return true;
  }
  kda_gated_norm_desc nd = sized<kda_gated_norm_desc>();
  nd.backend = setting.backend.c_str();
  nd.num_value_heads = HV;
  nd.value_dim = V;
  nd.io_dtype = a.io;
  nd.max_tokens = rows.total;
  kda_gated_norm_args na = sized<kda_gated_norm_args>();
  na.o = o;
  na.z = in.z;
  na.weight = in.norm_weight;
  na.out = out;
  Plan norm_plan = make_plan(nd, setting.context);
  return report.succeeded("chain: gated norm", norm_plan.run(na), norm_plan.message());
}

// A long row's window has no operator of its own (store = final), so that mode has no chain to compare with.
void check_chain(const Choice& c, const Inputs& in, const TokenRows& rows, const Setting& setting, const Call& before,
                 const Call& fused, Report& report) {
  if (c.mode == kFinal) return;
  Call chain = before;
  const AttentionChoice& a = c.attention;
  Tensor out(a.io, {rows.total, a.heads.HV, a.dims.V});
  if (!run_chain(c, in, rows, setting, chain, out, report)) return;
  for (size_t n = 0; n < rows.lengths.size(); ++n) {
    if (rows.active.present() && static_cast<double>(n) >= rows.active.get({0})) continue;
    for (int64_t r = rows.begins[n]; r < rows.begins[n] + rows.lengths[n]; ++r) {
      const int64_t to = fused.out_rows.present() ? static_cast<int64_t>(fused.out_rows.get({r})) : r;
      if (to < 0 || to >= rows.total) continue;
      // An inactive row is zero in both; the chain's norm may turn the sign of a zero.
      const std::vector<double> got = values(select(fused.out, 0, to));
      if (std::all_of(got.begin(), got.end(), [](double x) { return x == 0; }) && got == values(select(out, 0, r))) {
        continue;
      }
      report.expect_none("out row " + std::to_string(to) + " against the chain (L-8)",
                         first_difference(select(fused.out, 0, to), select(out, 0, r)));
    }
  }
  report.expect_none("pool against the chain (L-8)", first_difference(fused.pool, chain.pool));
  report.expect_none("windows against the chain (L-8)", first_difference(fused.windows, chain.windows));
  if (!c.records()) return;
  report.expect_none("records.u against the chain (L-8)", first_difference(fused.records.u, chain.records.u));
  report.expect_none("records.kg against the chain (L-8)", first_difference(fused.records.kg, chain.records.kg));
  report.expect_none("records.count against the chain (L-8)",
                     first_difference(fused.records.count, chain.records.count));
}

std::vector<int64_t> set_columns(const Choice& c, const Call& call, const TokenRows& rows) {
  std::vector<int64_t> columns(static_cast<size_t>(call.tables.slots_in_pool), c.taps - 1);
  if (c.mode == kFinal) return columns;
  const Tensor& slots = call.tables.write_slots.present() ? call.tables.write_slots : call.tables.slots;
  for (size_t n = 0; n < rows.lengths.size(); ++n) {
    const auto slot =
        slots.present() ? static_cast<int64_t>(slots.get({static_cast<int64_t>(n), 0})) : static_cast<int64_t>(n);
    if (slot < 0 || slot >= static_cast<int64_t>(columns.size())) continue;
    columns[static_cast<size_t>(slot)] = c.taps - 1 - (c.records() ? 0 : 1) + rows.lengths[n];
  }
  return columns;
}

void run(const Choice& c, const Setting& setting, Report& report) {
  const std::vector<int64_t> lengths = row_lengths(c.rows);
  const TokenRows rows = place(c.form, lengths, c.rows.wide_index, c.rows.slots == Slots::kActive);
  const Inputs in = make_inputs(c, rows);
  const RecordsMade made = make_rows(c.attention, c.rows, rows.sequences(), c.columns(), c.pool, c.records(),
                                     c.mode == kFold, c.record_rows);
  const Call before = make_call(c, in, rows, made);
  Call first = before, second = before, oracle = before;
  oracle.desc.decode.backend = "reference";
  oracle.desc.decode.flags = 0;
  oracle.desc.decode.attention.out_dtype = KDA_FP64;
  oracle.out = Tensor(KDA_FP64, oracle.out.shape());
  if (c.mode != kFold) {  // a folded commit goes on from the state as the pool stored it (V-10b)
    oracle.desc.decode.attention.state_dtype = KDA_FP64;
    oracle.pool = before.pool.copy(KDA_FP64);
  }
  const Tensor oracle_before = oracle.pool;
  for (Call* call : {&first, &second, &oracle}) bind(in, rows, *call);
  first.desc.decode.backend = second.desc.decode.backend = setting.backend.c_str();
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
  report.expect_none("window bits of the second run (N-12)", first_difference(first.windows, second.windows));

  const AttentionChoice& a = c.attention;
  const Limits limit = chained_limits(a.io);
  const double folded = c.mode == kFold ? pool_rounding(c.pool) : 0;
  check_out(report, "out", rows, first.out_rows, before.out, first.out, oracle.out, limit.out + folded);
  check_states(report, "state", {before.pool, first.pool, oracle_before, oracle.pool}, a.heads.HV,
               a.dims.V * a.dims.K, limit.state + pool_rounding(c.pool));
  check_windows(report, "window", before.windows, first.windows, oracle.windows, set_columns(c, before, rows));
  check_chain(c, in, rows, setting, before, first, report);
}

}  // namespace

std::vector<Case> decode_step_cases() { return covering_cases(KDA_OP_DECODE_STEP, axes(), allowed, choice_of, run); }

}  // namespace kda::conformance

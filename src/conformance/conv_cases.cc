// Convolution: prefill with windows and checkpoints, columns with offset, recover mode with and without fold (spec W,
// K-2), both pool layouts, merged and separate parts.
#include <algorithm>
#include <cmath>

#include "conformance/api.h"
#include "conformance/attention.h"
#include "conformance/cases.h"
#include "conformance/decode_rows.h"
#include "conformance/limits.h"
#include "conformance/random.h"
#include "conformance/tokens.h"
#include "conformance/windows.h"

namespace kda::conformance {
namespace {

struct Lengths {
  const char* name;
  std::vector<int64_t> values;
};
struct Channels {
  const char* name;
  std::vector<int64_t> parts;
};
// Prefill's lengths; a decode's rows follow from the width.
const std::vector<Lengths> kLengths = {
    {"1", {1}},     {"2", {2}}, {"0+3+17", {0, 3, 17}}, {"65+0+1", {65, 0, 1}}, {"4x8", {8, 8, 8, 8}},
    {"300", {300}}, {"0", {0}}};
const std::vector<Channels> kChannels = {{"384", {384}},
                                         {"1", {1}},
                                         {"67", {67}},
                                         {"4608", {4608}},
                                         {"3x128", {128, 128, 128}},
                                         {"128+128+200", {128, 128, 200}}};
constexpr int32_t kWidths[] = {1, 2, 4, 8, 16};
constexpr int32_t kTaps[] = {2, 3, 4, 5, 8};

enum Mode { kPrefill, kColumns, kRecords, kFold };

struct Choice {
  Mode mode;
  Channels channels;
  RowChoice rows;
  std::vector<int64_t> lengths;
  int32_t taps;
  kda_dtype io;
  bool fp32_pool, ds, extra, flags, out_rows, checkpoints, bias, no_activation, flat_weight, padded, invariant;
  Form form;

  bool records() const { return mode >= kRecords; }
};

std::vector<Axis> axes() {
  return {{"mode", {"prefill", "columns", "records", "fold"}},
          {"channels", names_of(kChannels)},
          {"taps", {"2", "3", "4", "5", "8"}},
          {"io", {"fp32", "bf16", "fp16"}},
          {"pool", {"io", "fp32"}},
          {"window", {"SD", "DS"}},
          {"columns", {"exact", "more"}},
          {"lengths", names_of(kLengths)},
          {"rows", row_patterns()},
          {"width", {"1", "2", "4", "8", "16"}},
          {"slots", slots_names()},
          {"accepted", accepted_names()},
          {"initial", {"all", "flags"}},
          {"form", form_names()},
          {"index", {"int32", "int64"}},
          {"out", {"direct", "rows"}},
          {"checkpoints", {"none", "slots"}},
          {"bias", {"none", "given"}},
          {"activation", {"silu", "none"}},
          {"weight", {"[C,W]", "[C,1,W]"}},
          {"layout", {"dense", "padded"}},
          {"invariant", {"off", "on"}}};
}
enum : size_t {
  kModeAxis,
  kChannelsAxis,
  kTapsAxis,
  kIoAxis,
  kPoolAxis,
  kWindowAxis,
  kColumnsAxis,
  kLengthsAxis,
  kRowsAxis,
  kWidthAxis,
  kSlotsAxis,
  kAcceptedAxis,
  kInitialAxis,
  kFormAxis,
  kIndexAxis,
  kOutAxis,
  kCheckpointsAxis,
  kBiasAxis,
  kActivationAxis,
  kWeightAxis,
  kLayoutAxis,
  kInvariantAxis
};

std::vector<int64_t> lengths_of(const std::vector<int>& c) {
  if (c[kModeAxis] == kPrefill) return kLengths[static_cast<size_t>(c[kLengthsAxis])].values;
  RowChoice rows;
  rows.pattern = row_patterns()[static_cast<size_t>(c[kRowsAxis])];
  rows.width = kWidths[c[kWidthAxis]];
  return row_lengths(rows);
}

bool allowed(const std::vector<int>& c) {
  const auto is = [&](size_t axis, int value) { return c[axis] == value; };
  const bool records = c[kModeAxis] >= kRecords, prefill = is(kModeAxis, kPrefill);
  if (records && (is(kInitialAxis, 1) || is(kSlotsAxis, static_cast<int>(Slots::kApart)))) return false;
  if (is(kModeAxis, kFold) && is(kAcceptedAxis, static_cast<int>(Accepted::kAbsent))) return false;
  if (c[kModeAxis] > kPrefill && (is(kCheckpointsAxis, 1) || c[kLengthsAxis] > 0)) return false;
  if (is(kSlotsAxis, static_cast<int>(Slots::kPacked)) && is(kCheckpointsAxis, 1)) return false;
  // A prefill takes no counts: its row axes stay at their first values.
  if (prefill && (c[kRowsAxis] > 0 || c[kWidthAxis] > 0 || c[kAcceptedAxis] > 0)) return false;
  if (is(kFormAxis, static_cast<int>(Form::kBatched)) &&
      (is(kSlotsAxis, static_cast<int>(Slots::kActive)) || is(kOutAxis, 1)))
    return false;
  const bool known = c[kModeAxis] >= 0 && c[kLengthsAxis] >= 0 && c[kRowsAxis] >= 0 && c[kWidthAxis] >= 0;
  if (!known || c[kFormAxis] < 0) return true;
  return fits(static_cast<Form>(c[kFormAxis]), lengths_of(c));
}

Choice choice_of(const std::vector<int>& c) {
  constexpr kda_dtype kIo[] = {KDA_FP32, KDA_BF16, KDA_FP16};
  const auto at = [&](size_t axis) { return static_cast<size_t>(c[axis]); };
  const auto on = [&](size_t axis) { return c[axis] == 1; };
  Choice x;
  x.mode = static_cast<Mode>(at(kModeAxis));
  x.channels = kChannels[at(kChannelsAxis)];
  x.taps = kTaps[at(kTapsAxis)];
  x.io = kIo[at(kIoAxis)];
  x.fp32_pool = on(kPoolAxis);
  x.ds = on(kWindowAxis);
  x.extra = on(kColumnsAxis);
  x.lengths = lengths_of(c);
  x.rows.pattern = row_patterns()[at(kRowsAxis)];
  x.rows.width = x.mode == kPrefill ? 1 : kWidths[at(kWidthAxis)];
  x.rows.slots = static_cast<Slots>(at(kSlotsAxis));
  x.rows.accepted = static_cast<Accepted>(at(kAcceptedAxis));
  x.rows.wide_index = on(kIndexAxis);
  x.flags = on(kInitialAxis);
  x.form = static_cast<Form>(at(kFormAxis));
  x.out_rows = on(kOutAxis);
  x.checkpoints = on(kCheckpointsAxis);
  x.bias = on(kBiasAxis);
  x.no_activation = on(kActivationAxis);
  x.flat_weight = !on(kWeightAxis);
  x.padded = on(kLayoutAxis);
  x.invariant = on(kInvariantAxis);
  return x;
}

struct Inputs {
  std::vector<Tensor> x, weight, bias;
};

Inputs make_inputs(const Choice& c, const TokenRows& rows) {
  Inputs in;
  std::vector<char> used(static_cast<size_t>(rows.total), 0);
  for (size_t n = 0; n < rows.lengths.size(); ++n) std::fill_n(used.begin() + rows.begins[n], rows.lengths[n], 1);
  for (size_t i = 0; i < c.channels.parts.size(); ++i) {
    const int64_t C = c.channels.parts[i];
    const auto stream = static_cast<uint32_t>(30 + 3 * i);
    // Few channels: positive, so that no sum cancels (a row of one value has no other to average with).
    const auto random = [&](uint32_t s, int64_t count) {
      std::vector<double> x = uniform_vector(s, count);
      if (C < 16) {
        for (double& v : x) v = std::fabs(v) + 0.1;
      }
      return x;
    };
    Tensor x(c.io, {rows.total, C}, {C + (c.padded ? 11 : 0), 1}, c.padded ? 4 : 0);
    x.assign(random(stream, x.size()));
    for (int64_t r = 0; r < rows.total; ++r) {
      if (!used[static_cast<size_t>(r)]) fill(narrow(x, 0, r, 1), NAN);
    }
    in.x.push_back(std::move(x));
    const Shape shape = c.flat_weight ? Shape{C, c.taps} : Shape{C, 1, c.taps};
    in.weight.push_back(Tensor::of(KDA_FP32, shape, random(stream + 1, C * c.taps)));
    if (c.bias) in.bias.push_back(Tensor::of(KDA_FP32, {C}, random(stream + 2, C)));
  }
  return in;
}

struct Call {
  kda_conv_desc desc;
  kda_conv_args args;
  RowTables tables;
  Tensor flags, record_count, checkpoint_offsets, checkpoint_slots, out_rows;
  WindowPools windows;
  std::vector<Tensor> out;  // [rows, 1, channels]
};

void choose_checkpoints(const Choice& c, int64_t first_slot, Call& call) {
  const auto N = static_cast<int64_t>(c.lengths.size());
  std::vector<double> offsets, slots;
  for (int64_t n = 0; n < N; ++n) {
    const auto length = static_cast<double>(c.lengths[static_cast<size_t>(n)]);
    offsets.insert(offsets.end(), {n % 3 == 2 ? length + 5 : length, n % 4 == 3 ? 0 : std::min(length, 2.0)});
    const auto slot = static_cast<double>(first_slot + 2 * n);
    slots.insert(slots.end(), {slot, n == 1 ? -1 : slot + 1});
  }
  call.desc.max_checkpoints = 2;
  call.checkpoint_offsets = Tensor::of(KDA_INT32, {N, 2}, offsets);
  call.checkpoint_slots = Tensor::of(c.rows.wide_index ? KDA_INT64 : KDA_INT32, {N, 2}, slots);
}

Call make_call(const Choice& c, const TokenRows& rows) {
  Call call;
  const int64_t N = rows.sequences();
  kda_conv_desc& d = call.desc;
  kda_conv_desc_init(&d);
  d.mode = c.mode == kPrefill ? KDA_CONV_PREFILL : c.mode == kColumns ? KDA_CONV_COLUMNS : KDA_CONV_RECORDS;
  d.width = c.taps;
  d.parts = static_cast<int32_t>(c.channels.parts.size());
  std::copy(c.channels.parts.begin(), c.channels.parts.end(), d.channels);
  d.io_dtype = c.io;
  d.state_dtype = c.fp32_pool ? KDA_FP32 : c.io;
  d.layout = c.ds ? KDA_CONV_DS : KDA_CONV_SD;
  d.verify_width = c.rows.width;
  d.fold = c.mode == kFold;
  d.max_tokens = rows.total;
  d.max_sequences = N;
  d.initial_state = c.flags ? KDA_INITIAL_FLAGS : KDA_INITIAL_ALL;
  d.no_activation = c.no_activation;
  d.flags = c.invariant ? KDA_PLAN_BATCH_INVARIANT : 0;
  std::vector<int64_t> counts;
  for (int64_t n = 0; n < N; ++n) counts.push_back((3 * n + 1) % (c.rows.width + 1));
  call.tables = row_tables(c.rows, N, c.mode == kColumns ? c.rows.width : 1, c.records() ? &counts : nullptr);
  if (c.mode == kPrefill) call.tables.accepted = Tensor();
  d.null_slot = call.tables.null_slot;
  int64_t slots = call.tables.slots_in_pool;
  if (c.checkpoints) choose_checkpoints(c, slots, call);
  if (c.checkpoints) slots += 2 * N;
  if (c.mode == kFold) {  // by slot
    call.record_count = Tensor::ints(std::vector<int64_t>(static_cast<size_t>(slots), 0));
    for (int64_t n = 0; n < N; ++n) {
      const int64_t slot = call.tables.start[static_cast<size_t>(n)];
      if (slot >= 0) call.record_count.set({slot}, static_cast<double>(counts[static_cast<size_t>(n)]));
    }
  }
  const int64_t columns = c.taps - 1 + (c.mode == kColumns ? c.rows.width - 1 : c.records() ? c.rows.width : 0);
  call.windows = make_windows(d.layout, c.channels.parts, slots, columns + (c.extra ? 2 : 0), d.state_dtype,
                              c.rows.slots == Slots::kGapped);
  if (c.flags) {
    std::vector<int64_t> flags;
    for (int64_t n = 0; n < N; ++n) flags.push_back(n % 3 != 0);
    call.flags = Tensor::flags(flags);
  }
  for (int64_t C : c.channels.parts) call.out.push_back(out_buffer(c.io, rows.total, 1, C, c.padded));
  if (c.out_rows) call.out_rows = reversed_rows(rows.total, c.rows.wide_index ? KDA_INT64 : KDA_INT32);
  return call;
}

void bind(const Inputs& in, const TokenRows& rows, Call& call) {
  kda_conv_args& a = call.args = sized<kda_conv_args>();
  for (size_t i = 0; i < in.x.size(); ++i) {
    a.x[i] = rows.view(in.x[i]);
    a.weight[i] = in.weight[i];
    if (!in.bias.empty()) a.bias[i] = in.bias[i];
    a.state[i] = call.windows.view(i);
    const kda_tensor out = rows.view(call.out[i]);
    a.out[i] = select(out, out.rank - 2, 0);
  }
  a.sequences = rows.view();
  a.slots = call.tables.slots;
  a.write_slots = call.tables.write_slots;
  a.accepted = call.tables.accepted;
  a.has_initial_state = call.flags;
  a.record_count = call.record_count;
  a.checkpoint_offsets = call.checkpoint_offsets;
  a.checkpoint_slots = call.checkpoint_slots;
  a.out_rows = call.out_rows;
}

// Columns that a call sets in the slots it writes (W-2..W-4): the windows of prefill and checkpoints have W-1.
std::vector<int64_t> set_columns(const Choice& c, const Call& call) {
  std::vector<int64_t> columns(static_cast<size_t>(call.windows.parts[0].shape()[0]), c.taps - 1);
  if (c.mode == kPrefill) return columns;
  const Tensor& slots = call.tables.write_slots.present() ? call.tables.write_slots : call.tables.slots;
  for (size_t n = 0; n < c.lengths.size(); ++n) {
    const auto slot =
        slots.present() ? static_cast<int64_t>(slots.get({static_cast<int64_t>(n), 0})) : static_cast<int64_t>(n);
    if (slot < 0 || slot >= static_cast<int64_t>(columns.size())) continue;
    columns[static_cast<size_t>(slot)] = c.taps - 1 - (c.mode == kColumns ? 1 : 0) + c.lengths[n];
  }
  return columns;
}

void run(const Choice& c, const Setting& setting, Report& report) {
  const TokenRows rows = place(c.form, c.lengths, c.rows.wide_index, c.rows.slots == Slots::kActive);
  const Inputs in = make_inputs(c, rows);
  const Call before = make_call(c, rows);
  Call first = before, second = before, oracle = before;
  oracle.desc.backend = "reference";
  oracle.desc.flags = 0;
  oracle.desc.out_dtype = KDA_FP64;
  for (Tensor& t : oracle.out) t = Tensor(KDA_FP64, t.shape());
  for (Call* call : {&first, &second, &oracle}) bind(in, rows, *call);
  first.desc.backend = second.desc.backend = setting.backend.c_str();
  Plan plan = make_plan(first.desc, setting.context), again = make_plan(second.desc, setting.other);
  Plan reference = make_plan(oracle.desc, setting.context);
  if (!report.accept(plan)) return;
  if (!report.succeeded("run", plan.run(first.args), plan.message())) return;
  if (!report.succeeded("second run", again.run(second.args), again.message())) return;
  if (!report.succeeded("reference", reference.run(oracle.args), reference.message())) return;
  for (Call* call : {&first, &second}) {
    if (setting.spoil) setting.spoil("out", call->out.back());
  }
  for (size_t i = 0; i < first.out.size(); ++i) {
    report.expect_none("out bits of the second run (N-12)", first_difference(first.out[i], second.out[i]));
    check_out(report, "out[" + std::to_string(i) + "]", rows, first.out_rows, before.out[i], first.out[i],
              oracle.out[i], limits(c.io).out);
  }
  report.expect_none("window bits of the second run (N-12)", first_difference(first.windows, second.windows));
  check_windows(report, "window", before.windows, first.windows, oracle.windows, set_columns(c, before));
}

}  // namespace

std::vector<Case> conv_cases() { return covering_cases(KDA_OP_CONV, axes(), allowed, choice_of, run); }

}  // namespace kda::conformance

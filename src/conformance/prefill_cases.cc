// Prefill: the tables of R-61 as a pairwise covering over everything a call can vary, and R-62 on each row (canary
// pools, poisoned rows, gaps and workspace, inputs unchanged, a second call bit-equal, on another number of threads).
#include <algorithm>
#include <cmath>
#include <memory>

#include "conformance/api.h"
#include "conformance/attention.h"
#include "conformance/cases.h"
#include "conformance/limits.h"
#include "conformance/pools.h"
#include "conformance/random.h"
#include "conformance/tokens.h"

namespace kda::conformance {
namespace {

struct Lengths {
  std::string name;
  std::vector<int64_t> values;
};

// alone, and mixed with empties first, in the middle and last; up to 256 sequences.
const std::vector<Lengths>& lengths_axis() {
  static const std::vector<Lengths> list = [] {
    std::vector<Lengths> l;
    for (int64_t n : {0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 1000}) {
      l.push_back({std::to_string(n), {n}});
    }
    l.push_back({"0+17+64", {0, 17, 64}});
    l.push_back({"33+0+0+65", {33, 0, 0, 65}});
    l.push_back({"129+16+0", {129, 16, 0}});
    l.push_back({"1+1+63+1+130+2", {1, 1, 63, 1, 130, 2}});
    l.push_back({"3x48", {48, 48, 48}});
    l.push_back({"256x1", std::vector<int64_t>(256, 1)});
    return l;
  }();
  return list;
}

const std::vector<Heads> kHeads = {{"1x1", 1, 1},     {"12x12", 12, 12}, {"24x24", 24, 24},
                                   {"32x32", 32, 32}, {"64x64", 64, 64}, {"96x96", 96, 96},
                                   {"6x12", 6, 12},   {"8x24", 8, 24},   {"3x12", 3, 12}};
const std::vector<Dims> kDims = {
    {"128x128", 128, 128}, {"64x64", 64, 64}, {"128x64", 128, 64}, {"128x256", 128, 256}, {"60x60", 60, 60},
    {"100x100", 100, 100}, {"7x5", 7, 5},     {"1x1", 1, 1},       {"256x33", 256, 33},   {"48x512", 48, 512}};

enum Slots { kPacked, kPermuted, kSomeDead, kGapped, kApart, kNullZero, kActive };
enum Initial { kNone, kAll, kFlags };
enum Final { kInPlace, kPackedFinal, kNoFinal };
enum Checkpoints { kNoCheckpoints, kToSlots, kToTensor };

struct Choice {
  AttentionChoice attention;
  std::vector<int64_t> lengths;
  Form form;
  int slots, initial, final_state, checkpoints;
  kda_dtype pool;
  bool wide_index, out_rows, invariant;

  int64_t sequences() const { return static_cast<int64_t>(lengths.size()); }
};

std::vector<Axis> axes() {
  std::vector<Axis> list = attention_axes(kHeads, kDims);
  list.push_back({"lengths", names_of(lengths_axis())});
  list.push_back({"form", form_names()});
  list.push_back({"slots", {"packed", "permuted", "dead", "gapped", "apart", "null0", "active"}});
  list.push_back({"initial", {"none", "all", "flags"}});
  list.push_back({"final", {"pool", "packed", "none"}});
  list.push_back({"checkpoints", {"none", "slots", "tensor"}});
  list.push_back({"pool", {"fp32", "bf16", "fp16"}});
  list.push_back({"index", {"int32", "int64"}});
  list.push_back({"out", {"direct", "rows"}});
  list.push_back({"invariant", {"off", "on"}});
  return list;
}
enum : size_t {
  kLengthsAxis = kAttentionAxes,
  kFormAxis,
  kSlotsAxis,
  kInitialAxis,
  kFinalAxis,
  kCheckpointsAxis,
  kPoolAxis,
  kIndexAxis,
  kOutAxis
};

// Work and memory of a row stay small (the oracle runs beside it); a batch needs equal lengths, packed states have no
// slots to be dead or apart, and checkpoints go to slots only where there are some.
bool allowed(const std::vector<int>& c) {
  const auto chosen = [&](size_t axis) { return c[axis] >= 0; };
  const Heads* heads = chosen(0) ? &kHeads[static_cast<size_t>(c[0])] : nullptr;
  const Dims* dims = chosen(1) ? &kDims[static_cast<size_t>(c[1])] : nullptr;
  if (chosen(kLengthsAxis)) {
    const std::vector<int64_t>& l = lengths_axis()[static_cast<size_t>(c[kLengthsAxis])].values;
    int64_t T = 0;
    for (int64_t n : l) T += n;
    const int64_t HV = heads ? heads->HV : 1, KV = dims ? dims->K * dims->V : 1;
    if (T * HV * KV > int64_t{3000} * 128 * 128 || T * HV > 16384) return false;
    const int64_t copies = static_cast<int64_t>(l.size()) * (c[kCheckpointsAxis] > kNoCheckpoints ? 3 : 1) + 3;
    if (copies * HV * KV > int64_t{1} << 22) return false;
    if (chosen(kFormAxis) && !fits(static_cast<Form>(c[kFormAxis]), l)) return false;
  }
  if (c[kSlotsAxis] == kPacked && c[kCheckpointsAxis] == kToSlots) return false;
  if (c[kFormAxis] == static_cast<int>(Form::kBatched) && (c[kSlotsAxis] == kActive || c[kOutAxis] == 1))
    return false;
  return true;
}

Choice choice_of(const std::vector<int>& c) {
  constexpr kda_dtype kPools[] = {KDA_FP32, KDA_BF16, KDA_FP16};
  size_t i = kLengthsAxis;
  Choice x;
  x.attention = attention_choice(c, 0, kHeads, kDims);
  x.lengths = lengths_axis()[static_cast<size_t>(c[i++])].values;
  x.form = static_cast<Form>(c[i++]);
  x.slots = c[i++];
  x.initial = c[i++];
  x.final_state = c[i++];
  x.checkpoints = c[i++];
  x.pool = kPools[c[i++]];
  x.wide_index = c[i++] == 1;
  x.out_rows = c[i++] == 1;
  x.invariant = c[i++] == 1;
  return x;
}

// Everything of a call that is not an input of the attention itself.
struct Call {
  kda_prefill_desc desc;
  kda_prefill_args args;  // views of what lies here and in the problem
  Tensor slots, write_slots, flags, checkpoint_offsets, checkpoint_slots, out_rows;
  Tensor pool, final_state, checkpoint_states, out;
};

// N read slots, one free slot, N write slots (if apart), 2N checkpoint slots; slot 0 stays free.
void choose_slots(const Choice& c, Call& call) {
  const int64_t N = c.sequences(),
                count = 1 + (c.slots == kApart ? 2 : 1) * N + (c.checkpoints == kToSlots ? 2 * N : 0);
  const kda_dtype index = c.wide_index ? KDA_INT64 : KDA_INT32;
  std::vector<int64_t> read, write, checkpoint;
  for (int64_t n = 0; n < N; ++n) {
    read.push_back(c.slots == kGapped ? 1 + n : N - n);
    write.push_back(1 + N + n);
    for (int64_t i = 0; i < 2; ++i) checkpoint.push_back(count - 1 - 2 * n - i);
  }
  if (c.slots == kSomeDead || c.slots == kNullZero) {
    for (int64_t n = 0; n < N; n += 3) {
      read[static_cast<size_t>(n)] = c.slots == kNullZero ? 0 : n % 2 == 0 ? -1 : count + n;
    }
  }
  if (c.slots == kApart && N > 1) write[1] = -1;  // outputs are computed, nothing is stored (P-8)
  if (c.slots == kNullZero) call.desc.null_slot = 0;
  call.slots = Tensor::ints(read, index);
  if (c.slots == kApart) call.write_slots = Tensor::ints(write, index);
  if (c.checkpoints == kToSlots) {
    if (N > 0) checkpoint[0] = -1;
    call.checkpoint_slots = Tensor(index, {N, 2});
    call.checkpoint_slots.assign(std::vector<double>(checkpoint.begin(), checkpoint.end()));
  }
  const AttentionChoice& a = c.attention;
  const int64_t payload = a.heads.HV * a.dims.V * a.dims.K;
  call.pool = canary_pool(c.pool, {count, a.heads.HV, a.dims.V, a.dims.K}, c.slots == kGapped ? payload + 37 : 0,
                          c.slots == kGapped ? 19 : 0);
}

void fill_initial_states(const Choice& c, Call& call) {
  const int64_t slots = call.pool.shape()[0], payload = call.pool.size() / std::max<int64_t>(slots, 1);
  std::vector<double> x = uniform_vector(6, payload);
  for (double& v : x) v *= 0.5;
  for (int64_t n = 0; n < c.sequences(); ++n) {
    const int64_t slot = call.slots.present() ? static_cast<int64_t>(call.slots.get({n})) : n;
    if (slot < 0 || slot >= slots) continue;
    std::rotate(x.begin(), x.begin() + std::min<int64_t>(1, payload), x.end());  // another state for each
    assign(select(call.pool, 0, slot), x);
  }
}

void choose_checkpoints(const Choice& c, Call& call) {
  if (c.checkpoints == kNoCheckpoints) return;
  const int64_t N = c.sequences();
  call.desc.max_checkpoints = 2;
  std::vector<double> offsets;
  for (int64_t n = 0; n < N; ++n) {
    const int64_t length = c.lengths[static_cast<size_t>(n)];
    offsets.push_back(static_cast<double>(n % 3 == 2 ? length + 5 : length >= 64 ? length / 64 * 64 : length));
    offsets.push_back(static_cast<double>(n % 4 == 3 ? 0 : length / 2));
  }
  call.checkpoint_offsets = Tensor::of(c.wide_index ? KDA_INT32 : KDA_INT64, {N, 2}, offsets);
  const AttentionChoice& a = c.attention;
  if (c.checkpoints == kToTensor) call.checkpoint_states = Tensor(c.pool, {N, 2, a.heads.HV, a.dims.V, a.dims.K});
}

Call make_call(const Choice& c, const Problem& p, const TokenRows& rows) {
  Call call;
  call.desc = prefill_desc(p, "auto");
  call.desc.attention.state_dtype = c.pool;
  call.desc.max_tokens = rows.total;
  call.desc.max_sequences = c.sequences();
  call.desc.flags = c.invariant ? KDA_PLAN_BATCH_INVARIANT : 0;
  call.desc.initial_state = c.initial == kNone  ? KDA_INITIAL_NONE
                            : c.initial == kAll ? KDA_INITIAL_ALL
                                                : KDA_INITIAL_FLAGS;
  const AttentionChoice& a = c.attention;
  const int64_t N = c.sequences(), HV = a.heads.HV;
  if (c.slots == kPacked) call.pool = canary_pool(c.pool, {N, HV, a.dims.V, a.dims.K});
  else choose_slots(c, call);
  fill_initial_states(c, call);
  choose_checkpoints(c, call);
  if (c.initial == kFlags) {
    std::vector<int64_t> flags;
    for (int64_t n = 0; n < N; ++n) flags.push_back(n % 3 != 1);
    call.flags = Tensor::flags(flags);
  }
  if (c.final_state == kPackedFinal) call.final_state = Tensor(c.pool, {N, HV, a.dims.V, a.dims.K});
  call.out = out_buffer(a.io, rows.total, HV, a.dims.V, a.layout != Layout::kDense);
  if (c.out_rows) call.out_rows = reversed_rows(rows.total, c.wide_index ? KDA_INT64 : KDA_INT32);
  return call;
}

void bind(const Choice& c, const Problem& p, const TokenRows& rows, Call& call) {
  kda_prefill_args& a = call.args = prefill_args(p);
  a.q = rows.view(p.q);
  a.k = rows.view(p.k);
  a.v = rows.view(p.v);
  a.gate = rows.view(p.gate);
  a.beta = rows.view(p.beta);
  a.out = rows.view(call.out);
  a.sequences = rows.view();
  a.state = call.pool;
  a.slots = call.slots;
  a.write_slots = call.write_slots;
  a.has_initial_state = call.flags;
  a.final_state = call.final_state;
  a.no_final_state = c.final_state == kNoFinal;
  a.checkpoint_offsets = call.checkpoint_offsets;
  a.checkpoint_slots = call.checkpoint_slots;
  a.checkpoint_states = call.checkpoint_states;
  a.out_rows = call.out_rows;
}

// The same call by the oracle: fp64 out and states that start from the pool's values.
Call oracle_call(const Call& call) {
  Call o = call;
  o.desc.backend = "reference";
  o.desc.attention.out_dtype = o.desc.attention.state_dtype = KDA_FP64;
  o.out = Tensor(KDA_FP64, call.out.shape());
  o.pool = call.pool.copy(KDA_FP64);
  if (call.final_state.present()) o.final_state = Tensor(KDA_FP64, call.final_state.shape());
  if (call.checkpoint_states.present()) o.checkpoint_states = Tensor(KDA_FP64, call.checkpoint_states.shape());
  return o;
}

void compare_with_oracle(const Choice& c, const TokenRows& rows, const Call& before, const Call& after,
                         const Call& oracle, const Call& oracle_before, Report& report) {
  const AttentionChoice& a = c.attention;
  const int64_t HV = a.heads.HV, VK = a.dims.V * a.dims.K;
  const Limits limit = limits(a.io, false, report.arithmetic());
  check_out(report, "out", rows, after.out_rows, before.out, after.out, oracle.out, limit.out);
  const double state_limit = limit.state + pool_rounding(c.pool);
  check_states(report, "state", {before.pool, after.pool, oracle_before.pool, oracle.pool}, HV, VK, state_limit);
  if (after.final_state.present()) {
    check_states(report, "final_state",
                 {before.final_state, after.final_state, oracle_before.final_state, oracle.final_state}, HV, VK,
                 state_limit);
  }
  if (after.checkpoint_states.present()) {
    check_states(report, "checkpoint_states",
                 {before.checkpoint_states, after.checkpoint_states, oracle_before.checkpoint_states,
                  oracle.checkpoint_states},
                 2 * HV, VK, state_limit);
  }
}

void run(const Choice& c, const Setting& setting, Report& report) {
  const TokenRows rows = place(c.form, c.lengths, c.wide_index, c.slots == kActive);
  const Problem p = attention_problem(c.attention, rows.total, rows.begins, c.lengths);
  const Call before = make_call(c, p, rows);
  Call first = before, second = before, oracle = oracle_call(before);
  const Call oracle_before = oracle;
  for (Call* call : {&first, &second, &oracle}) bind(c, p, rows, *call);
  first.desc.backend = second.desc.backend = setting.backend.c_str();
  Plan plan = make_plan(first.desc, setting.context), again = make_plan(second.desc, setting.other);
  Plan reference = make_plan(oracle.desc, setting.context);
  if (!report.accept(plan)) return;
  const std::vector<const Tensor*> inputs = {&p.q, &p.k, &p.v, &p.gate, &p.beta};
  std::vector<Snapshot> snapshots;
  for (const Tensor* t : inputs) snapshots.emplace_back(*t);

  if (!report.succeeded("run", plan.run(first.args), plan.message())) return;
  if (!report.succeeded("second run", again.run(second.args), again.message())) return;
  if (!report.succeeded("reference", reference.run(oracle.args), reference.message())) return;
  for (Call* call : {&first, &second}) {
    if (setting.spoil) setting.spoil("out", call->out);
    if (setting.spoil && c.final_state == kInPlace) setting.spoil("state", call->pool);
  }
  for (size_t i = 0; i < inputs.size(); ++i) report.expect_none("input", snapshots[i].changes_outside(*inputs[i]));
  report.expect_none("out bits of the second run (N-12)", first_difference(first.out, second.out));
  report.expect_none("pool bits of the second run (N-12)", first_difference(first.pool, second.pool));
  compare_with_oracle(c, rows, before, first, oracle, oracle_before, report);
}

}  // namespace

std::vector<Case> prefill_cases() { return covering_cases(KDA_OP_PREFILL, axes(), allowed, choice_of, run); }

}  // namespace kda::conformance

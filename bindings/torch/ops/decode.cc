// decode, verify_record, commit, decode_step.
#include "attention.h"

namespace kda::torch_ops {
namespace {

// record_u, record_kg, record_count, record_rows
kda_records read_records(Arguments& a) {
  kda_records r;
  r.u = a.optional_tensor("record_u");
  r.kg = a.optional_tensor("record_kg");
  r.count = a.optional_tensor("record_count");
  r.record_rows = a.optional_tensor("record_rows");
  return r;
}

// slots, write_slots, accepted, has_initial_state
void read_slots(Arguments& a, kda_decode_args& args) {
  args.slots = a.optional_tensor("slots");
  args.write_slots = a.optional_tensor("write_slots");
  args.accepted = a.optional_tensor("accepted");
  args.has_initial_state = a.optional_tensor("has_initial_state");
}

void read_parameters(Arguments& a, kda_decode_args& args) {
  const auto [A_log, dt_bias] = read_gate_parameters(a);
  args.A_log = A_log;
  args.dt_bias = dt_bias;
  args.sequences = read_sequences(a);
  args.out_rows = a.optional_tensor("out_rows");
}

void fill(const Words& words, const kda_decode_args& args, const Counts& counts, kda_decode_desc& d) {
  d.max_tokens = bound(words.max_tokens, counts.tokens);
  d.max_sequences = bound(words.max_sequences, counts.sequences);
  d.width = static_cast<int32_t>(words.width);
  d.null_slot = words.null_slot;
  d.flags = words.flags();
  d.initial_state = present(args.has_initial_state) ? KDA_INITIAL_FLAGS
                    : words.fresh                   ? KDA_INITIAL_NONE
                                                    : KDA_INITIAL_ALL;
}

// Both forms of decode: the schemas differ in the records.
void decode_or_record(StableIValue* stack, uint64_t arguments, bool records) {
  Arguments a(stack, arguments);
  auto args = zeroed<kda_decode_args>();
  args.q = a.tensor("q");
  args.k = a.tensor("k");
  args.v = a.tensor("v");
  args.gate = a.tensor("gate");
  args.beta = a.tensor("beta");
  args.out = a.tensor("out");
  args.state = a.tensor("state");
  std::string_view text;
  if (!records) text = a.text();
  if (records) {
    args.records.u = a.tensor("record_u");
    args.records.kg = a.tensor("record_kg");
    args.records.count = a.tensor("record_count");
    text = a.text();
    args.records.record_rows = a.optional_tensor("record_rows");
  }
  read_slots(a, args);
  read_parameters(a, args);
  a.finish();
  const Words& words = read_words(text, records ? KDA_FORM_WORDS KDA_PLAN_WORDS "width fresh fold"
                                                : KDA_FORM_WORDS KDA_PLAN_WORDS "width fresh final_only");

  auto d = zeroed<kda_decode_desc>();
  d.attention = attention_spec(words, size_from_end(args.q, 2), args.gate, args.v, args.q.dtype, args.beta.dtype,
                               args.state.dtype);
  fill(words, args, count(args.sequences, args.q, 3), d);
  d.mode = records ? KDA_DECODE_RECORDS : KDA_DECODE_COLUMNS;
  d.fold = words.fold ? 1 : 0;
  d.store = words.final_only ? KDA_STORE_FINAL : KDA_STORE_PER_TOKEN;
  const kda_plan* plan = plan_of({KDA_OP_DECODE, args.q.device, words.backend}, d, kda_decode_plan_create);
  run(plan, kda_decode_run, args, args.q.device);
}

}  // namespace

void decode(StableIValue* stack, uint64_t arguments, uint64_t) { decode_or_record(stack, arguments, false); }
void verify_record(StableIValue* stack, uint64_t arguments, uint64_t) { decode_or_record(stack, arguments, true); }

void commit(StableIValue* stack, uint64_t arguments, uint64_t) {
  Arguments a(stack, arguments);
  auto args = zeroed<kda_commit_args>();
  args.state = a.tensor("state");
  args.slots = a.tensor("slots");
  args.accepted = a.tensor("accepted");
  args.records.u = a.tensor("record_u");
  args.records.kg = a.tensor("record_kg");
  args.records.count = a.tensor("record_count");
  const std::string_view text = a.text();
  args.records.record_rows = a.optional_tensor("record_rows");
  const Parts windows = a.optional_parts("conv_state");
  const auto [A_log, dt_bias] = read_gate_parameters(a);
  args.A_log = A_log;
  args.dt_bias = dt_bias;
  args.num_active = a.optional_tensor("num_active");
  a.finish();
  const Words& words = read_words(text, KDA_FORM_WORDS KDA_PLAN_WORDS "conv_width layout");

  const kda_tensor& kg = args.records.kg;
  if (kg.rank != 4) bad_argument("record_kg: wanted [rows, HV, width, 2K], got rank " + std::to_string(kg.rank));
  auto d = zeroed<kda_commit_desc>();
  const int64_t heads = kg.shape[1], keys = kg.shape[3] / 2, values = size_from_end(args.state, 2);
  // Sizes of the state alone: [..., HV, V, K] as gate [HV, *, K] and values [*, V].
  kda_tensor gate = kg, value = args.state;
  gate.shape[2] = heads;
  gate.shape[3] = keys;
  value.rank = 1;
  value.shape[0] = values;
  // The window's dtype tells the model's where the records are wider.
  const kda_dtype window = windows.part[0].dtype;
  const kda_dtype io = kg.dtype == KDA_FP32 && windows.count > 0 ? window : kg.dtype;
  int64_t query_heads = heads;
  d.conv_layout = words.layout;
  if (windows.count > 0) {
    d.conv_width = static_cast<int32_t>(words.conv_width);
    d.conv_parts = windows.count;
    d.conv_dtype = window;
    const int64_t channels = size_from_end(windows.part[0], d.conv_layout == KDA_CONV_SD ? 1 : 2);
    query_heads = windows.count == 1 ? (channels - heads * values) / (2 * keys) : channels / keys;
    for (int i = 0; i < windows.count; ++i) args.conv_state[i] = windows.part[i];
  }
  d.attention = attention_spec(words, query_heads, gate, value, io, KDA_DTYPE_NONE, args.state.dtype);
  d.max_sequences = bound(words.max_sequences, args.slots.rank > 0 ? args.slots.shape[0] : 0);
  d.width = static_cast<int32_t>(kg.shape[2]);
  d.null_slot = words.null_slot;
  d.flags = words.flags();
  const kda_device device = args.state.device;
  run(plan_of({KDA_OP_COMMIT, device, words.backend}, d, kda_commit_plan_create), kda_commit_run, args, device);
}

void decode_step(StableIValue* stack, uint64_t arguments, uint64_t) {
  Arguments a(stack, arguments);
  auto args = zeroed<kda_decode_step_args>();
  args.decode.struct_size = sizeof args.decode;
  kda_decode_args& rows = args.decode;
  const Parts x = a.parts("x"), weight = a.parts("conv_weight"), window = a.parts("conv_state");
  rows.gate = a.tensor("gate");
  rows.beta = a.tensor("beta");
  rows.out = a.tensor("out");
  rows.state = a.tensor("state");
  const std::string_view text = a.text();
  args.z = a.optional_tensor("z");
  args.norm_weight = a.optional_tensor("norm_weight");
  rows.records = read_records(a);
  read_slots(a, rows);
  read_parameters(a, rows);
  a.finish();
  const Words& words = read_words(text, KDA_FORM_WORDS KDA_PLAN_WORDS "width fresh fold final_only norm_eps layout");

  if (weight.count != x.count || window.count != x.count) {
    bad_argument("conv_weight, conv_state: wanted as many tensors as x has (" + std::to_string(x.count) + "), got " +
                 std::to_string(weight.count) + " and " + std::to_string(window.count));
  }
  for (int i = 0; i < x.count; ++i) {
    args.x[i] = x.part[i];
    args.conv_weight[i] = weight.part[i];
    args.conv_state[i] = window.part[i];
  }
  auto d = zeroed<kda_decode_step_desc>();
  d.decode.struct_size = sizeof d.decode;
  const int64_t channels = size_from_end(x.part[0], 1), keys = size_from_end(rows.gate, 1);
  const int64_t values = size_from_end(rows.out, 2) * size_from_end(rows.out, 1);
  const int64_t heads = keys == 0 ? 0 : x.count == 1 ? (channels - values) / (2 * keys) : channels / keys;
  d.decode.attention =
      attention_spec(words, heads, rows.gate, rows.out, x.part[0].dtype, rows.beta.dtype, rows.state.dtype);
  fill(words, rows, count(rows.sequences, x.part[0], 2), d.decode);
  const bool records = present(rows.records.u);
  d.decode.mode = records ? KDA_DECODE_RECORDS : KDA_DECODE_COLUMNS;
  d.decode.fold = words.fold ? 1 : 0;
  d.decode.store = words.final_only ? KDA_STORE_FINAL : KDA_STORE_PER_TOKEN;
  d.conv_width = static_cast<int32_t>(size_from_end(weight.part[0], 1));
  d.conv_parts = x.count;
  d.conv_layout = words.layout;
  d.conv_dtype = window.part[0].dtype;
  d.norm_eps = words.norm_eps;
  d.no_norm = present(args.z) ? 0 : 1;
  const kda_device device = rows.gate.device;
  run(plan_of({KDA_OP_DECODE_STEP, device, words.backend}, d, kda_decode_step_plan_create), kda_decode_step_run, args,
      device);
}

}  // namespace kda::torch_ops

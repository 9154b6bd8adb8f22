// Host checks of decode, commit and decode_step runs (spec V, P-3).
#include "core/check_slots.h"

namespace kda {
namespace {

Status check_records(const kda_attention_spec& a, int64_t width, const kda_records& r, int64_t n, int64_t pool_rows) {
  KDA_RETURN_IF_ERROR(check_tensor("records.u", r.u, {KDA_FP32}, {kAny, a.num_value_heads, width, a.value_dim}, 1));
  const int64_t rows = r.u.shape[0];
  KDA_RETURN_IF_ERROR(check_tensor("records.kg", r.kg, {a.gate_dtype}, {rows, a.num_value_heads, width, 2 * a.key_dim}, 1));
  KDA_RETURN_IF_ERROR(check_tensor("records.count", r.count, {KDA_INT32}, {rows}));
  if (present(r.record_rows)) return check_index("records.record_rows", r.record_rows, n);
  if (rows < pool_rows) {
    return invalid_argument("records.u: wanted a row per slot (", pool_rows, ") or record_rows, got ", rows, " rows");
  }
  return {};
}

// States, slots and counts of a decode call; shared by decode and decode_step.
Status check_decode_rows(const kda_decode_desc& d, const kda_decode_args& args, int64_t n) {
  const kda_attention_spec& a = d.attention;
  const bool slots = present(args.slots);
  const bool columns = d.mode == KDA_DECODE_COLUMNS && d.store == KDA_STORE_PER_TOKEN && d.width > 1;
  KDA_RETURN_IF_ERROR(check_state("state", args.state, slots ? kAny : n, a, {a.state_dtype}));
  if (!slots && d.width > 1 && d.mode == KDA_DECODE_COLUMNS && d.store == KDA_STORE_PER_TOKEN) {
    return invalid_argument("slots: wanted a table [", n, ", ", d.width, "] for verify columns, got none");
  }
  if (slots) KDA_RETURN_IF_ERROR(check_index("slots", args.slots, n, columns ? d.width : 1));
  if (present(args.write_slots)) {
    if (!slots) return invalid_argument("write_slots: wanted none without slots, got ", describe(args.write_slots));
    if (d.mode == KDA_DECODE_RECORDS) return check_absent("write_slots", args.write_slots, "records mode commits in place");
    KDA_RETURN_IF_ERROR(check_index("write_slots", args.write_slots, n, columns ? d.width : 1));
  }
  if (present(args.accepted)) KDA_RETURN_IF_ERROR(check_tensor("accepted", args.accepted, {KDA_INT32}, {n}));
  if (d.fold && !present(args.accepted)) return invalid_argument("accepted: wanted int32 [", n, "] with fold, got none");
  if (d.initial_state == KDA_INITIAL_FLAGS) {
    KDA_RETURN_IF_ERROR(check_flags("has_initial_state", args.has_initial_state, n));
  } else {
    KDA_RETURN_IF_ERROR(check_absent("has_initial_state", args.has_initial_state, "the plan's initial_state is not flags"));
  }
  if (d.mode == KDA_DECODE_COLUMNS) {
    const char* const why = "columns mode has no records";
    KDA_RETURN_IF_ERROR(check_absent("records.u", args.records.u, why));
    KDA_RETURN_IF_ERROR(check_absent("records.kg", args.records.kg, why));
    KDA_RETURN_IF_ERROR(check_absent("records.count", args.records.count, why));
    return check_absent("records.record_rows", args.records.record_rows, why);
  }
  return check_records(a, d.width, args.records, n, args.state.shape[0]);
}

// Counts of row n: accepted, recorded, tokens.
Status check_decode_counts(const kda_decode_desc& d, const kda_decode_args& args, const SequenceTable& table,
                           int64_t n) {
  const bool records = d.mode == KDA_DECODE_RECORDS;
  if (records || d.store == KDA_STORE_PER_TOKEN) KDA_RETURN_IF_ERROR(check_length_value(table, n, d.width));
  if (!records) {
    const bool wide = present(args.slots) && args.slots.rank == 2;
    return check_accepted_value(args.accepted, n, wide ? std::min<int64_t>(args.slots.shape[1], d.width) : 1);
  }
  if (!d.fold) return {};
  const int64_t slot = present(args.slots) ? index_row(args.slots, n)[0] : n;
  if (!slot_is_live(slot, args.state.shape[0], d.null_slot)) return {};
  const int64_t row = record_row(args.records.count, args.records.record_rows, slot, n);
  return check_record_values(args.records.count, row, args.accepted, n, d.width);
}

// Notes what an active row n reads and writes.
void note_decode_slots(const kda_decode_desc& d, const kda_decode_args& args, const SequenceTable& table, int64_t n,
                       SlotValues& slots, SlotValues& records) {
  const DecodeRow row = decode_row(d, args, table, n);
  if (!row.active) return;
  const char* const target = present(args.write_slots) ? "write_slots" : "slots";
  if (!row.fresh) slots.reads(n, row.start_slot);
  if (d.mode == KDA_DECODE_RECORDS) {
    if (d.fold) slots.writes(target, n, row.start_slot);
    records.writes(present(args.records.record_rows) ? "records.record_rows" : target, n, row.record);
    return;
  }
  const int64_t stored = d.store == KDA_STORE_PER_TOKEN ? row.span.length : 1;
  for (int64_t t = 0; t < std::max<int64_t>(stored, row.fresh ? 1 : 0); ++t) {
    slots.writes(target, n, store_slot(d, args, n, t));
  }
}

Status check_decode_values(const kda_decode_desc& d, const kda_decode_args& args, const kda_tensor& token, int row_dims) {
  TokenShape shape;
  KDA_RETURN_IF_ERROR(check_sequences(args.sequences, "q", token, row_dims, d.max_tokens, d.max_sequences, shape));
  KDA_RETURN_IF_ERROR(check_offset_values(args.sequences, shape));
  const SequenceTable table(args.sequences, token, row_dims);
  const int64_t columns = d.mode == KDA_DECODE_COLUMNS ? d.width : 1;
  SlotValues slots(args.state.shape[0], d.null_slot);
  SlotValues records(present(args.records.count) ? args.records.count.shape[0] : 0, -1);
  for (int64_t n = 0; n < table.active(); ++n) {
    if (present(args.slots)) KDA_RETURN_IF_ERROR(slots.check_range("slots", args.slots, n, columns));
    if (present(args.write_slots))
      KDA_RETURN_IF_ERROR(slots.check_range("write_slots", args.write_slots, n, columns));
    if (present(args.records.record_rows)) {
      KDA_RETURN_IF_ERROR(records.check_range("records.record_rows", args.records.record_rows, n, 1));
    }
    KDA_RETURN_IF_ERROR(check_decode_counts(d, args, table, n));
    note_decode_slots(d, args, table, n, slots, records);
  }
  KDA_RETURN_IF_ERROR(slots.check_apart());
  KDA_RETURN_IF_ERROR(records.check_apart());
  KDA_RETURN_IF_ERROR(check_gate_values(d.attention, args.sequences, args.gate));
  if (present(args.out_rows)) return check_row_values(args.out_rows, args.out.shape[0]);
  return {};
}

void visit_decode(const kda_decode_args& args, const TensorVisitor& visit) {
  visit("q", args.q, false);
  visit_inputs(args, visit);
  visit("state", args.state, true);
  visit("slots", args.slots, false);
  visit("write_slots", args.write_slots, false);
  visit("accepted", args.accepted, false);
  visit("has_initial_state", args.has_initial_state, false);
  visit("records.u", args.records.u, true);
  visit("records.kg", args.records.kg, true);
  visit("records.count", args.records.count, true);
  visit("records.record_rows", args.records.record_rows, false);
  visit("out", args.out, true);
  visit("out_rows", args.out_rows, false);
}

constexpr const char* kPartNames[3][3] = {{"x[0]", "x[1]", "x[2]"},
                                          {"conv_weight[0]", "conv_weight[1]", "conv_weight[2]"},
                                          {"conv_state[0]", "conv_state[1]", "conv_state[2]"}};

}  // namespace

Status Decode::validate(const kda_decode_desc& d, const kda_decode_args& args) {
  const kda_attention_spec& a = d.attention;
  TokenShape shape;
  KDA_RETURN_IF_ERROR(check_sequences(args.sequences, "q", args.q, 3, d.max_tokens, d.max_sequences, shape));
  KDA_RETURN_IF_ERROR(check_attention_tokens(a, shape, &args.q, &args.k, &args.v, args.gate, args.beta));
  KDA_RETURN_IF_ERROR(check_gate_parameters(a, args.A_log, args.dt_bias));
  KDA_RETURN_IF_ERROR(check_decode_rows(d, args, shape.sequences));
  return check_out("out", args.out, args.out_rows, shape, a.out_dtype, {a.num_value_heads, a.value_dim});
}

Status Decode::check_values(const kda_decode_desc& d, const kda_decode_args& args) {
  return check_decode_values(d, args, args.q, 3);
}

void Decode::visit_tensors(const kda_decode_args& args, const TensorVisitor& visit) { visit_decode(args, visit); }

Status Commit::validate(const kda_commit_desc& d, const kda_commit_args& args) {
  const kda_attention_spec& a = d.attention;
  KDA_RETURN_IF_ERROR(check_gate_parameters(a, args.A_log, args.dt_bias));
  if (!present(args.slots) || args.slots.rank < 1) return invalid_argument("slots: wanted int32 or int64 [N], got ", describe(args.slots));
  const int64_t n = args.slots.shape[0];
  if (n > d.max_sequences) return invalid_argument("slots: wanted at most max_sequences = ", d.max_sequences, ", got ", n);
  KDA_RETURN_IF_ERROR(check_index("slots", args.slots, n));
  KDA_RETURN_IF_ERROR(check_state("state", args.state, kAny, a, {a.state_dtype}));
  KDA_RETURN_IF_ERROR(check_tensor("accepted", args.accepted, {KDA_INT32}, {n}));
  if (present(args.num_active)) KDA_RETURN_IF_ERROR(check_tensor("num_active", args.num_active, {KDA_INT32}, {1}));
  KDA_RETURN_IF_ERROR(check_records(a, d.width, args.records, n, args.state.shape[0]));
  for (int i = 0; i < 3; ++i) {
    if (d.conv_width == 0 || i >= d.conv_parts) {
      KDA_RETURN_IF_ERROR(check_absent(kPartNames[2][i], args.conv_state[i], "the plan has no such conv part"));
      continue;
    }
    const int64_t qk = a.num_heads * a.key_dim, v = a.num_value_heads * a.value_dim;
    const int64_t channels = d.conv_parts == 1 ? 2 * qk + v : (i < 2 ? qk : v);
    KDA_RETURN_IF_ERROR(check_conv_state(kPartNames[2][i], args.conv_state[i], d.conv_layout, channels,
                                         d.conv_width - 1 + d.width, d.conv_dtype, args.state.shape[0]));
  }
  return {};
}

Status Commit::check_values(const kda_commit_desc& d, const kda_commit_args& args) {
  const int64_t count = args.slots.shape[0];
  KDA_RETURN_IF_ERROR(check_active_value(args.num_active, count));
  const int64_t active = active_count(args.num_active, count);
  SlotValues slots(args.state.shape[0], d.null_slot), records(args.records.count.shape[0], -1);
  for (int64_t n = 0; n < active; ++n) {
    KDA_RETURN_IF_ERROR(slots.check_range("slots", args.slots, n, 1));
    if (present(args.records.record_rows)) {
      KDA_RETURN_IF_ERROR(records.check_range("records.record_rows", args.records.record_rows, n, 1));
    }
    const int64_t slot = index_row(args.slots, n)[0];
    if (!slot_is_live(slot, args.state.shape[0], d.null_slot)) continue;
    const int64_t row = record_row(args.records.count, args.records.record_rows, slot, n);
    KDA_RETURN_IF_ERROR(check_record_values(args.records.count, row, args.accepted, n, d.width));
    slots.writes("slots", n, slot);
    records.writes("records.record_rows", n, row);
  }
  KDA_RETURN_IF_ERROR(slots.check_apart());
  return records.check_apart();
}

void Commit::visit_tensors(const kda_commit_args& args, const TensorVisitor& visit) {
  visit("A_log", args.A_log, false);
  visit("dt_bias", args.dt_bias, false);
  visit("state", args.state, true);
  visit("slots", args.slots, false);
  visit("accepted", args.accepted, false);
  visit("num_active", args.num_active, false);
  visit("records.u", args.records.u, false);
  visit("records.kg", args.records.kg, false);
  visit("records.count", args.records.count, true);
  visit("records.record_rows", args.records.record_rows, false);
  for (int i = 0; i < 3; ++i) visit(kPartNames[2][i], args.conv_state[i], true);
}

Status DecodeStep::validate(const kda_decode_step_desc& d, const kda_decode_step_args& args) {
  const kda_attention_spec& a = d.decode.attention;
  const kda_decode_args& dec = args.decode;
  TokenShape shape;
  KDA_RETURN_IF_ERROR(
      check_sequences(dec.sequences, "x[0]", args.x[0], 2, d.decode.max_tokens, d.decode.max_sequences, shape));
  KDA_RETURN_IF_ERROR(check_absent("q", dec.q, "decode_step takes raw projections x"));
  KDA_RETURN_IF_ERROR(check_absent("k", dec.k, "decode_step takes raw projections x"));
  KDA_RETURN_IF_ERROR(check_absent("v", dec.v, "decode_step takes raw projections x"));
  KDA_RETURN_IF_ERROR(check_attention_tokens(a, shape, nullptr, nullptr, nullptr, dec.gate, dec.beta));
  KDA_RETURN_IF_ERROR(check_gate_parameters(a, dec.A_log, dec.dt_bias));
  KDA_RETURN_IF_ERROR(check_decode_rows(d.decode, dec, shape.sequences));
  const int64_t qk = a.num_heads * a.key_dim, v = a.num_value_heads * a.value_dim;
  const bool records = d.decode.mode == KDA_DECODE_RECORDS;
  for (int i = 0; i < 3; ++i) {
    if (i >= d.conv_parts) {
      KDA_RETURN_IF_ERROR(check_absent(kPartNames[0][i], args.x[i], "the plan has one merged part"));
      KDA_RETURN_IF_ERROR(check_absent(kPartNames[1][i], args.conv_weight[i], "the plan has one merged part"));
      KDA_RETURN_IF_ERROR(check_absent(kPartNames[2][i], args.conv_state[i], "the plan has one merged part"));
      continue;
    }
    const int64_t channels = d.conv_parts == 1 ? 2 * qk + v : (i < 2 ? qk : v);
    const int64_t columns = d.conv_width - 1 + d.decode.width - (records ? 0 : 1);
    KDA_RETURN_IF_ERROR(check_token_tensor(kPartNames[0][i], args.x[i], shape, {a.io_dtype}, {channels}, 1));
    KDA_RETURN_IF_ERROR(check_conv_weight(kPartNames[1][i], args.conv_weight[i], channels, d.conv_width));
    KDA_RETURN_IF_ERROR(check_conv_state(kPartNames[2][i], args.conv_state[i], d.conv_layout, channels, columns,
                                         d.conv_dtype, dec.state.shape[0]));
  }
  if (d.no_norm) {
    KDA_RETURN_IF_ERROR(check_absent("z", args.z, "the plan has no_norm"));
    KDA_RETURN_IF_ERROR(check_absent("norm_weight", args.norm_weight, "the plan has no_norm"));
  } else {
    KDA_RETURN_IF_ERROR(check_token_tensor("z", args.z, shape, {a.io_dtype}, {a.num_value_heads, a.value_dim}, 1));
    KDA_RETURN_IF_ERROR(check_parameter("norm_weight", args.norm_weight, a.value_dim));
  }
  return check_out("out", dec.out, dec.out_rows, shape, a.out_dtype, {a.num_value_heads, a.value_dim});
}

Status DecodeStep::check_values(const kda_decode_step_desc& d, const kda_decode_step_args& args) {
  return check_decode_values(d.decode, args.decode, args.x[0], 2);
}

void DecodeStep::visit_tensors(const kda_decode_step_args& args, const TensorVisitor& visit) {
  visit_decode(args.decode, visit);
  for (int i = 0; i < 3; ++i) {
    visit(kPartNames[0][i], args.x[i], false);
    visit(kPartNames[1][i], args.conv_weight[i], false);
    visit(kPartNames[2][i], args.conv_state[i], true);
  }
  visit("z", args.z, false);
  visit("norm_weight", args.norm_weight, false);
}

}  // namespace kda

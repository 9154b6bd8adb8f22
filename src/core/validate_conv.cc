// Host checks of conv and gated norm runs (spec W, L-7.4).
#include "core/check_slots.h"

namespace kda {
namespace {

struct PartNames {
  const char *x, *weight, *bias, *state, *out;
};
constexpr PartNames kNames[3] = {{"x[0]", "weight[0]", "bias[0]", "state[0]", "out[0]"},
                                 {"x[1]", "weight[1]", "bias[1]", "state[1]", "out[1]"},
                                 {"x[2]", "weight[2]", "bias[2]", "state[2]", "out[2]"}};

// Tensors of part i.
Status check_conv_part(const kda_conv_desc& d, const kda_conv_args& args, const TokenShape& shape, int i) {
  const PartNames& names = kNames[i];
  if (i >= d.parts) {
    const char* const why = "the plan has one merged part";
    KDA_RETURN_IF_ERROR(check_absent(names.x, args.x[i], why));
    KDA_RETURN_IF_ERROR(check_absent(names.weight, args.weight[i], why));
    KDA_RETURN_IF_ERROR(check_absent(names.bias, args.bias[i], why));
    KDA_RETURN_IF_ERROR(check_absent(names.state, args.state[i], why));
    return check_absent(names.out, args.out[i], why);
  }
  KDA_RETURN_IF_ERROR(check_token_tensor(names.x, args.x[i], shape, {d.io_dtype}, {d.channels[i]}, 1));
  KDA_RETURN_IF_ERROR(check_conv_weight(names.weight, args.weight[i], d.channels[i], d.width));
  if (present(args.bias[i])) KDA_RETURN_IF_ERROR(check_parameter(names.bias, args.bias[i], d.channels[i]));
  if (present(args.state[0])) {
    int64_t columns = d.width - 1;
    if (d.mode == KDA_CONV_COLUMNS) columns += d.verify_width - 1;
    if (d.mode == KDA_CONV_RECORDS) columns += d.verify_width;
    KDA_RETURN_IF_ERROR(check_conv_state(names.state, args.state[i], d.layout, d.channels[i], columns, d.state_dtype,
                                         i == 0 ? kAny : args.state[0].shape[0]));
  } else {
    KDA_RETURN_IF_ERROR(check_absent(names.state, args.state[i], "state[0] is absent"));
  }
  return check_out(names.out, args.out[i], args.out_rows, shape, d.out_dtype, {d.channels[i]});
}

// Slots, flags and counts of the rows.
Status check_conv_rows(const kda_conv_desc& d, const kda_conv_args& args, int64_t n) {
  if (present(args.slots)) {
    if (!present(args.state[0])) return invalid_argument("state[0]: wanted a pool for the given slots, got none");
    KDA_RETURN_IF_ERROR(check_index("slots", args.slots, n));
  } else if (present(args.state[0]) && args.state[0].shape[0] != n) {
    return invalid_argument("state[0]: wanted ", n, " packed windows without slots, got ", args.state[0].shape[0]);
  }
  if (present(args.write_slots)) {
    if (!present(args.slots))
      return invalid_argument("write_slots: wanted none without slots, got ", describe(args.write_slots));
    KDA_RETURN_IF_ERROR(check_index("write_slots", args.write_slots, n));
  }
  if (d.initial_state == KDA_INITIAL_FLAGS) {
    KDA_RETURN_IF_ERROR(check_flags("has_initial_state", args.has_initial_state, n));
  } else {
    KDA_RETURN_IF_ERROR(
        check_absent("has_initial_state", args.has_initial_state, "the plan's initial_state is not flags"));
  }
  if (present(args.accepted)) KDA_RETURN_IF_ERROR(check_tensor("accepted", args.accepted, {KDA_INT32}, {n}));
  if (d.fold) {
    if (!present(args.accepted)) return invalid_argument("accepted: wanted int32 [", n, "] with fold, got none");
    KDA_RETURN_IF_ERROR(check_tensor("record_count", args.record_count, {KDA_INT32}, {kAny}));
    if (present(args.record_rows)) {
      KDA_RETURN_IF_ERROR(check_index("record_rows", args.record_rows, n));
    } else if (args.record_count.shape[0] < args.state[0].shape[0]) {
      return invalid_argument("record_count: wanted one per slot (", args.state[0].shape[0], ") or record_rows, got ",
                              args.record_count.shape[0]);
    }
  }
  return {};
}

Status check_conv_checkpoints(const kda_conv_desc& d, const kda_conv_args& args, int64_t n) {
  if (present(args.checkpoint_offsets) != present(args.checkpoint_slots)) {
    return invalid_argument("checkpoint_offsets: wanted offsets and checkpoint_slots, or neither; got one");
  }
  if (!present(args.checkpoint_offsets)) return {};
  if (args.checkpoint_offsets.rank != 2 || args.checkpoint_offsets.shape[1] > d.max_checkpoints) {
    return invalid_argument("checkpoint_offsets: wanted shape [", n, ", at most ", d.max_checkpoints, "], got ",
                            shape_string(args.checkpoint_offsets));
  }
  const int64_t count = args.checkpoint_offsets.shape[1];
  if (!present(args.slots))
    return invalid_argument("checkpoint_slots: wanted a conv pool with slots, got packed windows");
  KDA_RETURN_IF_ERROR(check_index("checkpoint_offsets", args.checkpoint_offsets, n, count));
  return check_tensor("checkpoint_slots", args.checkpoint_slots, {KDA_INT32, KDA_INT64}, {n, count});
}

// Counts of row n in checked mode: tokens, accepted, recorded.
Status check_conv_counts(const kda_conv_desc& d, const kda_conv_args& args, const SequenceTable& table, int64_t n) {
  if (d.mode == KDA_CONV_PREFILL) return {};
  KDA_RETURN_IF_ERROR(check_length_value(table, n, d.verify_width));
  if (d.mode == KDA_CONV_COLUMNS) return check_accepted_value(args.accepted, n, d.verify_width);
  if (!d.fold) return {};
  const int64_t slot = present(args.slots) ? index_row(args.slots, n)[0] : n;
  if (!slot_is_live(slot, args.state[0].shape[0], d.null_slot)) return {};
  const int64_t row = record_row(args.record_count, args.record_rows, slot, n);
  return check_record_values(args.record_count, row, args.accepted, n, d.verify_width);
}

}  // namespace

Status Conv::validate(const kda_conv_desc& d, const kda_conv_args& args) {
  TokenShape shape;
  KDA_RETURN_IF_ERROR(check_sequences(args.sequences, "x[0]", args.x[0], 2, d.max_tokens, d.max_sequences, shape));
  const int64_t n = shape.sequences;
  const bool states = present(args.state[0]);
  if (!states && (d.mode != KDA_CONV_PREFILL || d.initial_state != KDA_INITIAL_NONE)) {
    return invalid_argument("state[0]: wanted a conv pool, got none");
  }
  for (int i = 0; i < 3; ++i) KDA_RETURN_IF_ERROR(check_conv_part(d, args, shape, i));
  KDA_RETURN_IF_ERROR(check_conv_rows(d, args, n));
  return check_conv_checkpoints(d, args, n);
}

Status Conv::check_values(const kda_conv_desc& d, const kda_conv_args& args) {
  TokenShape shape;
  KDA_RETURN_IF_ERROR(check_sequences(args.sequences, "x[0]", args.x[0], 2, d.max_tokens, d.max_sequences, shape));
  KDA_RETURN_IF_ERROR(check_offset_values(args.sequences, shape));
  const SequenceTable table(args.sequences, args.x[0], 2);
  for (int64_t n = 0; n < table.active(); ++n) KDA_RETURN_IF_ERROR(check_conv_counts(d, args, table, n));
  KDA_RETURN_IF_ERROR(check_checkpoint_values(args.checkpoint_offsets, table));
  KDA_RETURN_IF_ERROR(check_pool_values({{d.initial_state, d.null_slot},
                                         args.state[0],
                                         args.slots,
                                         args.write_slots,
                                         args.has_initial_state,
                                         true,
                                         args.checkpoint_offsets,
                                         args.checkpoint_slots},
                                        table));
  if (present(args.out_rows)) return check_row_values(args.out_rows, args.out[0].shape[0]);
  return {};
}

void Conv::visit_tensors(const kda_conv_args& args, const TensorVisitor& visit) {
  for (int i = 0; i < 3; ++i) {
    visit(kNames[i].x, args.x[i], false);
    visit(kNames[i].weight, args.weight[i], false);
    visit(kNames[i].bias, args.bias[i], false);
    visit(kNames[i].state, args.state[i], true);
    visit(kNames[i].out, args.out[i], true);
  }
  visit_sequences(args.sequences, visit);
  visit("slots", args.slots, false);
  visit("write_slots", args.write_slots, false);
  visit("has_initial_state", args.has_initial_state, false);
  visit("accepted", args.accepted, false);
  visit("record_count", args.record_count, false);
  visit("record_rows", args.record_rows, false);
  visit("checkpoint_offsets", args.checkpoint_offsets, false);
  visit("checkpoint_slots", args.checkpoint_slots, false);
  visit("out_rows", args.out_rows, false);
}

Status GatedNorm::validate(const kda_gated_norm_desc& d, const kda_gated_norm_args& args) {
  TokenShape shape;
  KDA_RETURN_IF_ERROR(check_sequences({}, "o", args.o, 3, d.max_tokens, INT64_MAX, shape));
  const auto inner = {d.num_value_heads, d.value_dim};
  KDA_RETURN_IF_ERROR(check_token_tensor("o", args.o, shape, {d.io_dtype}, inner, 1));
  KDA_RETURN_IF_ERROR(check_token_tensor("z", args.z, shape, {d.io_dtype}, inner, 1));
  KDA_RETURN_IF_ERROR(check_parameter("weight", args.weight, d.value_dim));
  return check_token_tensor("out", args.out, shape, {d.out_dtype}, inner, 1);
}

Status GatedNorm::check_values(const kda_gated_norm_desc&, const kda_gated_norm_args&) { return {}; }

void GatedNorm::visit_tensors(const kda_gated_norm_args& args, const TensorVisitor& visit) {
  visit("o", args.o, false);
  visit("z", args.z, false);
  visit("weight", args.weight, false);
  visit("out", args.out, true);
}

Status ResidualNorm::validate(const kda_residual_norm_desc& d, const kda_residual_norm_args& args) {
  KDA_RETURN_IF_ERROR(check_tensor("residual", args.residual, {d.io_dtype}, {kAny, d.hidden}, 1));
  const int64_t T = args.residual.shape[0];
  if (T > d.max_tokens) {
    return invalid_argument("residual: wanted at most max_tokens = ", d.max_tokens, " rows, got ", T);
  }
  if (present(args.add)) KDA_RETURN_IF_ERROR(check_tensor("add", args.add, {d.io_dtype}, {T, d.hidden}, 1));
  if (present(args.weight)) KDA_RETURN_IF_ERROR(check_parameter("weight", args.weight, d.hidden));
  return check_tensor("out", args.out, {d.out_dtype}, {T, d.hidden}, 1);
}

Status ResidualNorm::check_values(const kda_residual_norm_desc&, const kda_residual_norm_args&) { return {}; }

void ResidualNorm::visit_tensors(const kda_residual_norm_args& args, const TensorVisitor& visit) {
  visit("residual", args.residual, present(args.add));
  visit("add", args.add, false);
  visit("weight", args.weight, false);
  visit("out", args.out, true);
}

}  // namespace kda

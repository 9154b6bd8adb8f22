// Host checks of prefill and segment-map runs (spec, K-1, S-9).
#include "core/check_slots.h"

namespace kda {
namespace {

Status check_states(const kda_prefill_desc& d, const kda_prefill_args& args, int64_t n) {
  const kda_attention_spec& a = d.attention;
  const bool slots = present(args.slots);
  if (slots) KDA_RETURN_IF_ERROR(check_index("slots", args.slots, n));
  if (present(args.write_slots)) {
    if (!slots) return invalid_argument("write_slots: wanted none without slots, got ", describe(args.write_slots));
    KDA_RETURN_IF_ERROR(check_index("write_slots", args.write_slots, n));
  }
  if (d.initial_state == KDA_INITIAL_FLAGS) {
    KDA_RETURN_IF_ERROR(check_flags("has_initial_state", args.has_initial_state, n));
  } else {
    KDA_RETURN_IF_ERROR(check_absent("has_initial_state", args.has_initial_state, "the plan's initial_state is not flags"));
  }
  if (present(args.state)) {
    KDA_RETURN_IF_ERROR(check_state("state", args.state, slots ? kAny : n, a, {a.state_dtype}));
  } else {
    if (slots) return invalid_argument("state: wanted a pool for the given slots, got none");
    if (d.initial_state != KDA_INITIAL_NONE) return invalid_argument("state: wanted initial states (plan field initial_state), got none");
  }
  if (present(args.final_state)) {
    if (args.no_final_state) return invalid_argument("final_state: wanted none with no_final_state, got ", describe(args.final_state));
    KDA_RETURN_IF_ERROR(check_state("final_state", args.final_state, n, a, {a.state_dtype, KDA_FP32}));
  }
  return {};
}

Status check_checkpoints(const kda_prefill_desc& d, const kda_prefill_args& args, int64_t n) {
  const bool slots = present(args.checkpoint_slots), packed = present(args.checkpoint_states);
  if (slots && packed) return invalid_argument("checkpoint_states: wanted slots or packed states, got both");
  if (present(args.checkpoint_offsets) != (slots || packed)) {
    return invalid_argument("checkpoint_offsets: wanted offsets and a destination, or neither; got ",
                            present(args.checkpoint_offsets) ? "offsets alone" : "a destination alone");
  }
  if (!present(args.checkpoint_offsets)) return {};
  if (args.checkpoint_offsets.rank != 2) {
    return invalid_argument("checkpoint_offsets: wanted shape [", n, ", Ck], got ", shape_string(args.checkpoint_offsets));
  }
  const int64_t columns = args.checkpoint_offsets.shape[1];
  KDA_RETURN_IF_ERROR(check_index("checkpoint_offsets", args.checkpoint_offsets, n, columns));
  if (columns > d.max_checkpoints) {
    return invalid_argument("checkpoint_offsets: wanted at most max_checkpoints = ", d.max_checkpoints,
                            " per sequence, got ", columns);
  }
  if (slots) {
    if (!present(args.slots)) return invalid_argument("checkpoint_slots: wanted a state pool with slots, got packed states");
    return check_tensor("checkpoint_slots", args.checkpoint_slots, {KDA_INT32, KDA_INT64}, {n, columns});
  }
  const kda_attention_spec& a = d.attention;
  return check_tensor("checkpoint_states", args.checkpoint_states, {a.state_dtype, KDA_FP32},
                      {n, columns, a.num_value_heads, a.value_dim, a.key_dim}, 3);
}

Status check_stages(const kda_tensor& stages) {
  if (!present(stages)) return {};
  KDA_RETURN_IF_ERROR(check_tensor("stages", stages, {KDA_UINT8}, {kAny}, 1));
  if (reinterpret_cast<uintptr_t>(stages.data) % KDA_WORKSPACE_ALIGNMENT == 0) return {};
  return invalid_argument("stages: wanted memory aligned to ", KDA_WORKSPACE_ALIGNMENT, " bytes, got an address that is not");
}

Status check_chunk_tables(const kda_prefill_args& args, int64_t n) {
  if (present(args.chunk_indices) != present(args.chunk_offsets)) {
    return invalid_argument("chunk_indices: wanted chunk_indices and chunk_offsets, or neither; got one");
  }
  if (!present(args.chunk_indices)) return {};
  KDA_RETURN_IF_ERROR(check_tensor("chunk_indices", args.chunk_indices, {KDA_INT32, KDA_INT64}, {kAny, 2}));
  return check_tensor("chunk_offsets", args.chunk_offsets, {KDA_INT32, KDA_INT64}, {n + 1});
}

}  // namespace

Status Prefill::validate(const kda_prefill_desc& d, const kda_prefill_args& args) {
  const kda_attention_spec& a = d.attention;
  TokenShape shape;
  KDA_RETURN_IF_ERROR(check_sequences(args.sequences, "q", args.q, 3, d.max_tokens, d.max_sequences, shape));
  KDA_RETURN_IF_ERROR(check_attention_tokens(a, shape, &args.q, &args.k, &args.v, args.gate, args.beta));
  KDA_RETURN_IF_ERROR(check_gate_parameters(a, args.A_log, args.dt_bias));
  KDA_RETURN_IF_ERROR(check_states(d, args, shape.sequences));
  KDA_RETURN_IF_ERROR(check_checkpoints(d, args, shape.sequences));
  KDA_RETURN_IF_ERROR(check_chunk_tables(args, shape.sequences));
  KDA_RETURN_IF_ERROR(check_stages(args.stages));
  return check_out("out", args.out, args.out_rows, shape, a.out_dtype, {a.num_value_heads, a.value_dim});
}

Status Prefill::check_values(const kda_prefill_desc& d, const kda_prefill_args& args) {
  TokenShape shape;
  KDA_RETURN_IF_ERROR(check_sequences(args.sequences, "q", args.q, 3, d.max_tokens, d.max_sequences, shape));
  KDA_RETURN_IF_ERROR(check_offset_values(args.sequences, shape));
  const SequenceTable table(args.sequences, args.q, 3);
  const bool stores = !args.no_final_state && !present(args.final_state);
  KDA_RETURN_IF_ERROR(check_checkpoint_values(args.checkpoint_offsets, table));
  KDA_RETURN_IF_ERROR(check_pool_values({{d.initial_state, d.null_slot},
                                         args.state,
                                         args.slots,
                                         args.write_slots,
                                         args.has_initial_state,
                                         stores,
                                         args.checkpoint_offsets,
                                         args.checkpoint_slots},
                                        table));
  KDA_RETURN_IF_ERROR(check_chunk_values(args.sequences, args.q, args.chunk_indices, args.chunk_offsets));
  KDA_RETURN_IF_ERROR(check_gate_values(d.attention, args.sequences, args.gate));
  if (present(args.out_rows)) return check_row_values(args.out_rows, args.out.shape[0]);
  return {};
}

void Prefill::visit_tensors(const kda_prefill_args& args, const TensorVisitor& visit) {
  visit("q", args.q, false);
  visit_inputs(args, visit);
  visit("state", args.state, true);
  visit("slots", args.slots, false);
  visit("write_slots", args.write_slots, false);
  visit("has_initial_state", args.has_initial_state, false);
  visit("final_state", args.final_state, true);
  visit("checkpoint_offsets", args.checkpoint_offsets, false);
  visit("checkpoint_slots", args.checkpoint_slots, false);
  visit("checkpoint_states", args.checkpoint_states, true);
  visit("chunk_indices", args.chunk_indices, false);
  visit("chunk_offsets", args.chunk_offsets, false);
  visit("out", args.out, true);
  visit("out_rows", args.out_rows, false);
  visit("stages", args.stages, false);
}

Status SegmentSummary::validate(const kda_prefill_desc& d, const kda_segment_summary_args& args) {
  const kda_attention_spec& a = d.attention;
  TokenShape shape;
  KDA_RETURN_IF_ERROR(check_sequences(args.sequences, "k", args.k, 3, d.max_tokens, d.max_sequences, shape));
  const bool has_q = present(args.q);
  if (present(args.stages) && !has_q) return invalid_argument("q: wanted the queries with stages, got none");
  KDA_RETURN_IF_ERROR(
      check_attention_tokens(a, shape, has_q ? &args.q : nullptr, &args.k, &args.v, args.gate, args.beta));
  KDA_RETURN_IF_ERROR(check_gate_parameters(a, args.A_log, args.dt_bias));
  KDA_RETURN_IF_ERROR(check_stages(args.stages));
  return check_tensor("summary", args.summary, {KDA_FP32},
                      {shape.sequences, a.num_value_heads, a.value_dim + a.key_dim, a.key_dim}, 3);
}

Status SegmentSummary::check_values(const kda_prefill_desc& d, const kda_segment_summary_args& args) {
  TokenShape shape;
  KDA_RETURN_IF_ERROR(check_sequences(args.sequences, "k", args.k, 3, d.max_tokens, d.max_sequences, shape));
  KDA_RETURN_IF_ERROR(check_offset_values(args.sequences, shape));
  return check_gate_values(d.attention, args.sequences, args.gate);
}

void SegmentSummary::visit_tensors(const kda_segment_summary_args& args, const TensorVisitor& visit) {
  visit("q", args.q, false);
  visit_inputs(args, visit);
  visit("summary", args.summary, true);
  visit("stages", args.stages, true);
}

Status SegmentMerge::validate(const kda_segment_merge_desc& d, const kda_segment_merge_args& args) {
  const int64_t hv = d.num_value_heads, k = d.key_dim, v = d.value_dim;
  if (present(args.initial_state)) {
    KDA_RETURN_IF_ERROR(check_tensor("initial_state", args.initial_state, {KDA_FP32}, {hv, v, k}, 3));
  }
  KDA_RETURN_IF_ERROR(check_tensor("summaries", args.summaries, {KDA_FP32}, {kAny, hv, v + k, k}, 3));
  const int64_t p = args.summaries.shape[0];
  if (p > d.max_segments) {
    return invalid_argument("summaries: wanted at most max_segments = ", d.max_segments, ", got ", p);
  }
  if (present(args.present)) KDA_RETURN_IF_ERROR(check_flags("present", args.present, p));
  if (present(args.start_states)) {
    KDA_RETURN_IF_ERROR(check_tensor("start_states", args.start_states, {KDA_FP32}, {p, hv, v, k}, 3));
  }
  if (present(args.final_state)) {
    KDA_RETURN_IF_ERROR(check_tensor("final_state", args.final_state, {KDA_FP32}, {hv, v, k}, 3));
  }
  return {};
}

Status SegmentMerge::check_values(const kda_segment_merge_desc&, const kda_segment_merge_args&) { return {}; }

void SegmentMerge::visit_tensors(const kda_segment_merge_args& args, const TensorVisitor& visit) {
  visit("initial_state", args.initial_state, false);
  visit("summaries", args.summaries, false);
  visit("present", args.present, false);
  visit("start_states", args.start_states, true);
  visit("final_state", args.final_state, true);
}

}  // namespace kda

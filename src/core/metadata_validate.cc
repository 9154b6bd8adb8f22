// Host checks of one metadata run (spec G-6, M-27): nothing is written unless all of them pass.
#include <algorithm>

#include "core/metadata.h"

namespace kda {
namespace {

constexpr kda_device kHost{KDA_CPU, 0};

Status check_vector(const char* name, const kda_tensor& t, kda_dtype dtype, int64_t n, bool required) {
  if (!present(t) && !required) return {};
  KDA_RETURN_IF_ERROR(check_tensor(name, t, {dtype}, {n}));
  if (n > 1 && t.strides[0] < 1) return invalid_argument(name, ": wanted a stride >= 1, got ", describe(t));
  return {};
}

// The names of one step's vectors, on the device and on the host.
struct StepNames {
  const char *query_start_loc, *computed, *has_state, *prefilling, *drafts, *num_active, *state;
};
constexpr StepNames kDeviceNames{"query_start_loc",
                                 "computed",
                                 "has_state",
                                 "prefilling",
                                 "drafts",
                                 "num_active",
                                 "step: wanted computed or has_state, "};
constexpr StepNames kHostNames{"host.query_start_loc",
                               "host.computed",
                               "host.has_state",
                               "host.prefilling",
                               "host.drafts",
                               "host.num_active",
                               "host: wanted computed or has_state, "};

Status check_step(const kda_step& s, const StepNames& names, const kda_device& device, int64_t n) {
  const struct {
    const char* name;
    const kda_tensor& tensor;
  } views[] = {{names.query_start_loc, s.query_start_loc},
               {names.computed, s.computed},
               {names.has_state, s.has_state},
               {names.prefilling, s.prefilling},
               {names.drafts, s.drafts}};
  for (const auto& view : views) KDA_RETURN_IF_ERROR(check_view(view.name, view.tensor, device));
  // The active count may live on either side.
  KDA_RETURN_IF_ERROR(
      check_view(names.num_active, s.num_active, s.num_active.device.type == KDA_CPU ? kHost : device));
  if (present(s.query_start_loc) && s.query_start_loc.rank != 1) {
    return invalid_argument(names.query_start_loc, ": wanted shape [N+1], got ", shape_string(s.query_start_loc));
  }
  KDA_RETURN_IF_ERROR(check_index(names.query_start_loc, s.query_start_loc, n + 1));
  if (present(s.computed) == present(s.has_state)) {
    return invalid_argument(names.state, "got ", present(s.computed) ? "both" : "neither");
  }
  KDA_RETURN_IF_ERROR(check_vector(names.computed, s.computed, KDA_INT32, n, false));
  KDA_RETURN_IF_ERROR(check_vector(names.has_state, s.has_state, KDA_BOOL, n, false));
  KDA_RETURN_IF_ERROR(check_vector(names.prefilling, s.prefilling, KDA_BOOL, n, false));
  KDA_RETURN_IF_ERROR(check_vector(names.drafts, s.drafts, KDA_INT32, n, false));
  return check_vector(names.num_active, s.num_active, KDA_INT32, 1, false);
}

// The host copy brings what the device's step brings: with less, its classes would be others.
Status check_host_step(const kda_metadata_args& args, int64_t n) {
  const kda_step &host = args.host, &step = args.step;
  KDA_RETURN_IF_ERROR(check_step(host, kHostNames, kHost, n));
  const struct {
    const char* name;
    bool host, step;
  } pairs[] = {{"host.prefilling", present(host.prefilling), present(step.prefilling)},
               {"host.drafts", present(host.drafts), present(step.drafts)},
               {"host.num_active", present(host.num_active), present(step.num_active)}};
  for (const auto& pair : pairs) {
    if (pair.host == pair.step) continue;
    return invalid_argument(pair.name, ": wanted ",
                            pair.step ? "a copy of the step's vector" : "none, as in the step", ", got ",
                            pair.host ? "one" : "none");
  }
  return check_host_offsets("host.query_start_loc", host.query_start_loc, args.num_tokens);
}

struct TableCheck {
  const char* name;
  const kda_tensor* tensor;
  kda_dtype dtype;
  int64_t rows;
  int64_t columns;  // 0 = a vector
};

Status check_table(const TableCheck& c, const kda_device& device) {
  const kda_tensor& t = *c.tensor;
  if (!present(t)) return {};
  KDA_RETURN_IF_ERROR(check_view(c.name, t, device));
  const bool same = t.dtype == c.dtype && t.rank == (c.columns > 0 ? 2 : 1) && t.shape[0] >= c.rows &&
                    (c.columns == 0 || t.shape[1] == c.columns) && inner_dense(t, t.rank);
  if (same) return {};
  return invalid_argument(c.name, ": wanted dense ", dtype_name(c.dtype), " [>= ", c.rows,
                          c.columns > 0 ? str_cat(", ", c.columns) : "", "] (the plan's capacity), got ",
                          describe(t));
}

constexpr int kTables = 22;

void list_tables(const kda_metadata_desc& d, const kda_step_tables& t, kda_dtype offset, TableCheck (&out)[kTables]) {
  const int64_t n = d.max_sequences;
  const int64_t spec_tokens = std::min(d.max_tokens, n * d.width);
  const int64_t chunks = *chunk_bound(d.max_tokens, n, d.chunk);
  const TableCheck list[kTables] = {
      {"counts", &t.counts, KDA_INT32, KDA_METADATA_COUNTS, 0},
      {"prefill_rows", &t.prefill_rows, KDA_INT32, n, 0},
      {"decode_rows", &t.decode_rows, KDA_INT32, n, 0},
      {"spec_rows", &t.spec_rows, KDA_INT32, n, 0},
      {"prefill_begin", &t.prefill_begin, offset, n, 0},
      {"prefill_length", &t.prefill_length, offset, n, 0},
      {"decode_begin", &t.decode_begin, offset, n, 0},
      {"decode_length", &t.decode_length, offset, n, 0},
      {"spec_begin", &t.spec_begin, offset, n, 0},
      {"spec_length", &t.spec_length, offset, n, 0},
      {"non_spec_query_start_loc", &t.non_spec_query_start_loc, offset, n + 1, 0},
      {"spec_query_start_loc", &t.spec_query_start_loc, offset, n + 1, 0},
      {"prefill_query_start_loc", &t.prefill_query_start_loc, offset, n + 1, 0},
      {"non_spec_token_indx", &t.non_spec_token_indx, KDA_INT32, d.max_tokens, 0},
      {"spec_token_indx", &t.spec_token_indx, KDA_INT32, spec_tokens, 0},
      {"prefill_slots", &t.prefill_slots, KDA_INT32, n, 0},
      {"decode_slots", &t.decode_slots, KDA_INT32, n, 0},
      {"spec_slots", &t.spec_slots, KDA_INT32, n, d.width},
      {"has_initial_state", &t.has_initial_state, KDA_BOOL, n, 0},
      {"num_accepted", &t.num_accepted, KDA_INT32, n, 0},
      {"spec_sequence_masks", &t.spec_sequence_masks, KDA_BOOL, n, 0},
      {"chunk_indices", &t.chunk_indices, offset, chunks, 2},
  };
  std::copy(std::begin(list), std::end(list), std::begin(out));
}

Status check_tables(const kda_metadata_desc& desc, const kda_metadata_args& args, const kda_device& device,
                    AliasCheck& aliases) {
  const kda_step_tables& t = args.tables;
  TableCheck list[kTables];
  list_tables(desc, t, args.step.query_start_loc.dtype, list);
  for (const TableCheck& c : list) {
    KDA_RETURN_IF_ERROR(check_table(c, device));
    aliases.add(c.name, *c.tensor, true);
  }
  KDA_RETURN_IF_ERROR(check_table({"chunk_offsets", &t.chunk_offsets, KDA_INT64, desc.max_sequences + 1, 0}, device));
  aliases.add("chunk_offsets", t.chunk_offsets, true);
  if (present(t.chunk_indices) != present(t.chunk_offsets)) {
    return invalid_argument("chunk_indices, chunk_offsets: wanted both or neither, got one");
  }
  if (present(t.chunk_indices) && !present(t.prefill_query_start_loc)) {
    return invalid_argument("prefill_query_start_loc: wanted the table that chunk tables are built from, got none");
  }
  const bool wants_slots = present(t.prefill_slots) || present(t.decode_slots) || present(t.spec_slots);
  if (wants_slots && !present(args.slot_table)) {
    return invalid_argument("slot_table: wanted the table that slots are taken from, got none");
  }
  return {};
}

Status check_slot_table(const kda_tensor& t, int64_t n, int32_t width) {
  if (!present(t)) return {};
  KDA_RETURN_IF_ERROR(check_index("slot_table", t, n, width));
  if (t.rank == 2 && t.shape[1] > 1 && t.strides[1] < 1) {
    return invalid_argument("slot_table: wanted a column stride >= 1, got ", describe(t));
  }
  return {};
}

void add_step(const kda_step& s, const StepNames& names, AliasCheck& aliases) {
  aliases.add(names.query_start_loc, s.query_start_loc, false);
  aliases.add(names.computed, s.computed, false);
  aliases.add(names.has_state, s.has_state, false);
  aliases.add(names.prefilling, s.prefilling, false);
  aliases.add(names.drafts, s.drafts, false);
  aliases.add(names.num_active, s.num_active, false);
}

void add_inputs(const kda_metadata_args& args, AliasCheck& aliases) {
  add_step(args.step, kDeviceNames, aliases);
  add_step(args.host, kHostNames, aliases);
  aliases.add("accepted", args.accepted, false);
  aliases.add("slot_table", args.slot_table, false);
}

}  // namespace

Status validate_metadata(const kda_metadata_desc& desc, const kda_metadata_args& args, const kda_device& device) {
  const kda_tensor& cu = args.step.query_start_loc;
  if (!present(cu) || cu.rank != 1 || cu.shape[0] < 1) {
    return invalid_argument("query_start_loc: wanted int32 or int64 [N+1], got ", describe(cu));
  }
  const int64_t n = cu.shape[0] - 1;
  if (args.num_tokens < 0) return invalid_argument("num_tokens: wanted >= 0, got ", args.num_tokens);
  if (args.num_tokens > desc.max_tokens) {
    return invalid_argument("num_tokens: wanted at most max_tokens = ", desc.max_tokens, ", got ", args.num_tokens);
  }
  if (args.num_tokens > INT32_MAX) {
    return invalid_argument("num_tokens: wanted at most 2^31-1 (counts and token lists are int32), got ",
                            args.num_tokens);
  }
  if (n > desc.max_sequences) {
    return invalid_argument("query_start_loc: wanted at most max_sequences = ", desc.max_sequences, " rows, got ", n);
  }
  KDA_RETURN_IF_ERROR(check_step(args.step, kDeviceNames, device, n));
  KDA_RETURN_IF_ERROR(check_view("accepted", args.accepted, device));
  KDA_RETURN_IF_ERROR(check_vector("accepted", args.accepted, KDA_INT32, n, false));
  KDA_RETURN_IF_ERROR(check_view("slot_table", args.slot_table, device));
  KDA_RETURN_IF_ERROR(check_slot_table(args.slot_table, n, desc.width));
  AliasCheck aliases;
  KDA_RETURN_IF_ERROR(check_tables(desc, args, device, aliases));
  add_inputs(args, aliases);
  KDA_RETURN_IF_ERROR(aliases.result({}));
  const bool host = present(args.host.query_start_loc);
  if (host) return check_host_step(args, n);
  if (args.host_counts != nullptr && device.type != KDA_CPU) {
    return invalid_argument("host: wanted a host copy of the step for host_counts (spec M-12), got none");
  }
  return {};
}

}  // namespace kda

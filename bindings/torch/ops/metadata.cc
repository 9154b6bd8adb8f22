// metadata: all tables of a serving step as fresh tensors, or into the caller's (overload out).
#include <algorithm>
#include <iterator>

#include "attention.h"

namespace kda::torch_ops {
namespace {

enum class Rows { kCounts, kSequences, kOffsets, kTokens, kSpecTokens, kSpecSlots, kChunks };
enum class Type { kInt32, kOffset, kInt64, kBool };

struct Table {
  const char* name;
  kda_tensor kda_step_tables::*field;
  Rows rows;
  Type type;
  bool of_slots = false;  // needs slot_table
};

using T = kda_step_tables;
// In the order of the schema's results.
constexpr Table kTables[] = {
    {"counts", &T::counts, Rows::kCounts, Type::kInt32},
    {"prefill_rows", &T::prefill_rows, Rows::kSequences, Type::kInt32},
    {"decode_rows", &T::decode_rows, Rows::kSequences, Type::kInt32},
    {"spec_rows", &T::spec_rows, Rows::kSequences, Type::kInt32},
    {"prefill_begin", &T::prefill_begin, Rows::kSequences, Type::kOffset},
    {"prefill_length", &T::prefill_length, Rows::kSequences, Type::kOffset},
    {"decode_begin", &T::decode_begin, Rows::kSequences, Type::kOffset},
    {"decode_length", &T::decode_length, Rows::kSequences, Type::kOffset},
    {"spec_begin", &T::spec_begin, Rows::kSequences, Type::kOffset},
    {"spec_length", &T::spec_length, Rows::kSequences, Type::kOffset},
    {"non_spec_query_start_loc", &T::non_spec_query_start_loc, Rows::kOffsets, Type::kOffset},
    {"spec_query_start_loc", &T::spec_query_start_loc, Rows::kOffsets, Type::kOffset},
    {"prefill_query_start_loc", &T::prefill_query_start_loc, Rows::kOffsets, Type::kOffset},
    {"non_spec_token_indx", &T::non_spec_token_indx, Rows::kTokens, Type::kInt32},
    {"spec_token_indx", &T::spec_token_indx, Rows::kSpecTokens, Type::kInt32},
    {"prefill_slots", &T::prefill_slots, Rows::kSequences, Type::kInt32, true},
    {"decode_slots", &T::decode_slots, Rows::kSequences, Type::kInt32, true},
    {"spec_slots", &T::spec_slots, Rows::kSpecSlots, Type::kInt32, true},
    {"has_initial_state", &T::has_initial_state, Rows::kSequences, Type::kBool},
    {"num_accepted", &T::num_accepted, Rows::kSequences, Type::kInt32},
    {"spec_sequence_masks", &T::spec_sequence_masks, Rows::kSequences, Type::kBool},
    {"chunk_indices", &T::chunk_indices, Rows::kChunks, Type::kOffset},
    {"chunk_offsets", &T::chunk_offsets, Rows::kOffsets, Type::kInt64},
};

kda_dtype dtype_of(Type type, kda_dtype offset) {
  switch (type) {
    case Type::kInt32: return KDA_INT32;
    case Type::kInt64: return KDA_INT64;
    case Type::kBool: return KDA_BOOL;
    default: return offset;
  }
}

int64_t rows_of(Rows rows, const kda_metadata_desc& d) {
  switch (rows) {
    case Rows::kCounts: return KDA_METADATA_COUNTS;
    case Rows::kOffsets: return d.max_sequences + 1;
    case Rows::kTokens: return d.max_tokens;
    case Rows::kSpecTokens: return std::min(d.max_tokens, d.max_sequences * d.width);
    case Rows::kChunks: {
      int64_t chunks = 0;
      check(kda_chunk_bound(d.max_tokens, d.max_sequences, d.chunk, &chunks));
      return chunks;
    }
    default: return d.max_sequences;
  }
}

AtenTensorHandle make_table(const Table& table, const kda_metadata_desc& d, const kda_metadata_args& args) {
  const bool left_out = table.of_slots && args.slot_table.dtype == KDA_DTYPE_NONE;
  const int64_t columns = table.rows == Rows::kSpecSlots ? d.width : 2;
  const int64_t shape[] = {left_out ? 0 : rows_of(table.rows, d), columns};
  const int32_t rank = table.rows == Rows::kSpecSlots || table.rows == Rows::kChunks ? 2 : 1;
  return empty(shape, rank, dtype_of(table.type, args.step.query_start_loc.dtype), args.step.query_start_loc.device);
}

void build(StableIValue* stack, uint64_t arguments, bool fresh) {
  Arguments a(stack, arguments);
  auto args = zeroed<kda_metadata_args>();
  args.step.query_start_loc = a.tensor("query_start_loc");
  args.step.computed = a.optional_tensor("computed");
  args.step.has_state = a.optional_tensor("has_state");
  args.step.prefilling = a.optional_tensor("prefilling");
  args.step.drafts = a.optional_tensor("drafts");
  args.step.num_active = a.optional_tensor("num_active");
  args.accepted = a.optional_tensor("accepted");
  args.slot_table = a.optional_tensor("slot_table");
  args.num_tokens = a.integer();
  auto d = zeroed<kda_metadata_desc>();
  d.max_tokens = a.integer();
  d.max_sequences = a.integer();
  d.width = static_cast<int32_t>(a.integer());
  d.chunk = static_cast<int32_t>(a.integer());
  d.mode = a.flag() ? KDA_METADATA_BY_DRAFTS : KDA_METADATA_BY_ROLE;
  d.null_slot = a.integer();
  d.flags = a.flag() ? KDA_PLAN_CHECKED : 0;
  const std::string_view backend = a.optional_text();
  if (!fresh) {
    for (const Table& table : kTables) args.tables.*table.field = a.optional_tensor(table.name);
  }
  a.finish();

  const kda_device device = args.step.query_start_loc.device;
  const kda_plan* plan = plan_of({KDA_OP_METADATA, device, backend}, d, kda_metadata_plan_create);
  if (!fresh) return run(plan, kda_metadata_run, args, device);
  torch::stable::Tensor results[std::size(kTables)];
  for (size_t i = 0; i < std::size(kTables); ++i) {
    results[i] = torch::stable::Tensor(make_table(kTables[i], d, args));
    const kda_tensor table = view(results[i].get());
    if (!kTables[i].of_slots || args.slot_table.dtype != KDA_DTYPE_NONE) args.tables.*kTables[i].field = table;
  }
  run(plan, kda_metadata_run, args, device);
  for (size_t i = 0; i < std::size(kTables); ++i) stack[i] = torch::stable::detail::from(results[i]);
}

}  // namespace

void metadata(StableIValue* stack, uint64_t arguments, uint64_t) { build(stack, arguments, true); }
void metadata_out(StableIValue* stack, uint64_t arguments, uint64_t) { build(stack, arguments, false); }

}  // namespace kda::torch_ops

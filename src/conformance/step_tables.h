// Step metadata by its definition (metadata.md M-4..M-19): plain loops over vectors, to compare every builder with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kda::conformance {

// One step as vectors; absent ones are empty.
struct Step {
  std::vector<int64_t> query_start_loc;  // [N+1]
  std::vector<int64_t> has_state, prefilling, drafts, accepted;
  std::vector<std::vector<int64_t>> slots;  // [N][width]
  int64_t active = 0;                       // num_active, or N
};

struct StepBounds {
  int64_t max_tokens = 0, max_sequences = 0, width = 1, chunk = 64, null_slot = -1;
  bool by_drafts = false;
};

// M-10's tables, padded to the bounds; names as in kda_step_tables.
struct StepTables {
  std::vector<int64_t> counts;
  std::vector<int64_t> prefill_rows, decode_rows, spec_rows;
  std::vector<int64_t> prefill_begin, prefill_length, decode_begin, decode_length, spec_begin, spec_length;
  std::vector<int64_t> non_spec_query_start_loc, spec_query_start_loc, prefill_query_start_loc;
  std::vector<int64_t> non_spec_token_indx, spec_token_indx;
  std::vector<int64_t> prefill_slots, decode_slots, spec_slots;
  std::vector<int64_t> has_initial_state, num_accepted, spec_sequence_masks;
  std::vector<int64_t> chunk_indices, chunk_offsets;
};

StepTables step_tables(const Step& step, const StepBounds& bounds);

}  // namespace kda::conformance

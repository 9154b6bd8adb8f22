// One step of the engine: who runs, on which rows of the step's token buffer, and the index tables that the
// operators read. Recurrent rows lie before chunk rows; nothing is gathered or merged (design.md 1).
#pragma once

#include <cstdint>
#include <vector>

#include "serve/request.h"

namespace kda::serve {

struct StepRow {
  Request* request = nullptr;
  int64_t begin = 0;                      // first token row
  int32_t length = 0;                     // tokens: prompt tokens, or 1 + drafts
  int32_t accepted = 0;                   // recurrent rows: tokens of this step that are kept (known from the seed)
  int32_t first_output = 0, outputs = 0;  // rows (from begin) whose results are the request's
  int32_t first_snapshot = 0, snapshots = 0;  // chunk rows: into Step::snapshots
};

// A snapshot that this step writes.
struct StepSnapshot {
  SnapshotHandle handle;
  int64_t position = 0;  // tokens of the prompt
};

struct Step {
  int64_t number = 0;
  std::vector<StepRow> recurrent, chunk;
  std::vector<StepSnapshot> snapshots;
  int64_t recurrent_tokens = 0, tokens = 0;
  int64_t drafts = 0;

  // Tables, one entry (row) per sequence; capacity is set once.
  std::vector<uint32_t> content;  // [tokens] table rows
  std::vector<int32_t> recurrent_begin, recurrent_length, recurrent_accepted, recurrent_seat;
  std::vector<int32_t> recurrent_slots;  // [N, width]
  std::vector<int32_t> chunk_begin, chunk_length, chunk_slots;
  std::vector<uint8_t> chunk_has_state;
  std::vector<int32_t> checkpoint_offsets, checkpoint_slots;  // [N, Ck], -1 where there is none

  bool empty() const { return recurrent.empty() && chunk.empty(); }
  void clear() {
    recurrent.clear();
    chunk.clear();
    snapshots.clear();
    recurrent_tokens = tokens = drafts = 0;
  }
};

}  // namespace kda::serve

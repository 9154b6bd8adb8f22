// Which rows a commit replays (spec V-10).
#pragma once

#include "cuda/kernels/decode/params.h"

namespace kda::cuda {

struct CommitRow {
  int64_t slot = -1, record = -1, tokens = -1;  // tokens -1: inactive
};

__device__ __forceinline__ CommitRow commit_row(const CommitParams& p, int64_t n) {
  CommitRow row;
  row.slot = p.slots.slots.at(n);
  if (!slot_is_live(row.slot, p.slots.count, p.slots.null_slot)) return row;
  row.record = record_row(p.records, row.slot, n);
  if (row.record < 0) return row;
  row.tokens = committed_tokens(p.records.count[row.record * p.records.count_stride],
                                p.accepted[n * p.accepted_stride], p.width);
  return row;
}

__device__ __forceinline__ int64_t committing_sequences(const CommitParams& p) {
  return p.num_active != nullptr ? clamp_index(*p.num_active, 0, p.sequences) : p.sequences;
}

}  // namespace kda::cuda

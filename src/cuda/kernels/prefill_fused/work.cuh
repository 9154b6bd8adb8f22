// Which sequence, head, rows and slots a unit of work has: the device form of spec P-5..P-13 (host: core/rows.h).
#pragma once

#include "cuda/kernels/prefill_fused/params.h"
#include "cuda/kernels/prefill_fused/shared_plan.cuh"

namespace kda::cuda::prefill_fused {

__device__ __forceinline__ int64_t load_index(const Indices& x, int64_t i) {
  return x.is_wide ? static_cast<const int64_t*>(x.data)[i * x.stride]
                   : static_cast<int64_t>(static_cast<const int32_t*>(x.data)[i * x.stride]);
}

__device__ __forceinline__ int64_t clamp_index(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : (x > high ? high : x);
}

struct Span {
  int64_t batch = 0, begin = 0, length = 0;
};

// Offsets are clamped to [0, T] and lengths to >= 0 (P-13).
__device__ inline Span sequence_span(const Params& p, int64_t n) {
  Span span;
  if (p.cu_seqlens.data != nullptr) {
    span.begin = clamp_index(load_index(p.cu_seqlens, n), 0, p.tokens);
    const int64_t end = clamp_index(load_index(p.cu_seqlens, n + 1), 0, p.tokens);
    span.length = end > span.begin ? end - span.begin : 0;
  } else if (p.begin.data != nullptr) {
    int64_t length = load_index(p.length, n);
    int64_t begin = load_index(p.begin, n);
    length = length < 0 ? 0 : length;
    if (begin < 0) {
      length = length > -begin ? length + begin : 0;
      begin = 0;
    }
    span.begin = begin > p.tokens ? p.tokens : begin;
    span.length = length < p.tokens - span.begin ? length : p.tokens - span.begin;
  } else {
    span.batch = n;
    span.length = p.tokens;
  }
  return span;
}

struct Slots {
  bool is_active = false;  // false: output rows are zeroed, nothing else happens
  bool is_fresh = true;    // start from zero
  int64_t read = -1;
  int64_t write = -1;  // -1: nothing is stored
};

__device__ __forceinline__ bool slot_is_live(int64_t slot, int64_t slots, int64_t null_slot) {
  return slot >= 0 && slot < slots && slot != null_slot;
}

__device__ inline Slots sequence_slots(const Params& p, int64_t n) {
  Slots s;
  const bool has_pool = p.state_in != nullptr || p.state_out != nullptr;
  const bool is_packed = p.slots.data == nullptr;
  const int64_t null_slot = is_packed ? -1 : p.null_slot;
  const int64_t read = is_packed ? n : load_index(p.slots, n);
  const int64_t write = p.state_out_is_packed ? n : (p.write_slots.data ? load_index(p.write_slots, n) : read);
  const int64_t write_null = p.state_out_is_packed ? -1 : null_slot;
  s.is_fresh = p.state_in == nullptr || p.initial == Initial::kNone ||
               (p.initial == Initial::kFlags && p.has_initial[n * p.has_initial_stride] == 0);
  if (!has_pool) {
    s.is_active = true;
    return s;
  }
  const bool read_live = slot_is_live(read, p.state_in_slots, null_slot);
  const bool write_live = slot_is_live(write, p.state_out_slots, write_null);
  s.read = read;
  s.write = p.state_out != nullptr && write_live ? write : -1;
  s.is_active = s.is_fresh ? (write_live || is_packed || p.state_out == nullptr) : read_live;
  return s;
}

__device__ __forceinline__ int64_t load_index(const Table& x, int64_t row, int column) {
  const int64_t at = row * x.row_stride + column * x.column_stride;
  return x.is_wide ? static_cast<const int64_t*>(x.data)[at]
                   : static_cast<int64_t>(static_cast<const int32_t*>(x.data)[at]);
}

// Where a state goes: element 0 of its value head 0; base null: nowhere.
struct StateTarget {
  void* base = nullptr;
  Real type = Real::kF32;
  int64_t offset = 0;
};

__device__ inline StateTarget final_target(const Params& p, const Slots& slots) {
  if (slots.write < 0) return {};
  return {p.state_out, p.state_out_type, slots.write * p.state_out_stride};
}

__device__ inline StateTarget checkpoint_target(const Params& p, int64_t sequence, int column) {
  StateTarget target{p.checkpoint_out, p.checkpoint_type, 0};
  if (p.checkpoint_slots.data == nullptr) {
    target.offset = sequence * p.checkpoint_row_stride + column * p.checkpoint_stride;
  } else {
    const int64_t slot = load_index(p.checkpoint_slots, sequence, column);
    if (!slot_is_live(slot, p.checkpoint_slot_count, p.null_slot)) return {};
    target.offset = slot * p.checkpoint_stride;
  }
  return target;
}

// A work is one run over a (sequence, value head): the run that writes outputs and the final state, or, before it,
// one for each checkpoint that lies inside a chunk: the call that ends there (K-5), from the same initial state.
// Checkpoints at chunk ends are stored on the way (next_checkpoint).
struct Work {
  int64_t sequence = 0;
  Span span;
  int32_t head = 0;         // value head
  int32_t items = 0;        // chunks to run; 0 for inactive sequences
  int32_t checkpoint = -1;  // its column, or -1: the main run
  bool is_active = false;
};

__device__ inline int64_t active_sequences(const Params& p) {
  return p.num_active != nullptr ? clamp_index(*p.num_active, 0, p.sequences) : p.sequences;
}

__device__ __forceinline__ int64_t work_count(const Params& p) {
  return p.sequences * p.value_heads * (p.checkpoints + 1);
}
__device__ __forceinline__ int64_t first_work(const Params& p) {
  return static_cast<int64_t>(blockIdx.x / kClusterSize) * (p.checkpoints + 1);
}
// The runs of a (sequence, head) follow one another in one cluster: the last may overwrite the initial state.
__device__ __forceinline__ int64_t next_work(const Params& p, int64_t w) {
  const int64_t runs = p.checkpoints + 1;
  return w % runs + 1 < runs ? w + 1 : w + 1 + static_cast<int64_t>(gridDim.x / kClusterSize - 1) * runs;
}

// `order` lists sequences, longest first, or is null.
__device__ inline Work load_work(const Params& p, int64_t w, const uint16_t* order) {
  Work work;
  const int runs = p.checkpoints + 1;
  const int64_t unit = w / runs;
  const int run = static_cast<int>(w - unit * runs);
  const int64_t rank = unit / p.value_heads;
  work.head = static_cast<int32_t>(unit - rank * p.value_heads);
  work.sequence = order != nullptr ? order[rank] : rank;
  if (work.sequence >= active_sequences(p)) {
    work.sequence = -1;
    return work;
  }
  work.span = sequence_span(p, work.sequence);
  work.is_active = sequence_slots(p, work.sequence).is_active;
  if (run < p.checkpoints) {
    work.checkpoint = run;
    const int64_t offset = load_index(p.checkpoint_offsets, work.sequence, run);
    const bool inside = offset > 0 && offset < work.span.length && offset % kChunk != 0;
    if (!inside || checkpoint_target(p, work.sequence, run).base == nullptr) work.is_active = false;
    work.span.length = offset;
  }
  if (work.is_active) work.items = static_cast<int32_t>((work.span.length + kChunk - 1) / kChunk);
  return work;
}

// Items of the main run after which its next checkpoint at a chunk end or at the sequence's end is due.
__device__ __noinline__ int next_checkpoint(const Params& p, int64_t sequence, int64_t length, int items_done) {
  int next = 0x7fffffff;
  for (int c = 0; c < p.checkpoints; ++c) {
    const int64_t offset = load_index(p.checkpoint_offsets, sequence, c);
    if (offset <= 0 || offset > length || (offset % kChunk != 0 && offset != length)) continue;
    const int items = static_cast<int>((offset + kChunk - 1) / kChunk);
    if (items > items_done && items < next) next = items;
  }
  return next;
}

// Is checkpoint `column` of the main run due after `items` items?
__device__ inline bool is_checkpoint_due(const Params& p, const Work& work, int column, int items) {
  const int64_t offset = load_index(p.checkpoint_offsets, work.sequence, column);
  return offset > 0 && offset <= work.span.length && (offset == work.span.length || offset % kChunk == 0) &&
         (offset + kChunk - 1) / kChunk == items;
}

// Are sequences taken longest first, by the list in shared memory?
__device__ __forceinline__ bool has_order(const Params& p) {
  const bool has_lengths = p.cu_seqlens.data != nullptr || p.begin.data != nullptr;
  return has_lengths && p.sequences > 1 && p.sequences <= Shared::kMaxOrdered;
}
__device__ __forceinline__ const uint16_t* sequence_order(const Params& p, uint32_t shared) {
  return has_order(p) ? static_cast<const uint16_t*>(__cvta_shared_to_generic(shared + Shared::kOrder)) : nullptr;
}

}  // namespace kda::cuda::prefill_fused

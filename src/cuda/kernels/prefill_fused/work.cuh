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
  s.is_fresh = p.state_in == nullptr || p.initial == Initial::kNone ||
               (p.initial == Initial::kFlags && p.has_initial[n * p.has_initial_stride] == 0);
  const bool has_slots = p.slots.data != nullptr;
  const int64_t null_slot = has_slots ? p.null_slot : -1;
  s.read = has_slots ? load_index(p.slots, n) : n;
  const int64_t write = p.write_slots.data != nullptr ? load_index(p.write_slots, n) : s.read;
  // A fresh sequence needs only a live write slot, whether or not its final state goes there (P-5, P-8).
  const bool write_live = slot_is_live(write, p.state_in_slots, null_slot);
  if (p.state_in == nullptr) s.is_active = true;
  else s.is_active = s.is_fresh ? write_live || !has_slots : slot_is_live(s.read, p.state_in_slots, null_slot);
  if (p.state_out == nullptr || !s.is_active) return s;
  if (p.state_out_is_packed) s.write = n < p.state_out_slots ? n : -1;
  else if (write_live) s.write = write;
  return s;
}

// What a work needs to know of its sequence. With few sequences every CTA reads them all at its start into shared
// memory, so that taking a work does not wait for a chain of loads.
// Items of a sequence.
__device__ __forceinline__ uint32_t item_total(int64_t length) {
  return static_cast<uint32_t>((length + kChunk - 1) / kChunk);
}

struct SequenceRecord {
  Span span;
  Slots slots;
  uint32_t first;  // items of the sequences before it; with a table only
};
struct alignas(16) SequenceEntry {
  int64_t begin, length;
  int32_t read, write;
  uint32_t flags;  // 1: active, 2: fresh, 4: behind num_active
  uint32_t first;  // items of the sequences before it
};
static_assert(sizeof(SequenceEntry) == 32);

__device__ __forceinline__ SequenceEntry* sequence_table() {
  return reinterpret_cast<SequenceEntry*>(s_memory + Tables::kTable);
}

__device__ inline SequenceEntry make_entry(const Params& p, int64_t n) {
  const Span span = sequence_span(p, n);
  const Slots slots = sequence_slots(p, n);
  const bool is_read = slots.is_active && !slots.is_fresh;
  return {span.begin,
          span.length,
          is_read ? static_cast<int32_t>(slots.read) : -1,
          static_cast<int32_t>(slots.write),
          (slots.is_active ? 1u : 0u) | (slots.is_fresh ? 2u : 0u),
          static_cast<uint32_t>(span.batch) * item_total(span.length)};
}

__device__ inline SequenceRecord record_of(const Params& p, int64_t n, const SequenceEntry& entry) {
  const bool is_batched = p.cu_seqlens.data == nullptr && p.begin.data == nullptr;
  return {{is_batched ? n : 0, entry.begin, entry.length},
          {(entry.flags & 1) != 0, (entry.flags & 2) != 0, entry.read, entry.write},
          entry.first};
}

__device__ inline SequenceRecord sequence_record(const Params& p, int64_t n) {
  if (!has_table(p)) return {sequence_span(p, n), sequence_slots(p, n), 0};
  return record_of(p, n, sequence_table()[n]);
}

__device__ __forceinline__ int64_t load_index(const Table& x, int64_t row, int column) {
  const int64_t at = row * x.row_stride + column * x.column_stride;
  return x.is_wide ? static_cast<const int64_t*>(x.data)[at]
                   : static_cast<int64_t>(static_cast<const int32_t*>(x.data)[at]);
}

constexpr int64_t kMatrix = static_cast<int64_t>(kDim) * kDim;

__device__ __forceinline__ float* segment_matrix(const Params& p, int64_t sequence, int head, int index) {
  return p.segment_space + ((sequence * p.value_heads + head) * p.cut.matrices() + index) * kMatrix;
}
// The state behind the opening.
__device__ __forceinline__ float* opening_state(const Params& p, int64_t sequence, int head) {
  return segment_matrix(p, sequence, head, 0);
}
// B and M from its run's start to a segment's end; M takes two matrices.
__device__ __forceinline__ float* segment_sum(const Params& p, int64_t sequence, int head, int segment) {
  return segment_matrix(p, sequence, head, segment - p.cut.opening + 1);
}
__device__ __forceinline__ float* segment_map(const Params& p, int64_t sequence, int head, int segment) {
  return segment_matrix(p, sequence, head, p.cut.segments - p.cut.opening + 2 * (segment - p.cut.opening));
}
__device__ __forceinline__ bool starts_run(const Params& p, int segment) {
  return (segment - p.cut.opening) % p.cut.run == 0;
}
// What leads from the opening's state to the one before a segment: how many maps, and each one's segment.
__device__ __forceinline__ int maps_before(const Params& p, int segment) {
  return (segment - p.cut.opening + p.cut.run - 1) / p.cut.run;
}
__device__ __forceinline__ int segment_of_map(const Params& p, int segment, int number) {
  return min(p.cut.opening + (number + 1) * p.cut.run, segment) - 1;
}

// Where a state comes from or goes: element 0 of its value head; base null: nowhere.
// kSums and kMap: in the segment space, laid out for what reads them there (value_rows.cuh).
enum class Layout : int32_t { kRows = 0, kSums = 1, kMap = 2 };
struct StateSource {
  const void* base = nullptr;  // null: zero
  Real type = Real::kF32;
  int64_t offset = 0;
  Layout layout = Layout::kRows;
};
struct StateTarget {
  void* base = nullptr;
  Real type = Real::kF32;
  int64_t offset = 0;
  Layout layout = Layout::kRows;
};

__device__ inline StateSource pool_source(const Params& p, const Slots& slots, int head) {
  if (slots.is_fresh) return {};
  return {p.state_in, p.state_in_type, slots.read * p.state_in_stride + head * kMatrix};
}

__device__ inline StateTarget final_target(const Params& p, const Slots& slots, int head) {
  if (slots.write < 0) return {};
  return {p.state_out, p.state_out_type, slots.write * p.state_out_stride + head * kMatrix};
}

__device__ inline StateTarget checkpoint_target(const Params& p, int64_t sequence, int head, int column) {
  StateTarget target{p.checkpoint_out, p.checkpoint_type, 0};
  if (p.checkpoint_slots.data == nullptr) {
    target.offset = sequence * p.checkpoint_row_stride + column * p.checkpoint_stride;
  } else {
    const int64_t slot = load_index(p.checkpoint_slots, sequence, column);
    if (!slot_is_live(slot, p.checkpoint_slot_count, p.null_slot)) return {};
    target.offset = slot * p.checkpoint_stride;
  }
  target.offset += head * kMatrix;
  return target;
}

// What a fused kernel serves: any call; the usual one (is_usual); the same shared out by time (balance.cuh).
enum class Works { kAny, kUsual, kShares };

// A work, or what a cluster leaves to the next one, or takes over (balance.cuh).
enum class Part : uint8_t { kWhole, kFirst, kRest };

// A work is one run over a (sequence, value head): the run that writes outputs and the final state, or, before it,
// one for each checkpoint that lies inside a chunk: the call that ends there (K-5), from the same initial state.
// Checkpoints at chunk ends are stored on the way (next_checkpoint).
struct Work {
  int64_t sequence = 0;
  Span span;
  int32_t head = 0;         // value head
  int32_t items = 0;        // chunks to run; 0 for inactive sequences
  int32_t checkpoint = -1;  // its column, or -1: the main run
  int32_t segment = 0, segments = 1;
  bool is_map = false;  // runs on S := I, V := 0 (S-3)
  bool has_output = true;
  bool is_active = false;
  Part part = Part::kWhole;
  Slots slots;
  uint32_t first = 0;  // its first item among the items of all sequences, where these lie in memory (staged.cuh)
};

__device__ inline int64_t active_sequences(const Params& p) {
  return p.num_active != nullptr ? clamp_index(*p.num_active, 0, p.sequences) : p.sequences;
}

// Works of a row follow one another in one cluster: the runs over an uncut (sequence, head), of which the last may
// overwrite the initial state; and the summaries of a run, each of which goes on from the one before.
__device__ __forceinline__ uint32_t works_in_row(const Params& p) {
  if (p.pass == Pass::kSummaries) return static_cast<uint32_t>(p.cut.run);
  return p.pass == Pass::kWhole ? static_cast<uint32_t>(p.checkpoints) + 1 : 1;
}
// Works of a (sequence, head).
__device__ __forceinline__ int works_of_unit(const Params& p) {
  if (p.pass == Pass::kMaps) return 2;
  if (p.pass == Pass::kSummaries) return 2 * p.cut.runs() * p.cut.run;
  if (p.pass == Pass::kSegments) return p.cut.segments - p.cut.opening;
  return p.pass == Pass::kOpening ? 1 : p.checkpoints + 1;
}
__device__ __forceinline__ int64_t work_count(const Params& p) {
  return p.sequences * p.value_heads * works_of_unit(p);
}
// `ctas`: blocks that share a work.
__device__ __forceinline__ int64_t first_work(const Params& p, uint32_t ctas) {
  return static_cast<int64_t>(blockIdx.x / ctas) * works_in_row(p);
}
__device__ __forceinline__ int64_t next_work(const Params& p, int64_t w, uint32_t ctas) {
  const int clusters = static_cast<int>(gridDim.x / ctas);
  const bool has_rows = p.pass == Pass::kSummaries || (p.pass == Pass::kWhole && p.checkpoints != 0);
  if (!has_rows) return w + clusters;
  const uint32_t row = works_in_row(p);
  return static_cast<uint32_t>(w) % row + 1 < row ? w + 1 : w + 1 + static_cast<int64_t>(clusters - 1) * row;
}

// Are sequences taken longest first, by the list in shared memory?
__device__ __forceinline__ bool has_order(const Params& p) {
  const bool has_lengths = p.cu_seqlens.data != nullptr || p.begin.data != nullptr;
  return has_lengths && p.sequences > 1 && p.sequences <= Tables::kMaxOrdered;
}
__device__ __forceinline__ uint16_t* sequence_order() {
  return reinterpret_cast<uint16_t*>(s_memory + Tables::kOrder);
}

// Fills the table of sequences and the list of their numbers by falling length, ties by number, or, where no lengths
// are given and there is a table, as they come; all `threads` of the CTA. A barrier must follow. Of sequences that
// num_active leaves out nothing is read (P-7).
__device__ inline void list_sequences(const Params& p, int threads) {
  const int n = static_cast<int>(p.sequences), active = static_cast<int>(active_sequences(p));
  const bool tabled = has_table(p);
  const auto length_of = [&](int i) {
    return i >= active ? 0 : (tabled ? sequence_table()[i].length : sequence_span(p, i).length);
  };
  if (tabled) {
    for (int i = threadIdx.x; i < n; i += threads) {
      sequence_table()[i] = i < active ? make_entry(p, i) : SequenceEntry{0, 0, -1, -1, 4, 0};
      sequence_order()[i] = static_cast<uint16_t>(i);
    }
    __syncthreads();
  }
  if (!has_order(p)) return;
  for (int i = threadIdx.x; i < n; i += threads) {
    const int64_t mine = length_of(i);
    int rank = 0;
    uint32_t first = 0;
    for (int j = 0; j < n; ++j) {
      const int64_t other = length_of(j);
      rank += other > mine || (other == mine && j < i) ? 1 : 0;
      first += j < i ? item_total(other) : 0;
    }
    sequence_order()[rank] = static_cast<uint16_t>(i);
    if (!tabled || i >= active) continue;
    sequence_table()[i].first = first;
    // Only offsets that run backwards name more items than were booked: such a sequence is not active.
    if (p.stages != nullptr && int64_t{first} + item_total(mine) > p.stage_positions)
      sequence_table()[i].flags &= ~1u;
  }
}

// Narrows a work to what place `place` of row `row` is of its sequence; sequence -1: there is no such segment, or
// nothing to do for it.
__device__ inline void take_segment(const Params& p, Work& work, int row, int place) {
  const bool is_summary = p.pass == Pass::kSummaries, is_opening = p.pass == Pass::kOpening;
  work.has_output = is_opening || p.pass == Pass::kSegments;
  if (p.pass == Pass::kMaps) {
    work.is_map = row > 0;
    return;
  }
  const int64_t tokens = segment_length(p.cut, work.span.length);
  work.segments = work.span.length <= tokens ? 1 : static_cast<int32_t>((work.span.length + tokens - 1) / tokens);
  work.segment = is_opening ? 0 : p.cut.opening + (is_summary ? row / 2 * p.cut.run + place : row);
  work.is_map = is_summary && row % 2 != 0;
  if (is_opening && !work.is_active) return;  // clears the outputs of the whole
  if (!work.is_active || work.segment >= work.segments - (is_summary ? 1 : 0)) {
    work.sequence = -1;
    return;
  }
  const int64_t first = work.segment * tokens, most = is_opening ? p.cut.opening * tokens : tokens;
  work.first += static_cast<uint32_t>(first / kChunk);
  work.span.begin += first;
  work.span.length = work.span.length - first < most ? work.span.length - first : most;
}

// Works are fewer than 2^31 (the launcher refuses more). Of any pass, with or without a table.
__device__ inline Work load_any_work(const Params& p, uint32_t number) {
  Work work;
  const uint32_t length = works_in_row(p), heads = static_cast<uint32_t>(p.value_heads);
  const uint32_t units = static_cast<uint32_t>(p.sequences) * heads;
  const uint32_t row = length == 1 ? number : number / length, unit = row % units, rank = unit / heads;
  const int place = static_cast<int>(number - row * length);
  work.head = static_cast<int32_t>(unit - rank * heads);
  work.sequence = has_order(p) ? sequence_order()[rank] : rank;
  if (work.sequence >= active_sequences(p)) {
    work.sequence = -1;
    return work;
  }
  const SequenceRecord record = sequence_record(p, work.sequence);
  work.span = record.span;
  work.slots = record.slots;
  work.is_active = record.slots.is_active;
  work.first = record.first;
  if (p.pass != Pass::kWhole) {
    take_segment(p, work, static_cast<int>(row / units), place);
  } else if (place < p.checkpoints) {
    work.checkpoint = place;
    work.has_output = false;
    const int64_t offset = load_index(p.checkpoint_offsets, work.sequence, place);
    const bool inside = offset > 0 && offset < work.span.length && offset % kChunk != 0;
    if (!inside || checkpoint_target(p, work.sequence, work.head, place).base == nullptr) work.is_active = false;
    work.span.length = offset;
  }
  return work;
}

// Of the usual call: whole sequences without checkpoints, all in the table. Short, since what runs once a work is
// cold: all of it is fetched anew.
__device__ __forceinline__ Work load_usual_work(const Params& p, uint32_t number) {
  Work work;
  const uint32_t heads = static_cast<uint32_t>(p.value_heads), rank = number / heads;
  const uint32_t sequence = sequence_order()[rank];
  const SequenceEntry entry = sequence_table()[sequence];
  const SequenceRecord record = record_of(p, sequence, entry);
  work.head = static_cast<int32_t>(number - rank * heads);
  work.sequence = (entry.flags & 4) != 0 ? -1 : static_cast<int64_t>(sequence);
  work.span = record.span;
  work.slots = record.slots;
  work.is_active = record.slots.is_active;
  work.first = record.first;
  return work;
}

__device__ inline Work load_work(const Params& p, int64_t w) {
  const uint32_t number = static_cast<uint32_t>(w);
  Work work = __builtin_expect(is_usual(p), 1) ? load_usual_work(p, number) : load_any_work(p, number);
  if (work.sequence >= 0 && work.is_active)
    work.items = static_cast<int32_t>((work.span.length + kChunk - 1) / kChunk);
  return work;
}

// The next summary of a run starts from what the one before has in its registers.
__device__ inline bool goes_on(const Params& p, const Work& work) {
  return p.pass == Pass::kSummaries && !starts_run(p, work.segment);
}
// What a work starts from; null: from zero, or maps from I. Segments go on from there by maps_before. Here and below
// the usual work is told by its own fields first: what is known of it leaves no branch.
__device__ inline StateSource work_source(const Params& p, const Work& work) {
  if (work.segments == 1 || p.pass == Pass::kOpening) return pool_source(p, work.slots, work.head);
  if (p.pass != Pass::kSegments) return {};
  return {opening_state(p, work.sequence, work.head), Real::kF32, 0, Layout::kSums};
}

// Where its last state goes.
__device__ inline StateTarget work_target(const Params& p, const Work& work) {
  if (work.segments > 1) {
    if (p.pass == Pass::kSummaries && work.is_map)
      return {segment_map(p, work.sequence, work.head, work.segment), Real::kF32, 0, Layout::kMap};
    if (p.pass == Pass::kSummaries)
      return {segment_sum(p, work.sequence, work.head, work.segment), Real::kF32, 0, Layout::kSums};
    if (p.pass == Pass::kOpening && work.segments > p.cut.opening)
      return {opening_state(p, work.sequence, work.head), Real::kF32, 0, Layout::kSums};
    if (p.pass == Pass::kSegments && work.segment + 1 < work.segments) return {};
  }
  if (p.pass == Pass::kMaps) {
    const int64_t matrix = (2 * work.head + (work.is_map ? 1 : 0)) * kMatrix;
    return {p.state_out, Real::kF32, work.sequence * p.state_out_stride + matrix};
  }
  if (work.checkpoint >= 0) return checkpoint_target(p, work.sequence, work.head, work.checkpoint);
  return final_target(p, work.slots, work.head);
}

// Items of the main run after which its next checkpoint at a chunk end or at the sequence's end is due.
__device__ __noinline__ inline int next_checkpoint(const Params& p, int64_t sequence, int64_t length,
                                                   int items_done) {
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

}  // namespace kda::cuda::prefill_fused

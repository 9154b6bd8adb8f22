// Which rows, slots and flags a sequence has (spec P-5..P-13, V-2, V-6, V-10), read by the kernel when it runs (G-7).
// The same rules as core/rows.h, clause by clause; a test on the host compares the two.
#pragma once

#include "cuda/kernels/common/views.h"

namespace kda::cuda {

KDA_HOST_DEVICE int64_t clamp_index(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : (x > high ? high : x);
}

// Token range of one sequence, inside [0, T) (P-13).
struct Span {
  int64_t batch = 0, begin = 0, length = 0;
};

// The two numbers that a sequence's span comes from: cu[n] and cu[n+1], or begin[n] and length[n].
struct SpanLoads {
  RawIndex first, second;
};

KDA_HOST_DEVICE SpanLoads load_span(const SequenceRef& s, int64_t n, bool now = false) {
  SpanLoads l;
  const IndexRef& first = s.cu.present() ? s.cu : s.begin;
  const IndexRef& second = s.cu.present() ? s.cu : s.length;
  if (first.present()) {
    l.first = first.raw(n, 0, now);
    l.second = second.raw(s.cu.present() ? n + 1 : n, 0, now);
  }
  return l;
}

KDA_HOST_DEVICE Span resolve_span(const SpanLoads& l, const SequenceRef& s, int64_t n) {
  Span span;
  const int64_t first = l.first.value(), second = l.second.value();
  span.begin = clamp_index(first, 0, s.tokens);
  if (s.cu.present()) {
    const int64_t last = clamp_index(second, 0, s.tokens);
    span.length = last > span.begin ? last - span.begin : 0;
  } else if (s.begin.present()) {
    const int64_t length = second > 0 ? second : 0;
    if (first < 0) {  // the rows of the range that lie inside
      span.length = clamp_index(length > -first ? length + first : 0, 0, s.tokens);
    } else if (first <= s.tokens) {
      span.length = length < s.tokens - first ? length : s.tokens - first;
    }
  } else {
    span.batch = s.batched ? n : 0;
    span.begin = 0;
    span.length = s.tokens;
  }
  return span;
}

KDA_HOST_DEVICE Span sequence_span(const SequenceRef& s, int64_t n) { return resolve_span(load_span(s, n), s, n); }

// Sequences >= this are not looked at (P-7).
KDA_HOST_DEVICE int64_t active_sequences(const SequenceRef& s) {
  return s.num_active != nullptr ? clamp_index(*s.num_active, 0, s.count) : s.count;
}

KDA_HOST_DEVICE bool slot_is_live(int64_t slot, int64_t slots, int64_t null_slot) {
  return slot >= 0 && slot < slots && slot != null_slot;
}

// Slots of a call. `slots` absent: packed states, slot n = n (P-4).
struct SlotRef {
  IndexRef slots;        // [N] or [N, width]
  IndexRef write_slots;  // P-8; absent: slots
  const uint8_t* flags = nullptr;
  int64_t flags_stride = 0;
  int64_t count = 0;  // of the pool
  int64_t null_slot = -1;
  Initial initial = Initial::kAll;
};

KDA_HOST_DEVICE bool is_fresh(const SlotRef& s, int64_t n) {
  return s.initial == Initial::kNone || (s.initial == Initial::kFlags && s.flags[n * s.flags_stride] == 0);
}

// Prefill and conv rows: column 0 of the tables.
struct StateRow {
  bool active = false, fresh = false;
  int64_t read_slot = -1, write_slot = -1;  // write_slot -1: store nothing
};

KDA_HOST_DEVICE StateRow state_row(const SlotRef& s, bool has_pool, int64_t n) {
  StateRow row;
  if (!has_pool) {  // no states at all: fresh, nothing stored
    row.active = row.fresh = true;
    return row;
  }
  const bool packed = !s.slots.present();
  const int64_t null_slot = packed ? -1 : s.null_slot;
  row.read_slot = packed ? n : s.slots.at(n);
  const int64_t write = s.write_slots.present() ? s.write_slots.at(n) : row.read_slot;
  const bool write_live = slot_is_live(write, s.count, null_slot);
  row.fresh = is_fresh(s, n);
  row.write_slot = write_live ? write : -1;
  row.active = row.fresh ? write_live || packed : slot_is_live(row.read_slot, s.count, null_slot);
  return row;
}

// ---- Decode and verify (spec V) ---------------------------------------------------------------------------------

KDA_HOST_DEVICE int64_t record_row(const RecordRef& r, int64_t slot, int64_t n) {
  const int64_t row = r.record_rows.present() ? r.record_rows.at(n) : slot;
  return row >= 0 && row < r.rows ? row : -1;
}

// Recorded tokens that a commit replays; -1: the row is inactive and keeps its records (V-10).
KDA_HOST_DEVICE int64_t committed_tokens(int64_t count, int64_t accepted, int64_t width) {
  if (count < 0 || count > width) return -1;
  if (count == 0) return 0;
  return accepted >= 0 && accepted <= count ? accepted : -1;
}

struct DecodeRule {
  SlotRef slots;
  const int32_t* accepted = nullptr;  // [N]; null: 1
  int64_t accepted_stride = 0;
  int32_t width = 1;
  int32_t records = 0;    // records mode, else columns
  int32_t per_token = 1;  // store (V-3)
  int32_t fold = 0;
};

struct DecodeRow {
  bool active = false, fresh = false;
  Span span;
  int64_t start_slot = -1, record = -1, commit = 0;
};

// What a row is decided from, loaded at once.
struct DecodeLoads {
  SpanLoads span;
  RawIndex slot;  // column 0 of the table
  int32_t accepted = 1;
  int32_t flag = 1;
  int32_t active = 0;  // as *num_active, or N

  KDA_HOST_DEVICE bool operator==(const DecodeLoads& o) const {
    return span.first == o.span.first && span.second == o.span.second && slot == o.slot && accepted == o.accepted &&
           flag == o.flag && active == o.active;
  }
};

KDA_HOST_DEVICE int32_t load_flag(const uint8_t* p, bool now) {
#ifdef __CUDA_ARCH__
  if (now) return __ldcg(p);
#endif
  (void)now;
  return *p;
}

KDA_HOST_DEVICE DecodeLoads load_decode_row(const DecodeRule& d, const SequenceRef& s, int64_t n, bool now = false) {
  DecodeLoads l;
  l.span = load_span(s, n, now);
  if (d.slots.slots.present()) l.slot = d.slots.slots.raw(n, 0, now);
  if (d.accepted != nullptr) l.accepted = load_index(d.accepted + n * d.accepted_stride, now);
  if (d.slots.initial == Initial::kFlags) l.flag = load_flag(d.slots.flags + n * d.slots.flags_stride, now);
  l.active = s.num_active != nullptr ? load_index(s.num_active, now) : s.count;
  return l;
}

// Sequence n is one of those that are looked at (P-7).
KDA_HOST_DEVICE bool is_looked_at(const DecodeLoads& l, const SequenceRef& s, int64_t n) {
  return n < s.count && n < l.active;
}

KDA_HOST_DEVICE DecodeRow resolve_decode_row(const DecodeLoads& l, const DecodeRule& d, const RecordRef& records,
                                             const SequenceRef& s, int64_t n) {
  DecodeRow row;
  row.span = resolve_span(l.span, s, n);
  const SlotRef& t = d.slots;
  const bool packed = !t.slots.present();
  const int64_t null_slot = packed ? -1 : t.null_slot;
  const int64_t first_slot = packed ? n : l.slot.value();
  row.fresh = t.initial == Initial::kNone || l.flag == 0;
  if ((d.records || d.per_token) && row.span.length > d.width) return row;
  int64_t column = 0;
  if (!d.records) {
    // A table may be wider than the plan (a block table, F37).
    const int64_t columns = packed ? 1 : (t.slots.columns < d.width ? t.slots.columns : d.width);
    if (l.accepted < 1 || l.accepted > columns) return row;
    column = l.accepted - 1;
  }
  row.start_slot = column == 0 ? first_slot : t.slots.at(n, column);
  // A fresh row needs only a live slot to write to; any other one its start (P-5, P-8).
  int64_t deciding = row.start_slot;
  if (row.fresh) deciding = t.write_slots.present() ? t.write_slots.at(n) : first_slot;
  if (!slot_is_live(deciding, t.count, null_slot)) return row;
  if (d.records) {
    row.record = record_row(records, row.start_slot, n);
    if (row.record < 0) return row;
    if (d.fold) row.commit = committed_tokens(records.count[row.record * records.count_stride], l.accepted, d.width);
    if (row.commit < 0) return row;
  }
  row.active = true;
  return row;
}

KDA_HOST_DEVICE DecodeRow decode_row(const DecodeRule& d, const RecordRef& records, const SequenceRef& s, int64_t n) {
  return resolve_decode_row(load_decode_row(d, s, n), d, records, s, n);
}

// Slot that the state after token t goes to, t = 0 with store = final; -1: that store is skipped (V-3).
KDA_HOST_DEVICE int64_t store_slot(const SlotRef& s, int64_t n, int64_t t) {
  if (!s.slots.present()) return t == 0 && n < s.count ? n : -1;
  const IndexRef& to = s.write_slots.present() ? s.write_slots : s.slots;
  if (t >= to.columns) return -1;
  const int64_t slot = to.at(n, t);
  return slot_is_live(slot, s.count, s.null_slot) ? slot : -1;
}

// ---- Conv (spec W) ----------------------------------------------------------------------------------------------

enum class ConvMode : int32_t { kPrefill = 1, kColumns = 2, kRecords = 3 };

struct ConvRule {
  SlotRef slots;
  const int32_t* accepted = nullptr;
  int64_t accepted_stride = 0;
  ConvMode mode = ConvMode::kPrefill;
  int32_t final_window = 0;  // columns mode that keeps the last W-1 inputs only (store = final)
  int32_t fold = 0;
  int32_t width = 1;
};

struct ConvRow {
  bool active = false, fresh = false;
  Span span;
  int64_t read_slot = -1, write_slot = -1;
  int64_t offset = 0;  // first column of the history (W-3), or columns committed first (W-4 with fold)
};

KDA_HOST_DEVICE ConvRow conv_row(const ConvRule& c, const RecordRef& records, bool has_pool, const SequenceRef& s,
                                 int64_t n) {
  ConvRow row;
  row.span = sequence_span(s, n);
  const StateRow state = state_row(c.slots, has_pool, n);
  row.fresh = state.fresh;
  row.read_slot = state.read_slot;
  row.write_slot = state.write_slot;
  row.active = state.active;
  if (c.mode == ConvMode::kPrefill || !row.active) return row;
  row.active = c.final_window || row.span.length <= c.width;
  const int64_t accepted = c.accepted != nullptr ? c.accepted[n * c.accepted_stride] : 1;
  if (c.mode == ConvMode::kRecords) {
    if (!c.fold) return row;
    const int64_t record = record_row(records, row.read_slot, n);
    row.offset = record < 0 ? -1 : committed_tokens(records.count[record * records.count_stride], accepted, c.width);
    row.active = row.active && row.offset >= 0;
    return row;
  }
  row.offset = accepted - 1;
  if (accepted < 1 || accepted > c.width) row.active = false;
  // The window lives in column 0, but a dead start column makes the whole row inactive (V-6).
  const IndexRef& table = c.slots.slots;
  if (row.active && !row.fresh && table.present() && row.offset < table.columns) {
    row.active = slot_is_live(table.at(n, row.offset), c.slots.count, c.slots.null_slot);
  }
  return row;
}

}  // namespace kda::cuda

// Which rows, slots and flags a sequence has: the rules of spec P-5..P-13 and V-2, V-6, in one place for every
// backend that reads index values on the host (cpu, reference). The CUDA kernels follow the same text.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/tensor.h"
#include "kda/kda.h"

namespace kda {

// Token range of one sequence. In the batched form (no offsets) `batch` selects the sample.
struct TokenSpan {
  int64_t batch = 0;
  int64_t begin = 0;
  int64_t length = 0;
};

// Active sequences out of `count` (P-7).
inline int64_t active_count(const kda_tensor& num_active, int64_t count) {
  return present(num_active) ? std::clamp<int64_t>(index_view(num_active)[0], 0, count) : count;
}

class SequenceTable {
 public:
  // `token` is any token tensor ([T, ...], or [B, T, ...] when `token_rank` is one more than usual);
  // `row_dims` is its rank without batch.
  SequenceTable(const kda_sequences& s, const kda_tensor& token, int row_dims)
      : cu_(index_view(s.cu_seqlens)), begin_(index_view(s.begin)), length_(index_view(s.length)) {
    batched_ = token.rank > row_dims;
    tokens_ = token.shape[batched_ ? 1 : 0];
    // By presence, not by address: the vectors of no sequences may be NULL (Z-1).
    offsets_ = present(s.cu_seqlens);
    ranges_ = present(s.begin);
    if (offsets_) count_ = cu_.size - 1;
    else if (ranges_) count_ = begin_.size;
    else count_ = batched_ ? token.shape[0] : 1;
    active_ = active_count(s.num_active, count_);
  }

  int64_t count() const { return count_; }    // N
  int64_t active() const { return active_; }  // sequences >= active() are not looked at (P-7)

  // Offsets are clamped to [0, T] and lengths to >= 0 (P-13).
  TokenSpan span(int64_t n) const {
    if (offsets_) {
      const int64_t first = std::clamp<int64_t>(cu_[n], 0, tokens_);
      const int64_t last = std::clamp<int64_t>(cu_[n + 1], 0, tokens_);
      return {0, first, std::max<int64_t>(0, last - first)};
    }
    if (ranges_) {
      const int64_t length = std::max<int64_t>(0, length_[n]);
      const int64_t begin = begin_[n];
      // The rows of the range that lie inside [0, T).
      if (begin < 0) return {0, 0, std::clamp<int64_t>(length + begin, 0, tokens_)};
      const int64_t first = std::min(begin, tokens_);
      return {0, first, std::min(length, tokens_ - first)};
    }
    return {batched_ ? n : 0, 0, tokens_};
  }

 private:
  IndexView cu_, begin_, length_;
  bool batched_ = false, offsets_ = false, ranges_ = false;
  int64_t tokens_ = 0, count_ = 0, active_ = 0;
};

// The slot rule (P-5): live iff inside the pool and not the null slot.
inline bool slot_is_live(int64_t slot, int64_t slots, int64_t null_slot) {
  return slot >= 0 && slot < slots && slot != null_slot;
}

// What one sequence of a prefill (or a conv in prefill mode) reads and writes.
struct StateRow {
  bool active = false;      // false: output rows are zeroed, nothing else happens
  bool fresh = false;       // the state starts from zero, the slot is not read (P-10)
  int64_t read_slot = -1;   // valid if active and not fresh
  int64_t write_slot = -1;  // -1: store nothing (P-8)
};

// Flag of sequence n in a bool vector: any nonzero byte is true (G-3).
inline bool flag_at(const kda_tensor& flags, int64_t n) {
  return static_cast<const uint8_t*>(flags.data)[n * flags.strides[0]] != 0;
}

struct SlotRule {
  kda_initial_state initial = KDA_INITIAL_NONE;
  int64_t null_slot = -1;
};

// `state` is the pool or packed tensor; `slots` / `write_slots` may be absent (packed form, P-4: slot n = n).
// With column tables [N, width], column 0 is meant.
inline StateRow state_row(const SlotRule& rule, const kda_tensor& state, const kda_tensor& slots,
                          const kda_tensor& write_slots, const kda_tensor& flags, int64_t n) {
  StateRow row;
  const int64_t count = present(state) ? state.shape[0] : 0;
  const bool packed = !present(slots);
  const int64_t null_slot = packed ? -1 : rule.null_slot;
  const int64_t read = packed ? n : index_row(slots, n)[0];
  const int64_t write = present(write_slots) ? index_row(write_slots, n)[0] : read;
  const bool read_live = slot_is_live(read, count, null_slot);
  const bool write_live = slot_is_live(write, count, null_slot);
  row.fresh = rule.initial == KDA_INITIAL_NONE || (rule.initial == KDA_INITIAL_FLAGS && !flag_at(flags, n));
  if (!present(state)) {  // no state tensor at all: fresh, nothing stored
    row.active = true;
    row.fresh = true;
    return row;
  }
  row.read_slot = read;
  row.write_slot = write_live ? write : -1;
  // A fresh sequence needs only a live write slot; otherwise the read slot decides (P-5, P-8).
  row.active = row.fresh ? write_live || packed : read_live;
  return row;
}

// ---- Decode and verify rows (spec V) --------------------------------------------------------------------

// Record row of sequence n (P-3): record_rows[n] or the slot; -1 if it lies outside the records.
inline int64_t record_row(const kda_tensor& count, const kda_tensor& record_rows, int64_t slot, int64_t n) {
  const int64_t row = present(record_rows) ? index_view(record_rows)[n] : slot;
  return row >= 0 && row < count.shape[0] ? row : -1;
}

// How many recorded tokens a commit replays: `accepted` in [0, count]; -1 makes the row inactive and keeps its
// records (V-10). Where nothing is recorded a fold has nothing to commit, whatever `accepted` holds (V-10b: it
// is 1 after a prefill); the commit operator then has nothing to do either.
inline int64_t committed_tokens(int64_t count, int64_t accepted, int64_t width) {
  if (count < 0 || count > width) return -1;
  if (count == 0) return 0;
  return accepted >= 0 && accepted <= count ? accepted : -1;
}

// A row of the commit operator (V-10).
struct CommitRow {
  bool active = false;  // false: nothing is read or written, the records stay
  int64_t slot = -1;
  int64_t record = -1;
  int64_t tokens = 0;  // c
};

inline CommitRow commit_row(const kda_commit_desc& d, const kda_commit_args& args, int64_t n) {
  CommitRow row;
  row.slot = index_row(args.slots, n)[0];
  if (!slot_is_live(row.slot, args.state.shape[0], d.null_slot)) return row;
  row.record = record_row(args.records.count, args.records.record_rows, row.slot, n);
  if (row.record < 0) return row;
  row.tokens = committed_tokens(index_view(args.records.count)[row.record], index_view(args.accepted)[n], d.width);
  row.active = row.tokens >= 0;
  return row;
}

// What one row of decode or verify reads and writes.
struct DecodeRow {
  bool active = false;      // false: its output rows are zero, nothing is stored (V-6)
  bool fresh = false;       // starts from zero, the slot is not read (P-10)
  TokenSpan span;           // its tokens
  int64_t start_slot = -1;  // valid if active and not fresh (V-2)
  int64_t record = -1;      // records mode: row of the records
  int64_t commit = 0;       // fold: recorded tokens that are committed first (V-10b)
};

inline DecodeRow decode_row(const kda_decode_desc& d, const kda_decode_args& args, const SequenceTable& table,
                            int64_t n) {
  DecodeRow row;
  row.span = table.span(n);
  const bool packed = !present(args.slots);
  const int64_t count = args.state.shape[0];
  const int64_t null_slot = packed ? -1 : d.null_slot;
  const bool records = d.mode == KDA_DECODE_RECORDS;
  if ((records || d.store == KDA_STORE_PER_TOKEN) && row.span.length > d.width) return row;
  const int64_t accepted = present(args.accepted) ? index_view(args.accepted)[n] : 1;
  int64_t column = 0;
  if (!records) {
    // A table may be wider than the plan (a block table, F37).
    const int64_t columns = packed || args.slots.rank == 1 ? 1 : std::min<int64_t>(args.slots.shape[1], d.width);
    if (accepted < 1 || accepted > columns) return row;
    column = accepted - 1;
  }
  row.start_slot = packed ? n : index_row(args.slots, n)[column];
  row.fresh = d.initial_state == KDA_INITIAL_NONE ||
              (d.initial_state == KDA_INITIAL_FLAGS && !flag_at(args.has_initial_state, n));
  // A fresh row needs only a live slot to write to; any other one its start (P-5, P-8).
  int64_t deciding = row.start_slot;
  if (row.fresh)
    deciding = present(args.write_slots) ? index_row(args.write_slots, n)[0]
               : packed                  ? n
                                         : index_row(args.slots, n)[0];
  if (!slot_is_live(deciding, count, null_slot)) return row;
  if (records) {
    row.record = record_row(args.records.count, args.records.record_rows, row.start_slot, n);
    if (row.record < 0) return row;
    if (d.fold) row.commit = committed_tokens(index_view(args.records.count)[row.record], accepted, d.width);
    if (row.commit < 0) return row;
  }
  row.active = true;
  return row;
}

// Slot that the state after token t goes to (V-3), `t` = 0 with store = final; -1: that store is skipped.
inline int64_t store_slot(const kda_decode_desc& d, const kda_decode_args& args, int64_t n, int64_t t) {
  const int64_t count = args.state.shape[0];
  if (!present(args.slots)) return t == 0 && n < count ? n : -1;
  const IndexView row = index_row(present(args.write_slots) ? args.write_slots : args.slots, n);
  return t < row.size && slot_is_live(row[t], count, d.null_slot) ? row[t] : -1;
}

// ---- Conv rows (spec W) ---------------------------------------------------------------------------------

// What decides over a conv row; taken from kda_conv_desc and args, or from those of decode_step.
struct ConvRule {
  kda_conv_mode mode = KDA_CONV_PREFILL;
  bool final_window = false;  // columns mode that keeps the last W-1 inputs only (store = final)
  bool fold = false;
  int64_t verify_width = 1;
  kda_initial_state initial = KDA_INITIAL_ALL;
  int64_t null_slot = -1;
};

struct ConvInputs {
  const kda_tensor& state;  // first part's pool; all parts have its slot count
  const kda_tensor& slots;
  const kda_tensor& write_slots;
  const kda_tensor& flags;
  const kda_tensor& accepted;
  const kda_tensor& record_count;
  const kda_tensor& record_rows;
};

struct ConvRow {
  bool active = false;
  bool fresh = false;  // the history is zero, the slot is not read
  TokenSpan span;
  int64_t read_slot = -1;
  int64_t write_slot = -1;  // -1: no window is stored
  int64_t offset = 0;       // first column of the history (W-3), or columns committed first (W-4 with fold)
};

inline ConvRow conv_row(const ConvRule& rule, const ConvInputs& in, const SequenceTable& table, int64_t n) {
  ConvRow row;
  row.span = table.span(n);
  const StateRow state = state_row({rule.initial, rule.null_slot}, in.state, in.slots, in.write_slots, in.flags, n);
  row.fresh = state.fresh;
  row.read_slot = state.read_slot;
  row.write_slot = state.write_slot;
  row.active = state.active;
  if (rule.mode == KDA_CONV_PREFILL || !row.active) return row;
  row.active = rule.final_window || row.span.length <= rule.verify_width;
  const int64_t accepted = present(in.accepted) ? index_view(in.accepted)[n] : 1;
  if (rule.mode == KDA_CONV_RECORDS) {
    if (!rule.fold) return row;
    const int64_t record = record_row(in.record_count, in.record_rows, row.read_slot, n);
    row.offset = record < 0 ? -1 : committed_tokens(index_view(in.record_count)[record], accepted, rule.verify_width);
    row.active = row.active && row.offset >= 0;
    return row;
  }
  row.offset = accepted - 1;
  if (accepted < 1 || accepted > rule.verify_width) row.active = false;
  // The window lives in column 0, but a dead start column makes the whole row inactive (V-6).
  if (row.active && !row.fresh && present(in.slots) && in.slots.rank == 2 && row.offset < in.slots.shape[1]) {
    row.active = slot_is_live(index_row(in.slots, n)[row.offset], in.state.shape[0], rule.null_slot);
  }
  return row;
}

// ---- Rows of token tensors ------------------------------------------------------------------------------

// First element of token row t of a span, in a tensor [T, ...] or [B, T, ...]; `row_dims` as above.
inline const char* token_row(const kda_tensor& x, const TokenSpan& span, int row_dims, int64_t t) {
  const bool batched = x.rank > row_dims;
  const int64_t offset = (batched ? span.batch * x.strides[0] : 0) + (span.begin + t) * x.strides[batched ? 1 : 0];
  return static_cast<const char*>(x.data) + offset * static_cast<int64_t>(dtype_size(x.dtype));
}

// Row of the output that packed row t of a span goes to, or -1 if it is skipped.
inline int64_t out_row(const kda_tensor& out, const kda_tensor& out_rows, const TokenSpan& span, int row_dims,
                       int64_t t) {
  if (!present(out_rows)) return span.begin + t;
  const int64_t row = index_view(out_rows)[span.begin + t];
  const int64_t rows = out.shape[out.rank > row_dims ? 1 : 0];
  return row >= 0 && row < rows ? row : -1;
}

}  // namespace kda

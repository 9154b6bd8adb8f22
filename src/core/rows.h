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

class SequenceTable {
 public:
  // `token` is any token tensor ([T, ...], or [B, T, ...] when `token_rank` is one more than usual);
  // `row_dims` is its rank without batch.
  SequenceTable(const kda_sequences& s, const kda_tensor& token, int row_dims)
      : cu_(index_view(s.cu_seqlens)), begin_(index_view(s.begin)), length_(index_view(s.length)) {
    batched_ = token.rank > row_dims;
    tokens_ = token.shape[batched_ ? 1 : 0];
    if (cu_) count_ = cu_.size - 1;
    else if (begin_) count_ = begin_.size;
    else count_ = batched_ ? token.shape[0] : 1;
    active_ = count_;
    if (present(s.num_active)) active_ = std::clamp<int64_t>(index_view(s.num_active)[0], 0, count_);
  }

  int64_t count() const { return count_; }    // N
  int64_t active() const { return active_; }  // sequences >= active() are not looked at (P-7)

  // Offsets are clamped to [0, T] and lengths to >= 0 (P-13).
  TokenSpan span(int64_t n) const {
    if (cu_) {
      const int64_t first = std::clamp<int64_t>(cu_[n], 0, tokens_);
      const int64_t last = std::clamp<int64_t>(cu_[n + 1], 0, tokens_);
      return {0, first, std::max<int64_t>(0, last - first)};
    }
    if (begin_) {
      const int64_t length = std::max<int64_t>(0, length_[n]);
      const int64_t begin = begin_[n];
      if (begin < 0 || begin > tokens_) {
        const int64_t first = std::clamp<int64_t>(begin, 0, tokens_);
        // Keep the rows of the range that lie inside [0, T).
        const int64_t last = begin < 0 ? std::clamp<int64_t>(length > -begin ? length + begin : 0, 0, tokens_) : first;
        return {0, first, last - first};
      }
      return {0, begin, std::min(length, tokens_ - begin)};
    }
    return {batched_ ? n : 0, 0, tokens_};
  }

 private:
  IndexView cu_, begin_, length_;
  bool batched_ = false;
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
  row.fresh = rule.initial == KDA_INITIAL_NONE ||
              (rule.initial == KDA_INITIAL_FLAGS &&
               static_cast<const uint8_t*>(flags.data)[n * flags.strides[0]] == 0);
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

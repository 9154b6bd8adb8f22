#include "core/check_slots.h"

#include <algorithm>

namespace kda {

Status SlotValues::check_range(const char* name, const kda_tensor& table, int64_t n, int64_t columns) const {
  const IndexView row = index_row(table, n);
  for (int64_t c = 0; c < std::min(columns, row.size); ++c) {
    if (row[c] < slots_) continue;
    return invalid_argument(name, "[", n, ", ", c, "]: wanted a slot below ", slots_, " or a negative one, got ",
                            row[c]);
  }
  return {};
}

void SlotValues::writes(const char* name, int64_t n, int64_t slot) {
  if (slot_is_live(slot, slots_, null_slot_)) writes_.push_back({slot, n, name});
}

Status SlotValues::check_apart() {
  const auto by_slot = [](const Use& a, const Use& b) { return a.slot != b.slot ? a.slot < b.slot : a.row < b.row; };
  std::sort(writes_.begin(), writes_.end(), by_slot);
  for (size_t i = 1; i < writes_.size(); ++i) {
    const Use &a = writes_[i - 1], &b = writes_[i];
    if (a.slot != b.slot) continue;
    return invalid_argument(a.name, ": wanted distinct live slots, got slot ", a.slot, " in rows ", a.row, " and ",
                            b.row, a.name == b.name ? "" : std::string(" of ") + b.name);
  }
  for (const Use& read : reads_) {
    const auto write = std::lower_bound(writes_.begin(), writes_.end(), Use{read.slot, INT64_MIN, nullptr}, by_slot);
    if (write == writes_.end() || write->slot != read.slot || write->row == read.row) continue;
    return invalid_argument(write->name, ": wanted slots that no other sequence reads, got slot ", read.slot,
                            " written by row ", write->row, " and read by row ", read.row);
  }
  return {};
}

Status check_pool_values(const PoolUse& use, const SequenceTable& table) {
  if (!present(use.slots)) return {};
  SlotValues slots(use.state.shape[0], use.rule.null_slot);
  const char* const target = present(use.write_slots) ? "write_slots" : "slots";
  for (int64_t n = 0; n < table.active(); ++n) {
    KDA_RETURN_IF_ERROR(slots.check_range("slots", use.slots, n, 1));
    if (present(use.write_slots)) KDA_RETURN_IF_ERROR(slots.check_range("write_slots", use.write_slots, n, 1));
    const IndexView offsets = index_row(use.checkpoint_offsets, n), places = index_row(use.checkpoint_slots, n);
    KDA_RETURN_IF_ERROR(slots.check_range("checkpoint_slots", use.checkpoint_slots, n, places.size));
    const StateRow row = state_row(use.rule, use.state, use.slots, use.write_slots, use.flags, n);
    if (!row.active) continue;
    if (!row.fresh) slots.reads(n, row.read_slot);
    if (use.stores) slots.writes(target, n, row.write_slot);
    for (int64_t c = 0; c < places.size; ++c) {
      if (offsets[c] > 0) slots.writes("checkpoint_slots", n, places[c]);
    }
  }
  return slots.check_apart();
}

Status check_checkpoint_values(const kda_tensor& offsets, const SequenceTable& table) {
  if (!present(offsets)) return {};
  for (int64_t n = 0; n < table.active(); ++n) {
    const IndexView row = index_row(offsets, n);
    const int64_t length = table.span(n).length;
    for (int64_t c = 0; c < row.size; ++c) {
      if (row[c] <= length) continue;
      return invalid_argument("checkpoint_offsets[", n, ", ", c, "]: wanted at most the sequence's length ", length,
                              ", got ", row[c]);
    }
  }
  return {};
}

Status check_accepted_value(const kda_tensor& accepted, int64_t n, int64_t width) {
  if (!present(accepted)) return {};
  const int64_t value = index_view(accepted)[n];
  if (value >= 1 && value <= width) return {};
  return invalid_argument("accepted[", n, "]: wanted 1 to ", width, ", got ", value);
}

Status check_record_values(const kda_tensor& count, int64_t row, const kda_tensor& accepted, int64_t n,
                           int64_t width) {
  if (row < 0) return {};
  const int64_t recorded = index_view(count)[row];
  if (recorded < 0 || recorded > width) {
    return invalid_argument("records.count[", row, "]: wanted 0 to ", width, ", got ", recorded);
  }
  const int64_t value = index_view(accepted)[n];
  if (recorded == 0 || (value >= 0 && value <= recorded)) return {};
  return invalid_argument("accepted[", n, "]: wanted 0 to the ", recorded, " recorded tokens, got ", value);
}

Status check_length_value(const SequenceTable& table, int64_t n, int64_t width) {
  const int64_t length = table.span(n).length;
  if (length <= width) return {};
  return invalid_argument("sequences: wanted at most width = ", width, " tokens in row ", n, ", got ", length);
}

}  // namespace kda

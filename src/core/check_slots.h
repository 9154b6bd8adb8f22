// Checked mode (spec G-7): what the slots, counts and checkpoints of a call say, on the host. The rules themselves
// are those of core/rows.h; here the values that normal mode passes over are reported with argument, position and
// value.
#pragma once

#include <vector>

#include "core/rows.h"
#include "core/validate.h"

namespace kda {

// The slots that the sequences of one call read and write.
class SlotValues {
 public:
  SlotValues(int64_t slots, int64_t null_slot) : slots_(slots), null_slot_(null_slot) {}

  // The first `columns` indices of row n lie below the pool's end; negative ones are dead on purpose (P-5).
  Status check_range(const char* name, const kda_tensor& table, int64_t n, int64_t columns) const;
  void reads(int64_t n, int64_t slot) { reads_.push_back({slot, n, nullptr}); }
  // `name`: the argument that holds the slot.
  void writes(const char* name, int64_t n, int64_t slot);
  // Live write slots are distinct and none is another sequence's read slot (P-8, Z-13).
  Status check_apart();

 private:
  struct Use {
    int64_t slot, row;
    const char* name;
  };
  int64_t slots_, null_slot_;
  std::vector<Use> reads_, writes_;
};

// A pool with the vectors that prefill and conv address it by.
struct PoolUse {
  SlotRule rule;
  const kda_tensor& state;
  const kda_tensor& slots;
  const kda_tensor& write_slots;
  const kda_tensor& flags;
  bool stores;  // final states or windows go into it
  const kda_tensor& checkpoint_offsets;
  const kda_tensor& checkpoint_slots;
};
Status check_pool_values(const PoolUse& use, const SequenceTable& table);

// Offsets of checkpoints lie within their sequence (K-3).
Status check_checkpoint_values(const kda_tensor& offsets, const SequenceTable& table);
// accepted[n] in [1, width] (V-6).
Status check_accepted_value(const kda_tensor& accepted, int64_t n, int64_t width);
// What a commit or a fold of row n finds: its record row, that row's count, and accepted (V-10). `row` < 0: no
// records.
Status check_record_values(const kda_tensor& count, int64_t row, const kda_tensor& accepted, int64_t n,
                           int64_t width);
// A verify row has at most `width` tokens (V-6).
Status check_length_value(const SequenceTable& table, int64_t n, int64_t width);

}  // namespace kda

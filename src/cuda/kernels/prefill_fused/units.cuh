// Which items a group of the staged form's preparation takes, in which order.
//
// Sequences longest first; of a sequence, item 0 of every head, then item 1, ...: neighbours read neighbouring rows,
// and what chains beside the preparation want next is made first. Groups take units a number of groups apart that is
// a multiple of the heads, if they are so many: a group then keeps its head, and a new sequence is new addresses
// only.
#pragma once

#include "cuda/kernels/prefill_fused/produce.cuh"

namespace kda::cuda::prefill_fused {

// Of a group, in shared memory, written by its first thread: registers are short.
struct UnitArea {
  static constexpr uint32_t kOpen = 0;  // Unit, then the items of its sequence
  static constexpr uint32_t kItems = 8;
  static constexpr uint32_t kActive = 12;  // sequences that there are
  static constexpr uint32_t kStep = 16;    // {items, heads} from one unit to the group's next
  static constexpr uint32_t kSlot = 24;    // of the open item among the stages in memory
  static constexpr uint32_t kMade = 28;    // the slot whose stage is being finished; kNoSlot: none was yet
  static constexpr uint32_t kBytes = 32;
};
static_assert(UnitArea::kBytes <= kUnitBytes);
constexpr uint32_t kNoSlot = 0xffffffff;

// An item of a sequence, by its rank among those longest first, and a value head.
struct Unit {
  uint32_t item;
  uint32_t place;  // value head << 8 | rank

  __device__ uint32_t head() const { return place >> 8; }
  __device__ uint32_t rank() const { return place & 255; }
  __device__ bool exists() const { return place != kNoPlace; }
  static constexpr uint32_t kNoPlace = 0xffffffff;
};
static_assert(kMostStagedSequences < 255);

// Of `groups`, those that have units to take.
__device__ __forceinline__ uint32_t used_groups(const Params& p, uint32_t groups) {
  const auto heads = static_cast<uint32_t>(p.value_heads);
  return groups > heads ? groups - groups % heads : groups;
}

__device__ __forceinline__ void move_unit(const Params& p, Unit& unit, const uint2& step) {
  unit.item += step.x, unit.place += step.y << 8;
  if (unit.head() >= static_cast<uint32_t>(p.value_heads)) unit.place -= p.value_heads << 8, ++unit.item;
}

// The unit here or the next that there is, and the entry of its sequence.
__device__ __forceinline__ SequenceEntry find_unit(const Params& p, Unit& unit, const uint2& step, uint32_t active) {
  SequenceEntry entry = {};
  while (unit.rank() < active) {
    entry = sequence_table()[has_order(p) ? sequence_order()[unit.rank()] : unit.rank()];
    const uint32_t total = item_total(entry.length);
    if (unit.item >= total) {
      unit.item -= total, ++unit.place;
    } else if ((entry.flags & 1) != 0 && int64_t{entry.first} + total <= p.stage_positions) {
      return entry;
    } else {
      move_unit(p, unit, step);
    }
  }
  unit.place = Unit::kNoPlace;
  return entry;
}

// Where a sequence's item lies among the stages in memory.
__device__ __forceinline__ uint32_t stage_slot(const Params& p, const SequenceEntry& entry, const Unit& unit) {
  return (entry.first + unit.item) * static_cast<uint32_t>(p.value_heads) + unit.head();
}

}  // namespace kda::cuda::prefill_fused

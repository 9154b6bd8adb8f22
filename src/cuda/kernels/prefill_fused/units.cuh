// Which items a group of the staged form's preparation takes, in which order.
//
// Sequences longest first; of a sequence, its first item of every head, then its second, ...: neighbours read
// neighbouring rows, and what chains beside the preparation want next is made first (ordered_item). Groups take units
// a number of groups apart that is a multiple of the heads, if they are so many: a group then keeps its head, and a
// new sequence is new addresses only.
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
  static constexpr uint32_t kItem = 32;    // the open unit's: ordered_item
  static constexpr uint32_t kFirst = 36;   // items of the sequences before its own
  static constexpr uint32_t kOrder = 40;   // ItemOrder of its sequence
  static constexpr uint32_t kBytes = 48;
};
static_assert(UnitArea::kBytes <= kUnitBytes);
constexpr uint32_t kNoSlot = 0xffffffff;

// An item of a sequence, by its number in the order in which they are made, and a value head.
struct Unit {
  uint32_t number;
  uint32_t place;  // value head << 8 | the sequence's rank among those longest first

  __device__ uint32_t head() const { return place >> 8; }
  __device__ uint32_t rank() const { return place & 255; }
  __device__ bool exists() const { return place != kNoPlace; }
  static constexpr uint32_t kNoPlace = 0xffffffff;
};
static_assert(kMostTabledSequences < 255);

// Of `groups`, those that have units to take.
__device__ __forceinline__ uint32_t used_groups(const Params& p, uint32_t groups) {
  const auto heads = static_cast<uint32_t>(p.value_heads);
  return groups > heads ? groups - groups % heads : groups;
}

__device__ __forceinline__ void move_unit(const Params& p, Unit& unit, const uint2& step) {
  unit.number += step.x, unit.place += step.y << 8;
  if (unit.head() >= static_cast<uint32_t>(p.value_heads)) unit.place -= p.value_heads << 8, ++unit.number;
}

// The unit here or the next that there is, and the entry of its sequence.
__device__ __forceinline__ SequenceEntry find_unit(const Params& p, Unit& unit, const uint2& step, uint32_t active) {
  SequenceEntry entry = {};
  while (unit.rank() < active) {
    entry = sequence_table()[has_order(p) ? sequence_order()[unit.rank()] : unit.rank()];
    const uint32_t total = item_total(entry.length);
    if (unit.number >= total) {
      unit.number -= total, ++unit.place;
    } else if ((entry.flags & 1) != 0) {
      return entry;
    } else {
      move_unit(p, unit, step);
    }
  }
  unit.place = Unit::kNoPlace;
  return entry;
}

// How the items of a sequence are ordered.
struct ItemOrder {
  uint32_t items, columns;  // of a segment; segments without the last, which is wanted last. items 0: as they come
};
__device__ __forceinline__ ItemOrder item_order(const Params& p, int64_t length) {
  if (p.cut.segments <= 1) return {0, 0};
  const int64_t tokens = segment_length(p.cut, length);
  if (length <= p.cut.opening * tokens) return {0, 0};
  return {static_cast<uint32_t>(tokens / kChunk), static_cast<uint32_t>((length - 1) / tokens)};
}
// The opening and all runs want their items at the same time: they are made in rounds, of each as many items as it
// has segments.
__device__ __forceinline__ uint32_t ordered_item(const Params& p, const ItemOrder& order, uint32_t number) {
  if (number >= order.items * order.columns) return number;
  const uint32_t round = number / order.columns, column = number - round * order.columns;
  const auto opening = static_cast<uint32_t>(p.cut.opening), run = static_cast<uint32_t>(p.cut.run);
  if (column < opening) return round * opening + column;
  const uint32_t place = (column - opening) % run, first = column - place;  // the run's first segment
  return first * order.items + round * min(run, order.columns - first) + place;
}

// Where a sequence's item lies among the stages in memory.
__device__ __forceinline__ uint32_t stage_slot(const Params& p, uint32_t first, uint32_t item, const Unit& unit) {
  return (first + item) * static_cast<uint32_t>(p.value_heads) + unit.head();
}

}  // namespace kda::cuda::prefill_fused

// Which items a group of the staged form's preparation takes, in which order.
//
// Works (sequences longest first x value heads) come in waves of those that chains run at once; of a wave, item 0 of
// every work, then item 1, ...: what all chains want next is made first. Without chains beside it a wave is a
// sequence's heads, so that neighbours read neighbouring rows. Groups take units a number of groups apart that is a
// multiple of the wave's width, if they are so many: a group then keeps its work.
#pragma once

#include "cuda/kernels/prefill_fused/produce.cuh"

namespace kda::cuda::prefill_fused {

// An item to prepare; items 0: there is none.
struct Unit {
  uint32_t item, items;     // of its sequence
  uint32_t sequence, head;  // value head
};

// Kept by one thread of each group.
struct UnitCursor {
  uint32_t first, width, items;  // the wave's first work, works, and items of its longest
  uint32_t row, column;          // item and work of the wave

  __device__ static uint32_t work_total(const Params& p) {
    return static_cast<uint32_t>(active_sequences(p)) * static_cast<uint32_t>(p.value_heads);
  }
  __device__ static uint32_t wave_width(const Params& p) {
    return static_cast<uint32_t>(p.wave > 0 ? p.wave : p.value_heads);
  }
  __device__ static uint32_t sequence_of(const Params& p, uint32_t rank) {
    return has_order(p) ? sequence_order()[rank] : rank;
  }
  // Of `groups`, those that have units to take.
  __device__ static uint32_t used_groups(const Params& p, uint32_t groups) {
    const uint32_t width = min(wave_width(p), max(work_total(p), 1u));
    return groups > width ? groups - groups % width : groups;
  }
  // To the start of a wave whose first work belongs to the sequence of this rank.
  __device__ void open_wave(const Params& p, uint32_t works, uint32_t rank) {
    width = min(wave_width(p), works - first);
    items = item_total(sequence_table()[sequence_of(p, rank)].length);
  }
  __device__ void move(uint32_t units) {
    const uint32_t rows = units / width;
    row += rows, column += units - rows * width;
    if (column >= width) column -= width, ++row;
  }
  // The unit here or the next that there is, `groups` apart. Short sequences: many waves are passed at once.
  __device__ Unit find(const Params& p, uint32_t groups) {
    const uint32_t heads = static_cast<uint32_t>(p.value_heads), works = work_total(p);
    uint32_t rank = first / heads;
    while (first < works) {
      if (row >= items) {
        const uint32_t before = width;
        row -= items, first += width;
        if (first >= works) break;
        rank = width == heads ? rank + 1 : first / heads;
        open_wave(p, works, rank);
        if (width != before) {
          const uint32_t left = row * before + column;
          row = left / width, column = left % width;
        }
        continue;
      }
      const uint32_t ahead = (first + column) / heads;
      const uint32_t n = sequence_of(p, ahead);
      const SequenceEntry& entry = sequence_table()[n];
      const uint32_t total = item_total(entry.length);
      if (row < total && (entry.flags & 1) != 0 && int64_t{entry.first} + total <= p.stage_positions)
        return {row, total, n, first + column - ahead * heads};
      move(groups);
    }
    return {0, 0, 0, 0};
  }
};

// Of a group, in shared memory. Written by one thread; others read a unit a group barrier later.
struct UnitArea {
  static constexpr uint32_t kNext = 0;     // {item, items, sequence, head} of the item to take next
  static constexpr uint32_t kCursor = 16;  // UnitCursor, 20 bytes
  static constexpr uint32_t kIsNew = 36;   // is its work another than the one before's?
  static constexpr uint32_t kSlot = 40;    // of the open item among the stages in memory
  static constexpr uint32_t kMade = 44;    // the slot whose stage is being finished; kNoSlot: none was yet
  static constexpr uint32_t kGroups = 48;  // groups that take units
  static constexpr uint32_t kAhead = 52;   // items from one unit of a work to the group's next
  static constexpr uint32_t kSource = 64;  // Source and bias of the next item's work, if it is new
  static constexpr uint32_t kSourceWords = 22;
  static constexpr uint32_t kBias = 160;  // [128] fp32
  static constexpr uint32_t kBytes = kBias + 512;
};
static_assert(4 * UnitArea::kSourceWords >= Source::kGateStep + 4);
static_assert(UnitArea::kSource + 4 * UnitArea::kSourceWords <= UnitArea::kBias);
static_assert(UnitArea::kBytes <= kUnitBytes);
constexpr uint32_t kNoSlot = 0xffffffff;

// Where a sequence's item lies among the stages in memory.
__device__ __forceinline__ uint32_t stage_slot(const Params& p, const Unit& unit) {
  return (sequence_table()[unit.sequence].first + unit.item) * static_cast<uint32_t>(p.value_heads) + unit.head;
}

__device__ __forceinline__ void keep_cursor(const UnitCursor& cursor, uint32_t area) {
  ptx::store_shared(area + UnitArea::kCursor, uint4{cursor.first, cursor.width, cursor.items, cursor.row});
  ptx::store_shared(area + UnitArea::kCursor + 16, cursor.column);
}

// One thread: the group's first unit.
__device__ __noinline__ inline void take_first_unit(const Params& p, uint32_t number, uint32_t groups,
                                                    uint32_t area) {
  UnitCursor cursor{0, 1, 0, 0, 0};
  Unit unit{0, 0, 0, 0};
  const uint32_t works = UnitCursor::work_total(p);
  if (number < groups && works > 0) {
    cursor.open_wave(p, works, 0);
    cursor.move(number);
    unit = cursor.find(p, groups);
  }
  keep_cursor(cursor, area);
  ptx::store_shared(area + UnitArea::kNext, uint4{unit.item, unit.items, unit.sequence, unit.head});
  ptx::store_shared(area + UnitArea::kIsNew, 1u);
  ptx::store_shared(area + UnitArea::kMade, kNoSlot);
  ptx::store_shared(area + UnitArea::kGroups, groups);
  ptx::store_shared(area + UnitArea::kAhead, max(groups / cursor.width, 1u));
}

// One thread: the unit after the one in UnitArea::kNext. Not inlined: it would cost the item loop registers.
__device__ __noinline__ inline void take_next_unit(const Params& p, uint32_t area) {
  const uint4 kept = ptx::load_shared_u4(area + UnitArea::kCursor),
              last = ptx::load_shared_u4(area + UnitArea::kNext);
  if (last.y == 0) return;
  const uint32_t groups = ptx::load_shared_u32(area + UnitArea::kGroups);
  UnitCursor cursor{kept.x, kept.y, kept.z, kept.w, ptx::load_shared_u32(area + UnitArea::kCursor + 16)};
  cursor.move(groups);
  const Unit unit = cursor.find(p, groups);
  keep_cursor(cursor, area);
  ptx::store_shared(area + UnitArea::kNext, uint4{unit.item, unit.items, unit.sequence, unit.head});
  ptx::store_shared(area + UnitArea::kIsNew, unit.sequence != last.z || unit.head != last.w ? 1u : 0u);
}

// One warp: what an item of UnitArea::kNext's work needs of it, to where the group finds it when it gets there. An
// item ahead, since it waits for memory.
template <class C>
__device__ __noinline__ void open_ahead(const Params& p, uint32_t area, int lane) {
  const uint4 next = ptx::load_shared_u4(area + UnitArea::kNext);
  if (next.y == 0 || ptx::load_shared_u32(area + UnitArea::kIsNew) == 0) return;
  const SequenceEntry entry = sequence_table()[next.z];
  Work work;
  work.head = static_cast<int32_t>(next.w);
  const bool is_batched = p.cu_seqlens.data == nullptr && p.begin.data == nullptr;
  work.span = Span{is_batched ? static_cast<int64_t>(next.z) : 0, entry.begin, entry.length};
  open_source<C::kGate, typename C::GateT>(p, work, area + UnitArea::kSource, area + UnitArea::kBias, lane, 32);
}

}  // namespace kda::cuda::prefill_fused

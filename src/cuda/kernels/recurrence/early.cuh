// A block's row, found before the grid before this one has ended.
//
// A short call takes as long as its chain of waits: for the grid before, for index values, for what they point at,
// for the state from memory. A block of the grid's first wave therefore reads the index values and asks the L2 for
// its state while that grid still runs. The values may change until it ends (V-14), so they are read again after the
// wait, along with everything that they point at; only if they differ is that done once more. What was asked for in
// vain has cost its way from memory and nothing else: addresses are checked against the pool either way. Index values
// are read past the L1, which could keep the old ones. Blocks of later waves begin after that grid's end and wait
// first.
#pragma once

#include "cuda/kernels/recurrence/block.cuh"
#include "cuda/ptx/copy.h"

namespace kda::cuda {

__device__ __forceinline__ bool in_first_wave(const HeadSplit& split) {
  const int64_t n = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  return n * gridDim.x + blockIdx.x < split.wave;
}

// Asks for this block's rows of one head's state. One thread, one bulk request: the rows lie together.
template <class Pool, class P>
__device__ __forceinline__ void ask_for_state(const P& p, const HeadPlace& at, int64_t slot, int32_t head) {
  const auto* rows = static_cast<const Pool*>(head_state<Pool>(p, slot, head).data) + at.first_row * 128;
  ptx::prefetch_block_to_l2(rows, static_cast<uint32_t>(at.rows * 128 * sizeof(Pool)));
}

// Asks for the state of the block that will take this one's place, `wave` blocks on. One thread.
template <class Pool>
__device__ __forceinline__ void ask_for_later_block(const DecodeParams& p) {
  const uint32_t later = blockIdx.x + static_cast<uint32_t>(p.split.wave);
  const int64_t n = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y + later / gridDim.x;
  const SlotRef& t = p.rule.slots;
  if (n >= p.sequences.count || t.initial != Initial::kAll || !t.slots.present()) return;
  const int64_t accepted =
      p.rule.accepted != nullptr && !p.rule.records ? p.rule.accepted[n * p.rule.accepted_stride] : 1;
  if (accepted < 1 || accepted > t.slots.columns) return;
  const int64_t slot = t.slots.at(n, accepted - 1);
  if (!slot_is_live(slot, t.count, t.null_slot)) return;
  HeadPlace at = place_of_block(p.form, p.split, static_cast<int32_t>(later % gridDim.x));
  ask_for_state<Pool>(p, at, slot, at.head);
}

__device__ __forceinline__ void publish(RowPlace& s_place, const HeadPlace& at, const DecodeRow& row) {
  __syncwarp();
  if (lane_id() == 0) {
    s_place.at = at;
    s_place.at.span = row.span;
    s_place.row = row;
  }
  __syncwarp();
}

// Finds the block's row. First: waits for the grid before unless the block may be early.
struct EarlyRow {
  DecodeLoads loads;
  bool early = false;
  bool decided = true;  // by `loads` alone

  // False behind the active sequences; then the block has waited and leaves. `ask` is called while it is early.
  template <class Ask>
  __device__ __forceinline__ bool find(const DecodeParams& p, RowPlace& s_place, const Ask& ask) {
    touch_parameters(p);
    const HeadPlace at = place_of_block(p.form, p.split);
    early = in_first_wave(p.split);
    ptx::launch_dependents();
    if (!early) ptx::wait_for_prerequisites();
    if (at.n >= p.sequences.count) {  // the grid's last z
      ptx::wait_for_prerequisites();
      return false;
    }
    loads = load_decode_row(p.rule, p.sequences, at.n, true);
    // Early, only what needs no further index value is decided: column 0 of the table, written where it was read.
    decided = !early || (loads.accepted == 1 && p.rule.records == 0 && !p.rule.slots.write_slots.present());
    DecodeRow row;
    if (decided) row = resolve_decode_row(loads, p.rule, p.records, p.sequences, at.n);
    if (early) {
      if (row.active) ask(at, row);
      publish(s_place, at, row);
      ptx::wait_for_prerequisites();
      return true;
    }
    publish(s_place, at, row);
    return is_looked_at(loads, p.sequences, at.n);
  }

  // After the wait: what the values are now. Loads only; nothing waits for them here.
  __device__ __forceinline__ DecodeLoads load_again(const DecodeParams& p, const RowPlace& s_place) const {
    return early ? load_decode_row(p.rule, p.sequences, s_place.at.n, true) : loads;
  }

  // True if the values have changed; the row is then the one that they say.
  __device__ __forceinline__ bool changed(const DecodeLoads& now, const DecodeParams& p, RowPlace& s_place) {
    if (!early || (decided && now == loads)) return false;
    const HeadPlace at = s_place.at;
    loads = now;
    early = decided = false;
    publish(s_place, at, resolve_decode_row(now, p.rule, p.records, p.sequences, at.n));
    return true;
  }
};

}  // namespace kda::cuda

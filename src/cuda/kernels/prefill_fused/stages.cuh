// The staged form of the prefill: every item's preparation to memory, and the serial chains, which find their
// operands there.
//
//   1  prepare_stages_kernel  every item of every (sequence, head) to its stage in Params::stages; waits for nothing
//   2  chain_kernel           (chain.cuh) the consumer's role alone, stages by bulk copies; of cut sequences opening
//                             and summaries, then the segments, all from the same stages (S-6, segments.cuh)
//
// One after the other, each on the whole device; or, with Params::wave, side by side: the preparation is given some
// of the SMs, says of every stage when it is there, and makes first what the chains want first (units.cuh). The
// chains' grid cannot start before all of the preparation's blocks run, and these wait for nobody (F28).
//
// Arithmetic, order of operations and bits are those of the fused kernel: both compile the same functions.
// Stage of item i of a (sequence, head): [items of the sequences before it + i][head], Staged::kStride bytes.
// prepare: a CTA an SM, groups of 128 threads that take an item at a time and never meet after the start. What the
// solve makes goes to memory by a bulk copy, and operands too where three groups leave room for them in shared
// memory; otherwise those go from registers.
#pragma once

#include <type_traits>

#include "cuda/kernels/prefill_fused/units.cuh"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/signal.h"

namespace kda::cuda::prefill_fused {

// Groups, and copies of the loop bodies over an item's blocks: the dyadic form needs the registers of three.
template <class C>
constexpr int kPrepareGroups = C::kDiagonal == Diagonal::kAnchored ? 4 : 3;
template <class C>
constexpr int kPrepareThreads = 128 * kPrepareGroups<C>;
template <class C>
constexpr int kPrepareUnroll = 4;
// An item's rows wait in shared memory for their turn, an item ahead, where there is room: with four groups and bf16
// gates. Otherwise its first gates are held in registers.
template <class C>
constexpr bool kRowsWait = kPrepareGroups<C> == 4 && sizeof(typename C::GateT) == 4;
template <class C>
using PreparePlan = PrepareShared<kPrepareGroups<C>, kRowsWait<C>>;
// Three groups have room for their stages in shared memory.
template <class C>
using PrepareSink = std::conditional_t<kPrepareGroups<C> == 4, PairedSink, SharedSink>;

struct Staged {
  static constexpr uint32_t kStride = 39552;  // of stages in memory: whole lines of 128 bytes
  static constexpr uint32_t kHalf = 19712;    // what the first CTA of a cluster loads
};
static_assert(Staged::kStride >= Stage::kBytes && Staged::kHalf % 128 == 0);

__device__ __forceinline__ char* stage_in_memory(const Params& p, int64_t slot) {
  return static_cast<char*>(p.stages) + slot * static_cast<int64_t>(Staged::kStride);
}
// The word that says that the stage of this slot is there.
__device__ __forceinline__ uint32_t* stage_flag(const Params& p, int64_t slot) {
  return reinterpret_cast<uint32_t*>(stage_in_memory(p, p.stage_positions * p.value_heads)) + slot;
}

// `thread_in_group`: where the group's part of shared memory starts plus the thread's index, in one register.
template <class C>
struct PreparePlace : Place {
  uint32_t unit, rows;  // UnitArea, RowsAhead
  __device__ explicit PreparePlace(uint32_t thread_in_group)
      : Place{ProducerLane(static_cast<int>(renew(thread_in_group) & 1023),
                           static_cast<int>((renew(thread_in_group) & 1023) >> 7)),
              0, 0, 0, 0} {
    using Plan = PreparePlan<C>;
    const uint32_t first = renew(thread_in_group) & ~1023u;
    stage = first - Plan::kHeldFrom;
    group_scratch = first + Plan::kScratch;
    scratch = group_scratch + me.warp * 4096;
    area = first + Plan::kArea;
    unit = first + Plan::kUnit;
    rows = first + Plan::kRows;
  }
  __device__ void meet() const { ptx::named_barrier(1 + me.group, 128); }
  __device__ Unit open() const {
    const uint2 x = ptx::load_shared_u2(unit + UnitArea::kOpen);
    return {x.x, x.y};
  }
  __device__ uint32_t open_item() const { return ptx::load_shared_u32(unit + UnitArea::kItem); }
  __device__ uint32_t open_items() const { return ptx::load_shared_u32(unit + UnitArea::kItems); }
  __device__ uint32_t open_slot() const { return ptx::load_shared_u32(unit + UnitArea::kSlot); }
  __device__ uint32_t made_slot() const { return ptx::load_shared_u32(unit + UnitArea::kMade); }
};

struct NothingHeld {};
template <class C>
using HeldAhead = std::conditional_t<kRowsWait<C>, NothingHeld, RawGates<typename C::GateT>>;
template <class At>
__device__ __forceinline__ RowsAhead rows_ahead(const At& at, NothingHeld&) {
  return RowsAhead{at.rows};
}
template <class At, class GateT>
__device__ __forceinline__ RawGates<GateT>& rows_ahead(const At&, RawGates<GateT>& held) {
  return held;
}

// Copies to it are done; a group barrier must follow.
__device__ __forceinline__ void wait_for_rows(NothingHeld&) { ptx::copy_async_wait<0>(); }
template <class GateT>
__device__ __forceinline__ void wait_for_rows(RawGates<GateT>&) {}

// Opens the unit here or the next that there is; returns its item. All threads of the group, of which none may read
// the work before's rows any more; what it writes is read by this thread or a group barrier later.
template <class C, class At>
__device__ __forceinline__ uint32_t open_unit(const Params& p, const At& at, Unit& unit, uint32_t place_before,
                                              const uint2& step) {
  const SequenceEntry entry = find_unit(p, unit, step, ptx::load_shared_u32(at.unit + UnitArea::kActive));
  const ItemOrder order = item_order(p, entry.length);
  const uint32_t item = ordered_item(p, order, unit.number);
  if (at.me.index() == 0) {
    ptx::store_shared(at.unit + UnitArea::kOpen, uint2{unit.number, unit.place});
    if (unit.exists()) {
      ptx::store_shared(at.unit + UnitArea::kItems, item_total(entry.length));
      ptx::store_shared(at.unit + UnitArea::kItem, item);
      ptx::store_shared(at.unit + UnitArea::kSlot, stage_slot(p, entry.first, item, unit));
      ptx::store_shared(at.unit + UnitArea::kFirst, entry.first);
      ptx::store_shared(at.unit + UnitArea::kOrder, uint2{order.items, order.columns});
    }
  }
  if (!unit.exists() || unit.place == place_before) return item;
  if (at.me.index() == 0) {
    const bool is_batched = p.cu_seqlens.data == nullptr && p.begin.data == nullptr;
    Work work;
    work.head = static_cast<int32_t>(unit.head());
    work.span = Span{is_batched ? static_cast<int64_t>(unit.rank()) : 0, entry.begin, entry.length};
    open_rows<typename C::GateT>(p, work, at.area + GroupArea::kSource);
  }
  if (unit.head() != place_before >> 8)
    open_head<typename C::GateT>(p, load_head(p, static_cast<int>(unit.head()), at.me.index()), at.area,
                                 at.me.index());
  at.meet();
  return item;
}

// Item `number` of the open unit's sequence.
template <class At>
__device__ __forceinline__ uint32_t item_of_open(const Params& p, const At& at, uint32_t number) {
  if (p.cut.segments <= 1) return number;
  const uint2 order = ptx::load_shared_u2(at.unit + UnitArea::kOrder);
  return ordered_item(p, {order.x, order.y}, number);
}

// The unit after `unit`, of whose sequence there are `items`: mostly of the same head and sequence. Returns its item.
// All threads.
template <class C, class At>
__device__ __forceinline__ uint32_t open_next_unit(const Params& p, const At& at, Unit& unit, uint32_t items) {
  const uint2 step = ptx::load_shared_u2(at.unit + UnitArea::kStep);
  if (step.y == 0 && unit.number + step.x < items) {
    unit.number += step.x;
    const uint32_t item = item_of_open(p, at, unit.number);
    if (at.me.index() != 0) return item;
    ptx::store_shared(at.unit + UnitArea::kOpen, unit.number);
    ptx::store_shared(at.unit + UnitArea::kItem, item);
    ptx::store_shared(at.unit + UnitArea::kSlot,
                      stage_slot(p, ptx::load_shared_u32(at.unit + UnitArea::kFirst), item, unit));
    return item;
  }
  const uint32_t place_before = unit.place;
  move_unit(p, unit, step);
  return open_unit<C>(p, at, unit, place_before, step);
}

template <class C, class At, class Ahead>
__device__ __forceinline__ void load_next(uint32_t item, const At& at, Ahead&& ahead) {
  const int index = static_cast<int>(item);
  load_ahead<C>(index, item_count(at.area, index), at, ahead);
}
// Asks the L2 for what the group's next item of the same sequence and head takes: each warp for half of q or k.
template <class At>
__device__ __forceinline__ void prefetch_next(const Params& p, const At& at, const Unit& unit) {
  const uint32_t number = unit.number + ptx::load_shared_u2(at.unit + UnitArea::kStep).x;
  const int next = static_cast<int>(item_of_open(p, at, number));
  prefetch_rows<128>(at.area, next, at.me.warp >> 1, 128 * (at.me.warp & 1), at.me);
  if (at.me.warp == 0 && at.me.lane < item_count(at.area, next))
    ptx::prefetch_to_l2(beta_address(at.area, next, at.me.lane));
}

// One thread: the stage of the item before is in memory.
__device__ __forceinline__ void call_ready(const Params& p, uint32_t unit) {
  ptx::bulk_store_wait<0>();
  const uint32_t slot = ptx::load_shared_u32(unit + UnitArea::kMade);
  if (slot != kNoSlot) ptx::store_release(stage_flag(p, slot), 1u);
}

template <class C>
__global__ void __launch_bounds__(kPrepareThreads<C>, 1) prepare_stages_kernel(const __grid_constant__ Params p) {
  using At = PreparePlace<C>;
  using Plan = PreparePlan<C>;
  constexpr bool kIsHeld = Plan::kHeldFrom == 0;
  const uint32_t thread =
      hold(ptx::shared_address(s_memory) + Plan::kFirst + (threadIdx.x >> 7) * Plan::kStride + threadIdx.x);
  list_sequences(p, kPrepareThreads<C>);
  ptx::launch_dependents();  // chains wait for the whole of this grid, or for each stage's flag
  HeldAhead<C> held;
  {
    const At at(thread);
    clear_triangles(at.stage, at.me.index(), 128);
    const uint32_t heads = static_cast<uint32_t>(p.value_heads), number = at.me.group * gridDim.x + blockIdx.x;
    const uint32_t groups = used_groups(p, gridDim.x * kPrepareGroups<C>);
    const uint2 step{groups / heads, groups % heads};
    Unit unit = {number / heads, number < groups ? number % heads << 8 : Unit::kNoPlace};
    if (at.me.index() == 0) {
      ptx::store_shared(at.unit + UnitArea::kStep, step);
      ptx::store_shared(at.unit + UnitArea::kActive, static_cast<uint32_t>(active_sequences(p)));
      ptx::store_shared(at.unit + UnitArea::kMade, kNoSlot);
    }
    __syncthreads();
    const uint32_t item = open_unit<C>(p, at, unit, Unit::kNoPlace, step);
    if (unit.exists()) load_next<C>(item, at, rows_ahead(at, held));
    wait_for_rows(held);
    at.meet();
  }
  while (true) {
    RawRows raw;
    ItemTotals totals;
    {
      const At at(thread);
      Unit unit = at.open();
      if (!unit.exists()) break;
      const uint32_t items = at.open_items();
      const int item = static_cast<int>(at.open_item());
      totals = prepare_rows<C, kPrepareUnroll<C>>(raw, p, item, item_count(at.area, item), at, rows_ahead(at, held),
                                                  BetaWithRows{});
      if constexpr (!kRowsWait<C>) prefetch_next(p, at, unit);
      if (at.me.index() == 0) {
        if (p.wave > 0) call_ready(p, at.unit);
        else ptx::bulk_store_wait_read<0>();  // of what is here of the stage
        ptx::store_shared(at.unit + UnitArea::kMade, at.open_slot());
      }
      at.meet();
      const uint32_t next = open_next_unit<C>(p, at, unit, items);
      if (kRowsWait<C> && unit.exists()) load_next<C>(next, at, rows_ahead(at, held));
    }
    {
      const At at(thread);
      PrepareSink<C> sink;
      if constexpr (kIsHeld) sink.stage = at.stage;
      else sink.stage = stage_in_memory(p, at.made_slot());
      prepare_operands<C, kPrepareUnroll<C>>(raw, totals, p, at, sink, [] {});
      if constexpr (kIsHeld) ptx::fence_async_proxy();
      else ptx::fence_async_proxy_global();  // chains read by bulk copies
    }
    const At at(thread);
    at.meet();
    if (kIsHeld && at.me.index() == 0) {  // while the solve runs
      ptx::bulk_store(stage_in_memory(p, at.made_slot()), at.stage, Stage::kSolve);
      ptx::bulk_store_commit();
    }
    if constexpr (!kRowsWait<C>) {
      if (at.open().exists()) load_next<C>(at.open_item(), at, held);
    }
    const ScoreParts scores = load_scores(at.group_scratch, at.area, at.me);
    reduce_scores<C::kDiagonal>(p, scores, at.area, at.stage, at.me);
    at.meet();
    if (at.me.duty() <= kSolvesLast) solve_block_columns(scores.column_betas, at.scratch, at.area, at.stage, at.me);
    ptx::fence_async_proxy();
    wait_for_rows(held);
    at.meet();
    if (at.me.index() == 0) {
      ptx::bulk_store(stage_in_memory(p, at.made_slot()) + Stage::kSolve, at.stage + Stage::kSolve,
                      Stage::kBytes - Stage::kSolve);
      ptx::bulk_store_commit();
    }
  }
  const At at(thread);
  if (at.me.index() != 0) return;
  if (p.wave > 0) call_ready(p, at.unit);
  else ptx::bulk_store_wait_read<0>();
}

}  // namespace kda::cuda::prefill_fused

// The staged form of the prefill: every item's preparation to memory, and the serial chains, which find their
// operands there.
//
//   1  prepare_stages_kernel  every item of every (sequence, head) to its stage in Params::stages; waits for nothing
//   2  chain_kernel           (chain.cuh) the consumer's role alone, stages by bulk copies; with segments: summaries,
//                             then merge_segments_kernel, then the segments, all from the same stages (S-6)
//
// One after the other, each on the whole device; or, with Params::wave, side by side: the preparation is given some
// of the SMs, says of every stage when it is there, and makes first what the chains want first (units.cuh). The
// chains' grid cannot start before all of the preparation's blocks run, and these wait for nobody (F28).
//
// Arithmetic, order of operations and bits are those of the fused kernel: both compile the same functions.
// Stage of item i of a (sequence, head): [items of the sequences before it + i][head], Staged::kStride bytes.
// prepare: a CTA an SM, groups of 128 threads that take an item at a time and never meet after the start. Operands go
// to memory from registers; what the solve makes goes by a bulk copy.
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
constexpr int kPrepareUnroll = C::kDiagonal == Diagonal::kAnchored ? 2 : 1;
template <class C>
using PrepareSink = std::conditional_t<C::kDiagonal == Diagonal::kAnchored, PairedSink, MemorySink>;

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

// `thread_in_window`: the shared window's address plus the thread's index, in one register.
template <int kGroups>
struct PreparePlace : Place {
  uint32_t unit;  // UnitArea
  __device__ explicit PreparePlace(uint32_t thread_in_window)
      : Place{ProducerLane(static_cast<int>(renew(thread_in_window) & 1023),
                           static_cast<int>((renew(thread_in_window) & 1023) >> 7)),
              0, 0, 0, 0} {
    using Plan = PrepareShared<kGroups>;
    const uint32_t shared = renew(thread_in_window) & ~1023u;
    area = shared + Plan::kGroup + me.group * kGroupBytes;
    group_scratch = shared + Plan::kScratch + me.group * kScratchBytes;
    scratch = group_scratch + me.warp * 4096;
    stage = shared + Plan::kTail + me.group * Plan::kTailBytes - Stage::kSolve;  // its operands are not here
    unit = shared + Plan::kUnits + me.group * kUnitBytes;
  }
  __device__ void meet() const { ptx::named_barrier(1 + me.group, 128); }
  __device__ uint32_t open_slot() const { return ptx::load_shared_u32(unit + UnitArea::kSlot); }
};

// The next unit becomes the open one, its work too. All threads of the group.
template <class At>
__device__ __forceinline__ Position open_unit(const Params& p, const At& at) {
  const uint4 next = ptx::load_shared_u4(at.unit + UnitArea::kNext);
  const Position position = {static_cast<int>(next.x), static_cast<int>(next.y)};
  if (position.items == 0) return position;
  if (ptx::load_shared_u32(at.unit + UnitArea::kIsNew) != 0) {
    const uint32_t word = at.me.index() * 4;
    ptx::store_shared(at.area + GroupArea::kBias + word, ptx::load_shared_f1(at.unit + UnitArea::kBias + word));
    if (at.me.index() < static_cast<int>(UnitArea::kSourceWords))
      ptx::store_shared(at.area + GroupArea::kSource + word,
                        ptx::load_shared_u32(at.unit + UnitArea::kSource + word));
    at.meet();
  }
  if (at.me.index() == 0)
    ptx::store_shared(at.unit + UnitArea::kSlot, stage_slot(p, {next.x, next.y, next.z, next.w}));
  return position;
}

// One thread: the stage of the item before is in memory.
__device__ __forceinline__ void call_ready(const Params& p, uint32_t unit) {
  ptx::bulk_store_wait<0>();
  const uint32_t slot = ptx::load_shared_u32(unit + UnitArea::kMade);
  if (slot != kNoSlot) ptx::store_release(stage_flag(p, slot), 1u);
}

template <class C>
__global__ void __launch_bounds__(kPrepareThreads<C>, 1) prepare_stages_kernel(const __grid_constant__ Params p) {
  using At = PreparePlace<kPrepareGroups<C>>;
  const uint32_t thread = hold(ptx::shared_address(s_memory) + threadIdx.x);
  list_sequences(p, kPrepareThreads<C>);
  ptx::launch_dependents();  // chains wait for the whole of this grid, or for each stage's flag
  Ahead<typename C::GateT> ahead;
  Position position;
  {
    const At at(thread);
    clear_triangles(at.stage, at.me.index(), 128);
    __syncthreads();
    if (at.me.warp == last_column_warp(at.me)) {
      const uint32_t groups = gridDim.x * kPrepareGroups<C>;
      if (at.me.lane == 0)
        take_first_unit(p, at.me.group * gridDim.x + blockIdx.x, UnitCursor::used_groups(p, groups), at.unit);
      __syncwarp();
      open_ahead<C>(p, at.unit, at.me.lane);
    }
    at.meet();
    position = open_unit(p, at);
    load_ahead<C>(p, position, at, ahead);
    at.meet();
  }
  while (position.items != 0) {
    {
      RawRows raw;
      {
        const At at(thread);
        prepare_rows<C, kPrepareUnroll<C>>(raw, p, position.index, at, ahead,
                                           static_cast<int>(ptx::load_shared_u32(at.unit + UnitArea::kAhead)));
        if (at.me.index() == 0) {
          if (p.wave > 0) call_ready(p, at.unit);
          else ptx::bulk_store_wait_read<0>();  // of the stage's tail
        }
        at.meet();
      }
      const At at(thread);
      PrepareSink<C> sink;
      sink.stage = stage_in_memory(p, at.open_slot());
      prepare_operands<C, kPrepareUnroll<C>>(raw, p, at, sink);
      ptx::fence_async_proxy_global();  // chains read by bulk copies
    }
    const At at(thread);
    at.meet();
    if (at.me.index() == 0) ptx::store_shared(at.unit + UnitArea::kMade, at.open_slot());
    position = open_unit(p, at);
    load_ahead<C>(p, position, at, ahead);
    reduce_scores<C::kDiagonal>(p, at.group_scratch, at.area, at.stage, at.me);
    at.meet();
    if (at.me.warp == last_column_warp(at.me)) {
      if (at.me.lane == 0) take_next_unit(p, at.unit);
      __syncwarp();
      open_ahead<C>(p, at.unit, at.me.lane);
    }
    solve_block_columns(at);
    ptx::fence_async_proxy();
    at.meet();
    if (at.me.index() == 0) {
      const uint32_t slot = ptx::load_shared_u32(at.unit + UnitArea::kMade);
      ptx::bulk_store(stage_in_memory(p, slot) + Stage::kSolve, at.stage + Stage::kSolve,
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

// The staged form of the prefill, for calls whose heads and sequences do not fill the chip, and for short ones: the
// preparation of all items at once on the whole device, then the serial chains, which find their operands in memory.
//
//   1  prepare_stages_kernel  every item of every (sequence, head) to its stage in Params::stages; nothing waits
//   2  chain_kernel           (chain.cuh) the consumer's role alone, stages by bulk copies; with segments: summaries,
//                             then merge_segments_kernel, then the segments, all from the same stages (S-6)
//
// Arithmetic, order of operations and bits are those of the fused kernel: both compile the same functions.
// Stage of item i of a (sequence, head): [items of the sequences before it + i][head], Staged::kStride bytes.
// prepare: 128 threads, one item at a time. A CTA takes units (position, head), the grid's size apart, a multiple of
// the heads, so that neighbours read neighbouring rows and a CTA keeps its head. Operands go to memory from
// registers; what the solve makes goes by a bulk copy.
#pragma once

#include <type_traits>

#include "cuda/kernels/prefill_fused/produce.cuh"
#include "cuda/ptx/grid.h"

namespace kda::cuda::prefill_fused {

constexpr int kPrepareThreads = 128;
// CTAs of an SM, and copies of the loop bodies over an item's blocks: the dyadic form needs the registers of three.
template <class C>
constexpr int kPrepareCtas = C::kDiagonal == Diagonal::kAnchored ? 4 : 3;
template <class C>
constexpr int kPrepareUnroll = C::kDiagonal == Diagonal::kAnchored ? 2 : 1;
template <class C>
using PrepareSink = std::conditional_t<C::kDiagonal == Diagonal::kAnchored, PairedSink, MemorySink>;

struct Staged {
  static constexpr uint32_t kStride = 39552;  // of stages in memory: whole lines of 128 bytes
  static constexpr uint32_t kHalf = 19712;    // what the first CTA of a cluster loads
};
static_assert(Staged::kStride >= Stage::kBytes && Staged::kHalf % 128 == 0);

__device__ __forceinline__ char* stage_in_memory(const Params& p, uint32_t position, int head) {
  return static_cast<char*>(p.stages) +
         (static_cast<int64_t>(position) * p.value_heads + head) * static_cast<int64_t>(Staged::kStride);
}

struct PreparePlace : Place {
  __device__ PreparePlace(uint32_t thread, uint32_t window)
      : Place{ProducerLane(static_cast<int>(renew(thread)), 0), 0, 0, 0, 0} {
    const uint32_t shared = renew(window);
    area = shared + PrepareShared::kGroup;
    group_scratch = shared + PrepareShared::kScratch;
    scratch = group_scratch + me.warp * 4096;
    stage = shared + PrepareShared::kTail - Stage::kSolve;  // its operands are not here
  }
};

// Where a preparing CTA stands: the item `position` of all sequences' items, of value head `head`.
struct UnitCursor {
  uint32_t position, head;
  uint32_t step, rest;  // the grid's size in units: positions and heads
  int sequence, active;
  __device__ explicit UnitCursor(const Params& p) {
    const uint32_t heads = static_cast<uint32_t>(p.value_heads);
    position = blockIdx.x / heads, head = blockIdx.x - position * heads;
    step = gridDim.x / heads, rest = gridDim.x - step * heads;
    sequence = -1;
    active = static_cast<int>(active_sequences(p));
  }
  __device__ void advance(const Params& p) {
    position += step, head += rest;
    if (head >= static_cast<uint32_t>(p.value_heads)) head -= p.value_heads, ++position;
  }
};

// The item of the cursor within its sequence, which is opened if it is not open; items 0: there is none.
template <class C>
__device__ __forceinline__ Position take_unit(const Params& p, UnitCursor& unit, uint32_t area,
                                              const ProducerLane& me, bool head_changes) {
  int n = max(unit.sequence, 0);
  if (unit.position >= p.stage_positions) return {0, 0};
  while (n < unit.active && unit.position >= sequence_table()[n].first + item_total(sequence_table()[n].length)) ++n;
  if (n >= unit.active) return {0, 0};
  const SequenceEntry entry = sequence_table()[n];
  if (n != unit.sequence || head_changes) {
    unit.sequence = n;
    Work work;
    work.head = static_cast<int32_t>(unit.head);
    const bool is_batched = p.cu_seqlens.data == nullptr && p.begin.data == nullptr;
    work.span = Span{is_batched ? n : 0, entry.begin, entry.length};
    ptx::named_barrier(1, kPrepareThreads);  // everyone is done with the one before
    open_source<C::kGate, typename C::GateT>(p, work, area, me.index());
    ptx::named_barrier(1, kPrepareThreads);
  }
  return {static_cast<int>(unit.position - entry.first), static_cast<int>(item_total(entry.length))};
}

template <class C>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareCtas<C>)
    prepare_stages_kernel(const __grid_constant__ Params p) {
  ptx::launch_dependents();  // the chains wait for the whole of this grid before they load a stage
  const uint32_t thread = renew(threadIdx.x), window = renew(ptx::shared_address(s_memory));
  list_sequences(p, kPrepareThreads);
  clear_triangles(window + PrepareShared::kTail - Stage::kSolve, kPrepareThreads);
  __syncthreads();
  UnitCursor unit(p);
  Ahead<typename C::GateT> ahead;
  Position position;
  {
    const PreparePlace at(thread, window);
    position = take_unit<C>(p, unit, at.area, at.me, true);
    load_ahead<C>(p, position, at, ahead);
  }
  while (position.items != 0) {
    {
      RawRows raw;
      {
        const PreparePlace at(thread, window);
        prepare_rows<C, kPrepareUnroll<C>>(raw, p, position.index, at, ahead, static_cast<int>(unit.step));
        if (at.me.index() == 0) ptx::bulk_store_wait_read<0>();  // of the stage's tail
        ptx::named_barrier(1, kPrepareThreads);
      }
      PrepareSink<C> sink;
      sink.stage = stage_in_memory(p, unit.position, static_cast<int>(unit.head));
      prepare_operands<C, kPrepareUnroll<C>>(raw, p, PreparePlace(thread, window), sink);
    }
    const PreparePlace at(thread, window);
    char* const target = stage_in_memory(p, unit.position, static_cast<int>(unit.head));
    ptx::named_barrier(1, kPrepareThreads);
    unit.advance(p);
    position = take_unit<C>(p, unit, at.area, at.me, unit.rest != 0);
    load_ahead<C>(p, position, at, ahead);
    solve_item<C::kDiagonal>(p, at);
    ptx::fence_async_proxy();
    ptx::named_barrier(1, kPrepareThreads);
    if (at.me.index() == 0) {
      ptx::bulk_store(target + Stage::kSolve, at.stage + Stage::kSolve, Stage::kBytes - Stage::kSolve);
      ptx::bulk_store_commit();
    }
  }
  if (threadIdx.x == 0) ptx::bulk_store_wait_read<0>();
}

}  // namespace kda::cuda::prefill_fused

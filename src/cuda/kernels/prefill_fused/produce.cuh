// The role of a producer warpgroup: every fourth item of its cluster, from raw rows to a full stage in both CTAs.
//
// Waits: empty[stage] (both CTAs' consumers have read the stage) before the first operand store; group barriers
// between the steps that exchange data among its four warps, and of the two that solve. Publishes: full[stage] here
// by an arrival, in the other CTA by two bulk copies: the operands before the solve, the rest after it.
#pragma once

#include <type_traits>

#include "cuda/kernels/prefill_fused/prepare_gates.cuh"
#include "cuda/kernels/prefill_fused/solve.cuh"
#include "cuda/ptx/mbarrier.h"

namespace kda::cuda::prefill_fused {

template <Gate kGateFamily, class GateType, Diagonal kDiagonalForm>
struct Config {
  static constexpr Gate kGate = kGateFamily;
  static constexpr Diagonal kDiagonal = kDiagonalForm;
  using GateT = GateType;  // uint32_t: bf16 pairs; float2: fp32 pairs
};

// The items of a cluster's works follow one another; a group takes every fourth. `index` counts from the first item
// of the open work, `items` is what that has.
struct Position {
  int index, items;
};

// The parameters for functions that are not inlined: of a reference to the kernel's own these read every field from
// global memory (500 cycles each on an H200, docs/kernels/prefill.md).
__device__ __forceinline__ const Params& shared_params() {
  return *reinterpret_cast<const Params*>(s_memory + Shared::kParams);
}
// All threads of the CTA; a barrier must follow.
__device__ __forceinline__ void share_params(const Params& p) {
  static_assert(sizeof(Params) % 8 == 0 && sizeof(Params) / 8 <= kThreads);
  if (threadIdx.x < sizeof(Params) / 8)
    reinterpret_cast<uint64_t*>(s_memory + Shared::kParams)[threadIdx.x] =
        reinterpret_cast<const uint64_t*>(&p)[threadIdx.x];
}

// Opens the work that holds item `position.index`; items 0: there is none. All 128 threads of the group. Not inlined:
// runs once a work, and would cost the item loop registers.
template <class C>
__device__ __noinline__ Position open_work(Position position, uint32_t area, int index_in_group, int group) {
  const Params& p = shared_params();
  const int64_t works = work_count(p);
  int64_t w = static_cast<int64_t>(ptx::load_shared_u64(area + GroupArea::kNextWork));
  Work work;
  do {
    position.index -= position.items;
    if (w >= works) return {0, 0};
    work = load_work(p, w);
    position.items = work.items;
    w = next_work(p, w, kClusterSize);
    if (group == 0 && index_in_group == 32 && work.items > 0)
      prefetch_state(p, work, ptx::cluster_rank() * kRowsPerCta, kRowsPerCta);
  } while (position.index >= position.items);
  const HeadGate head = load_head(p, work.head, index_in_group);
  ptx::named_barrier(1 + group, 128);  // everyone has read which work comes next, and is done with the one before
  if (index_in_group == 0) ptx::store_shared(area + GroupArea::kNextWork, static_cast<uint64_t>(w));
  if (index_in_group == 0) open_rows<typename C::GateT>(p, work, area + GroupArea::kSource);
  open_head<typename C::GateT>(p, head, area, index_in_group);
  ptx::named_barrier(1 + group, 128);
  return position;
}

// Of a stage: the upper triangles of T' and M are zero and stay so; everything else is written before it is read.
__device__ __forceinline__ void clear_triangles(uint32_t stage, uint32_t thread, uint32_t threads) {
  for (uint32_t i = thread * 16; i < Stage::kDecay - Stage::kSolve; i += threads * 16)
    ptx::store_shared(stage + Stage::kSolve + i, uint4{});
}

// Where a group works. Made anew for the steps of an item from one register: kept in registers, it would leave too
// few for the operands.
struct Place {
  ProducerLane me;
  uint32_t area, group_scratch, scratch, stage;
};

// In the fused kernel: the groups share a ring of stages with the other CTA's.
struct RingPlace : Place {
  uint32_t rank, number, full;
  // `thread_in_group`: where the group's part of shared memory starts plus the thread's index. All else comes from
  // it: reading the shared window or the CTA's rank again is slow (docs/kernels/prefill.md).
  __device__ explicit RingPlace(uint32_t thread_in_group)
      : Place{ProducerLane(static_cast<int>(renew(thread_in_group) & 1023),
                           static_cast<int>((renew(thread_in_group) & 1023) >> 7) - 1),
              0, 0, 0, 0} {
    group_scratch = renew(thread_in_group) & ~1023u;
    const uint32_t shared = group_scratch - Shared::kGroups - me.group * Shared::kGroupStride;
    rank = ptx::rank_of_window(shared);
    number = me.group * kClusterSize + rank;  // its stage
    area = group_scratch + Shared::kArea;
    scratch = group_scratch + me.warp * 4096;
    stage = shared + Shared::kStage + number * Stage::kStride;
    full = shared + Shared::kBarriers + number * 8;
  }
};

// First step of an item: prefix sums, norms, beta; a group barrier must follow. The group's next item is `ahead_by`
// items on.
template <class C, int kUnroll, class Ahead>
__device__ __forceinline__ void prepare_rows(RawRows& raw, const Params& p, int index, const Place& at, Ahead&& ahead,
                                             int ahead_by) {
  using GateT = typename C::GateT;
  constexpr bool kWait = std::is_same_v<std::remove_cvref_t<Ahead>, RowsAhead>;  // rows wait in shared memory
  const ProducerLane& me = at.me;
  const int count = item_count(at.area, index);
  // Beta of token `lane`, widened only behind the norms. Loads in flight are waited for together: asked for here it
  // makes its warp wait as soon as the gates are needed, and the others at the barrier. Beside the consumers that
  // costs less than the instructions of asking for it with the rows, by all warps since a branch's end would wait
  // too.
  constexpr bool kBetaFirst = kUnroll == 1;
  uint32_t beta = 0;
  if (kBetaFirst && me.warp == 0 && me.lane < count) beta = load_raw_beta(p, at.area, index, me.lane);
  if constexpr (kWait) {
    pad_gates_ahead(ahead, count, padding_gate<C::kGate, GateT>(), me);
  } else {
    stage_gates<C::kGate>(ahead, 0, count, at.scratch, me);
    if constexpr (RawGates<GateT>::kBlocks == 1) {
      load_gates<C::kGate>(ahead, at.area, index, 1, count, me);
      stage_gates<C::kGate>(ahead, 1, count, at.scratch, me);
    }
  }
  // The other gates' longer arithmetic needs the registers that the rows would wait in.
  constexpr bool kRowsFirst = C::kGate == Gate::kBounded;
  if constexpr (kRowsFirst && !kWait) load_rows(raw, at.area, index, count, me);
  if constexpr (!kBetaFirst) beta = load_raw_beta(p, at.area, index, min(me.lane, count - 1));
  __syncwarp();
  std::conditional_t<kWait, NarrowAhead, InPlace<C::kGate, GateT>> place;
  if constexpr (kWait) raw_place(place, ahead, me);
  else raw_place(place, at.scratch, me);
  write_prefix_sums<C::kGate>(at.area, me, at.scratch, place);
  if constexpr (kWait) take_rows(raw, ahead, me);
  else if constexpr (!kRowsFirst) load_rows(raw, at.area, index, count, me);
  pad_tokens(raw.q, 0, count, 0, me);
  pad_tokens(raw.k, 0, count, 0, me);
  write_sums<C::kDiagonal == Diagonal::kAnchored ? 2 : 3, kUnroll>(raw, me, at.area);
  if (me.warp == 0)
    ptx::store_shared(at.area + GroupArea::kBeta + me.lane * 4,
                      me.lane < count ? beta_value(p, raw_beta(p, beta)) : 0.0f);
  if constexpr (!kWait) prefetch_rows(at.area, index + ahead_by, !kBetaFirst, me);
}

__device__ __forceinline__ void wait_for_stage(const RingPlace& at) {
  const uint32_t parity = static_cast<uint32_t>(ptx::load_shared_u64(at.area + GroupArea::kPosition) >> 32) & 1;
  ptx::mbarrier_wait(at.full + kStages * 8, parity);
}

// Second step, once the stage is free: operands and partial scores; a group barrier must follow.
template <class C, int kUnroll, class Sink>
__device__ __forceinline__ void prepare_operands(const RawRows& raw, const Params& p, const Place& at, Sink sink) {
  const int channel = at.me.lane;
  const float total0 = load_prefix(at.scratch, 15, channel), total1 = load_prefix(at.scratch, 31, channel);
  ptx::store_shared(at.stage + Stage::kDecay + 4 * decay_place(32 * at.me.warp + channel),
                    exp2_exact(total0 + total1));
  if (at.me.warp == 0) {
    const float beta = ptx::load_shared_f1(at.area + GroupArea::kBeta + channel * 4);
    const bool tame = p.normalize && beta >= 0.0f && beta <= 2.0f;
    const uint32_t wild = __any_sync(0xffffffffu, !tame);
    if (channel == 0) ptx::store_shared(at.stage + Stage::kWild, wild);
  }
  const uint32_t totals = at.area + GroupArea::kTotals + at.me.warp * ChannelTotals::kBytes + channel * 4;
  const float power0 = ptx::exp2_approx(total0), power1 = ptx::exp2_approx(total1);
  ptx::store_shared(totals + ChannelTotals::kBefore, power0);
  ptx::store_shared(totals + ChannelTotals::kAfter1, power1);
  if constexpr (C::kDiagonal == Diagonal::kAnchored)
    ptx::store_shared(totals + ChannelTotals::kAfter, power0 * power1);
  write_norms(C::kDiagonal == Diagonal::kAnchored || p.normalize != 0, at.area, at.me);
  __syncwarp();
  if constexpr (C::kDiagonal == Diagonal::kAnchored) build_anchored<kUnroll>(raw, at.me, at.scratch, at.area, sink);
  else build_dyadic<kUnroll>(raw, at.me, at.scratch, at.area, sink);
}

// Two warps of four have all of it to do, the first more: not warp 0, which has the most else to do, in the first
// group; in the next the others, so that the SM's schedulers, which have a warp of each group, get as much to do.
__device__ __forceinline__ void solve_system(const Place& at) {
  const int turn = (at.me.warp + 2 * at.me.group + 2) & 3;
  if (turn < 2) solve_block_columns(at.scratch, at.area, at.stage, 2 * turn, at.me);
}
template <class C>
__device__ __forceinline__ void load_ahead(const Params& p, int index, const Place& at,
                                           RawGates<typename C::GateT>& ahead) {
  const int count = item_count(at.area, index);
  load_gates<C::kGate>(ahead, at.area, index, 0, count, at.me);
}

template <class C>
__device__ __forceinline__ void load_ahead(const Params&, int index, const Place& at, const RowsAhead& ahead) {
  copy_rows_ahead(at.area, index, item_count(at.area, index), ahead, at.me);
}

// Sends bytes [kFrom, kTo) of the stage to the other CTA; they count on its full barrier. One thread, after a group
// barrier before which every writer fenced the async proxy.
template <uint32_t kFrom, uint32_t kTo>
__device__ __forceinline__ void send_stage(const RingPlace& at) {
  ptx::bulk_copy_to_cluster(ptx::map_shared_rank(at.stage + kFrom, at.rank ^ 1), at.stage + kFrom, kTo - kFrom,
                            ptx::map_shared_rank(at.full, at.rank ^ 1));
}

// The rest of the stage, what the solve made, to the other CTA, and the whole to the consumers of both.
__device__ __forceinline__ void publish_stage(const RingPlace& at) {
  ptx::fence_async_proxy();
  ptx::named_barrier(1 + at.me.group, 128);
  if (at.me.index() != 0) return;
  ptx::mbarrier_arrive(at.full);
  ptx::mbarrier_arrive_expect_cluster(ptx::map_shared_rank(at.full, at.rank ^ 1), Stage::kBytes);
  send_stage<Stage::kSolve, Stage::kBytes>(at);
}

// The open item of a group, kept in shared memory: registers are short while operands are made.
__device__ __forceinline__ void keep_position(const Position& position, uint32_t parity, const RingPlace& at) {
  if (at.me.index() != 0) return;
  ptx::store_shared(at.area + GroupArea::kPosition,
                    static_cast<uint64_t>(static_cast<uint32_t>(position.index)) |
                        static_cast<uint64_t>(static_cast<uint32_t>(position.items) << 1 | parity) << 32);
}

template <class C>
__device__ __forceinline__ void produce(const Params& p) {
  const uint32_t thread = hold(ptx::shared_address(s_memory) + Shared::kGroups +
                               ((threadIdx.x >> 7) - 1) * Shared::kGroupStride + threadIdx.x);
  RawGates<typename C::GateT> ahead;  // an item's, loaded an item before
  {
    const RingPlace at(thread);
    if (at.me.index() == 0)
      ptx::store_shared(at.area + GroupArea::kNextWork, static_cast<uint64_t>(first_work(p, kClusterSize)));
    ptx::named_barrier(1 + at.me.group, 128);
    const Position position = open_work<C>({static_cast<int>(at.number), 0}, at.area, at.me.index(), at.me.group);
    if (position.items != 0) load_ahead<C>(p, position.index, at, ahead);
    keep_position(position, 1, at);  // parity 1: the first wait for an empty stage passes at once
    ptx::named_barrier(1 + at.me.group, 128);
  }
  while (true) {
    {
      RawRows raw;
      {
        const RingPlace at(thread);
        const uint64_t open = ptx::load_shared_u64(at.area + GroupArea::kPosition);
        if (static_cast<uint32_t>(open >> 33) == 0) return;
        prepare_rows<C, 1>(raw, p, static_cast<int>(static_cast<uint32_t>(open)), at, ahead, kStages);
        ptx::named_barrier(1 + at.me.group, 128);
      }
      const RingPlace at(thread);
      wait_for_stage(at);
      prepare_operands<C, 1>(raw, p, at, SharedSink{at.stage});
    }
    const RingPlace at(thread);
    {
      const uint64_t same = ptx::load_shared_u64(at.area + GroupArea::kPosition);
      Position position = {static_cast<int>(static_cast<uint32_t>(same)) + kStages,
                           static_cast<int>(static_cast<uint32_t>(same >> 33))};
      const uint32_t parity = static_cast<uint32_t>(same >> 32) & 1;
      ptx::fence_async_proxy();
      ptx::named_barrier(1 + at.me.group, 128);  // everyone has read it, and written partial scores and operands
      if (at.me.index() == 0) send_stage<0, Stage::kSolve>(at);  // while the solve runs
      if (position.index >= position.items) position = open_work<C>(position, at.area, at.me.index(), at.me.group);
      if (position.items != 0) load_ahead<C>(p, position.index, at, ahead);
      keep_position(position, parity ^ 1, at);
    }
    reduce_scores<C::kDiagonal>(p, at.group_scratch, at.area, at.stage, at.me);
    ptx::named_barrier(1 + at.me.group, 128);
    solve_system(at);
    publish_stage(at);
  }
}

}  // namespace kda::cuda::prefill_fused

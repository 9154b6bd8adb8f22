// The role of a producer warpgroup: every fourth item of its cluster, from raw rows to a full stage in both CTAs.
//
// Waits: empty[stage] (both CTAs' consumers have read the stage) before the first operand store; group barriers
// between the steps that exchange data among its four warps, and of the two that solve, while the others begin the
// next item. Publishes: full[stage] here by an arrival, in the other CTA by two bulk copies: the operands before the
// solve, the rest after it.
#pragma once

#include <type_traits>

#include "cuda/kernels/prefill_fused/balance.cuh"
#include "cuda/kernels/prefill_fused/prepare_gates.cuh"
#include "cuda/kernels/prefill_fused/solve.cuh"
#include "cuda/ptx/mbarrier.h"

namespace kda::cuda::prefill_fused {

// kWhich: of the fused kernel only.
template <Gate kGateFamily, class GateType, Diagonal kDiagonalForm, Works kWhich = Works::kAny>
struct Config {
  static constexpr Works kWorks = kWhich;
  static constexpr Gate kGate = kGateFamily;
  static constexpr Diagonal kDiagonal = kDiagonalForm;
  using GateT = GateType;  // uint32_t: bf16 pairs; float2: fp32 pairs
};

// The items of a cluster's works follow one another; a group takes every fourth. `index` counts from the first item
// of the open work, `items` is what that has.
struct Position {
  int index, items;
};

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
  const int64_t works = FusedWorks<C::kWorks>::count(p);
  int64_t w = static_cast<int64_t>(ptx::load_shared_u64(area + GroupArea::kNextWork));
  Work work;
  do {
    position.index -= position.items;
    if (w >= works) return {0, 0};
    work = FusedWorks<C::kWorks>::load(p, w);
    position.items = work.items;
    w = FusedWorks<C::kWorks>::next(p, w);
    if (group == 0 && index_in_group == 32 && work.items > 0 && work.part != Part::kRest)
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

// What a warp keeps from an item's first step for its second, besides rows.
struct ItemTotals {
  float power0, power1;  // 2^B0, 2^B1 of channel `lane`
  float decay;           // e^Gamma(-1, L)
  uint32_t wild;         // Duty::kHasBetas: Stage::kWild
};

// Raw betas that a warp of Duty::kHasBetas asked for an item ahead, token `lane`'s; or asked for with the rows.
struct BetaAhead {
  uint32_t raw;
};
struct BetaWithRows {};

// First step of an item of `count` tokens: prefix sums, norms, beta; a group barrier must follow.
template <class C, int kUnroll, class Ahead, class Beta>
__device__ __forceinline__ ItemTotals prepare_rows(RawRows& raw, const Params& p, int index, int count,
                                                   const Place& at, Ahead&& ahead, Beta beta_ahead) {
  using GateT = typename C::GateT;
  constexpr bool kWait = std::is_same_v<std::remove_cvref_t<Ahead>, RowsAhead>;  // rows wait in shared memory
  // The other gates' longer arithmetic needs the registers that the rows would wait in.
  constexpr bool kRowsFirst = C::kGate == Gate::kBounded && !kWait;
  const ProducerLane& me = at.me;
  const GateTerms terms = load_gate_terms(at.area, me);
  RowSource source = {};
  if constexpr (kRowsFirst) source = load_row_source(at.area);
  if constexpr (kWait) {
    pad_gates_ahead(ahead, count, padding_gate<C::kGate, GateT>(), me);
  } else {
    stage_gates<C::kGate>(ahead, 0, count, at.scratch, me);
    if constexpr (RawGates<GateT>::kBlocks == 1) {
      load_gates<C::kGate>(ahead, at.area, index, 1, count, me);
      stage_gates<C::kGate>(ahead, 1, count, at.scratch, me);
    }
  }
  // Widened only behind the norms.
  uint32_t beta;
  if constexpr (std::is_same_v<Beta, BetaAhead>) beta = beta_ahead.raw;
  else beta = load_raw_beta(p, at.area, index, min(me.lane, count - 1));
  __syncwarp();
  std::conditional_t<kWait, NarrowAhead, InPlace<C::kGate, GateT>> place;
  if constexpr (kWait) raw_place(place, ahead, me);
  else raw_place(place, at.scratch, me);
  write_prefix_sums<C::kGate>(terms, me, at.scratch, place, [&] {
    if constexpr (kRowsFirst) load_rows(raw, source, index, count, me);
  });
  if constexpr (kWait) take_rows(raw, ahead, me);
  else if constexpr (!kRowsFirst) load_rows(raw, load_row_source(at.area), index, count, me);
  __syncwarp();
  const float total0 = load_prefix(at.scratch, 15, me.lane), total1 = load_prefix(at.scratch, 31, me.lane);
  pad_tokens(raw.q, 0, count, 0, me);
  pad_tokens(raw.k, 0, count, 0, me);
  constexpr bool kAnchored = C::kDiagonal == Diagonal::kAnchored;
  write_sums<kAnchored ? 2 : 3, kAnchored ? 2 : kUnroll>(raw, me, at.area);
  ItemTotals totals = {ptx::exp2_approx(total0), ptx::exp2_approx(total1), exp2_exact(total0 + total1), 0};
  if (me.duty() == kHasBetas) {
    const float value = me.lane < count ? beta_value(p, raw_beta(p, beta)) : 0.0f;
    ptx::store_shared(at.area + GroupArea::kBeta + me.lane * 4, value);
    const bool tame = p.normalize && value >= 0.0f && value <= 2.0f;
    totals.wild = __any_sync(0xffffffffu, !tame);
  }
  return totals;
}

__device__ __forceinline__ void wait_for_stage(const RingPlace& at, uint32_t parity) {
  ptx::mbarrier_wait(at.full + kStages * 8, parity);
}

// Second step: norms and totals where the operands' loops look for them, then, once `wait` says that the stage is
// free, operands and partial scores; a group barrier must follow.
template <class C, int kUnroll, class Sink, class Wait>
__device__ __forceinline__ void prepare_operands(const RawRows& raw, const ItemTotals& totals, const Params& p,
                                                 const Place& at, Sink sink, Wait&& wait) {
  constexpr bool kAnchored = C::kDiagonal == Diagonal::kAnchored;
  const int channel = at.me.lane;
  write_norms(kAnchored || p.normalize != 0, at.area, at.me);
  const uint32_t powers = at.area + GroupArea::kTotals + at.me.warp * ChannelTotals::kBytes + channel * 4;
  ptx::store_shared(powers + ChannelTotals::kBefore, totals.power0);
  ptx::store_shared(powers + ChannelTotals::kAfter1, totals.power1);
  if constexpr (kAnchored) ptx::store_shared(powers + ChannelTotals::kAfter, totals.power0 * totals.power1);
  wait();
  ptx::store_shared(at.stage + Stage::kDecay + 4 * decay_place(32 * at.me.warp + channel), totals.decay);
  if (at.me.duty() == kHasBetas && channel == 0) ptx::store_shared(at.stage + Stage::kWild, totals.wild);
  __syncwarp();
  if constexpr (kAnchored) build_anchored<kUnroll>(raw, at.me, at.scratch, at.area, sink);
  else build_dyadic<kUnroll>(raw, at.me, at.scratch, at.area, sink);
}

template <class C>
__device__ __forceinline__ void load_ahead(int index, int count, const Place& at,
                                           RawGates<typename C::GateT>& ahead) {
  load_gates<C::kGate>(ahead, at.area, index, 0, count, at.me);
}

template <class C>
__device__ __forceinline__ void load_ahead(int index, int count, const Place& at, const RowsAhead& ahead) {
  copy_rows_ahead(at.area, index, count, ahead, at.me);
}

// Sends bytes [kFrom, kTo) of the stage to the other CTA; they count on its full barrier. One thread, after a fence
// of the async proxy: that one stands between it and all that others wrote before a barrier.
template <uint32_t kFrom, uint32_t kTo>
__device__ __forceinline__ void send_stage(const RingPlace& at) {
  ptx::bulk_copy_to_cluster(ptx::map_shared_rank(at.stage + kFrom, at.rank ^ 1), at.stage + kFrom, kTo - kFrom,
                            ptx::map_shared_rank(at.full, at.rank ^ 1));
}

// The rest of the stage, what the solve made, to the other CTA, and the whole to the consumers of both. By the warp
// that ends the solve.
__device__ __forceinline__ void publish_stage(const RingPlace& at) {
  ptx::fence_async_proxy();
  __syncwarp();
  if (at.me.lane != 0) return;
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
  // Of the next item, asked for an item before.
  RawGates<typename C::GateT> ahead;
  BetaAhead beta = {0};
  Position position = {0, 0};
  int count = 0;
  uint32_t parity = 1;  // of the wait for an empty stage: the first passes at once
  const auto load_beta = [&](const RingPlace& at) {
    if (at.me.lane < count) beta.raw = load_raw_beta(p, at.area, position.index, at.me.lane);
  };
  {
    const RingPlace at(thread);
    if (at.me.index() == 0)
      ptx::store_shared(at.area + GroupArea::kNextWork, static_cast<uint64_t>(FusedWorks<C::kWorks>::first(p)));
    ptx::named_barrier(1 + at.me.group, 128);
    position = open_work<C>({static_cast<int>(at.number), 0}, at.area, at.me.index(), at.me.group);
    if (position.items != 0) {
      count = item_count(at.area, position.index);
      load_ahead<C>(position.index, count, at, ahead);
      if (at.me.duty() == kHasBetas) load_beta(at);
    }
    keep_position(position, parity, at);
    ptx::named_barrier(1 + at.me.group, 128);
  }
  while (position.items != 0) {
    {
      RawRows raw;
      ItemTotals totals;
      {
        const RingPlace at(thread);
        totals = prepare_rows<C, 1>(raw, p, position.index, count, at, ahead, beta);
        ptx::named_barrier(1 + at.me.group, 128);  // also: the item before is solved
      }
      const RingPlace at(thread);
      prepare_operands<C, 1>(raw, totals, p, at, SharedSink{at.stage}, [&] { wait_for_stage(at, parity); });
    }
    const RingPlace at(thread);
    const uint64_t same = ptx::load_shared_u64(at.area + GroupArea::kPosition);
    ptx::named_barrier(1 + at.me.group, 128);  // everyone has read it, and written partial scores and operands
    if (at.me.duty() == kSends) {              // while the solve runs
      ptx::fence_async_proxy();
      if (at.me.lane == 0) send_stage<0, Stage::kSolve>(at);
    }
    position = {static_cast<int>(static_cast<uint32_t>(same)) + kStages,
                static_cast<int>(static_cast<uint32_t>(same >> 33))};
    parity = (static_cast<uint32_t>(same >> 32) & 1) ^ 1;
    if (position.index >= position.items) position = open_work<C>(position, at.area, at.me.index(), at.me.group);
    keep_position(position, parity, at);
    const ScoreParts scores = load_scores(at.group_scratch, at.area, at.me);
    // Behind the last item, for nothing, the first of the work that was open: a branch here would keep the loads of
    // scores back.
    count = item_count(at.area, position.index);
    load_ahead<C>(position.index, count, at, ahead);
    reduce_scores<C::kDiagonal>(p, scores, at.area, at.stage, at.me);
    ptx::named_barrier(1 + at.me.group, 128);
    // From here to the next group barrier each warp goes its own way.
    if (at.me.duty() <= kSolvesLast) {
      if (solve_block_columns(scores.column_betas, at.scratch, at.area, at.stage, at.me)) publish_stage(at);
    } else if (position.items != 0) {
      if (at.me.duty() == kHasBetas) load_beta(at);
      prefetch_rows<256>(at.area, position.index + kStages, at.me.duty() - kHasBetas, 0, at.me);
    }
  }
}

}  // namespace kda::cuda::prefill_fused

// The role of a producer warpgroup: every fourth item of its cluster, from raw rows to a full stage in both CTAs.
//
// Waits: empty[stage] (both CTAs' consumers have read the stage) before the first operand store; group barriers
// between the steps that exchange data among its four warps. Publishes: full[stage] here by an arrival, in the other
// CTA by a bulk copy of the stage.
#pragma once

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

// Opens the work that holds item `position.index`; items 0: there is none. All 128 threads of the group.
template <class C>
__device__ __noinline__ Position open_work(const Params& p, Position position, uint32_t shared, uint32_t area,
                                           int index_in_group, int group) {
  const uint16_t* order = sequence_order(p, shared);
  const int64_t works = work_count(p);
  do {
    position.index -= position.items;
    ptx::named_barrier(1 + group, 128);
    const uint64_t w = ptx::load_shared_u64(area + GroupArea::kNextWork);
    if (static_cast<int64_t>(w) >= works) return {0, 0};
    ptx::named_barrier(1 + group, 128);
    if (index_in_group == 0)
      ptx::store_shared(area + GroupArea::kNextWork, static_cast<uint64_t>(next_work(p, static_cast<int64_t>(w))));
    position.items =
        open_source<C::kGate, typename C::GateT>(p, static_cast<int64_t>(w), order, area, index_in_group);
  } while (position.index >= position.items);
  ptx::named_barrier(1 + group, 128);
  return position;
}

// What is loaded an item ahead: the first batch of gate rows, and the raw beta of token `lane` (warp 0).
template <class GateT>
struct Ahead {
  GateT gates[kGateBatch];
  float beta;
};

// Where a group works. Made anew for every step of an item: kept in registers, it would leave too few for the
// operands.
struct Place {
  ProducerLane me;
  uint32_t rank, number, shared, area, group_scratch, scratch, stage, full;
  __device__ Place() : me(ptx::thread_index_here()), rank(ptx::cluster_rank_here()), shared(shared_base()) {
    number = me.group * kClusterSize + rank;  // its stage
    area = shared + Shared::kGroup + me.group * Shared::kGroupBytes;
    group_scratch = shared + Shared::kScratch + me.group * 16384;
    scratch = group_scratch + me.warp * 4096;
    stage = shared + Shared::kStage + number * Stage::kStride;
    full = shared + Shared::kBarriers + number * 8;
  }
};

// First step of an item: prefix sums, norms, beta; a group barrier must follow.
template <class C>
__device__ __forceinline__ void prepare_rows(RawRows& raw, const Params& p, int index,
                                             Ahead<typename C::GateT>& ahead) {
  using GateT = typename C::GateT;
  const Place at;
  const ProducerLane& me = at.me;
  const int count = item_count(at.area, index);
  load_rows(raw, p, at.area, index, count, me);
  if (me.warp == 0)
    ptx::store_shared(at.area + GroupArea::kBeta + me.lane * 4, me.lane < count ? beta_value(p, ahead.beta) : 0.0f);
  write_prefix_sums<C::kGate, GateT>(p, at.area, index, me, at.scratch, ahead.gates);
  write_sums<C::kDiagonal == Diagonal::kAnchored ? 2 : 3>(raw, me, at.area);
  prefetch_rows<GateT>(p, at.area, index + kStages, me);
}

// Second step: waits for the stage; operands and partial scores; a group barrier must follow.
template <class C>
__device__ __forceinline__ void prepare_operands(const RawRows& raw, const Params& p, uint32_t parity) {
  const Place at;
  ptx::mbarrier_wait(at.full + kStages * 8, parity);
  const int channel = at.me.lane;
  const float total = load_prefix(at.scratch, 15, channel) + load_prefix(at.scratch, 31, channel);
  ptx::store_shared(at.stage + Stage::kDecay + (32 * at.me.warp + channel) * 4, exp2_exact(total));
  if constexpr (C::kDiagonal == Diagonal::kAnchored) build_anchored(raw, p, at.me, at.scratch, at.area, at.stage);
  else build_dyadic(raw, p, at.me, at.scratch, at.area, at.stage);
}

template <Diagonal kDiagonal>
__device__ __forceinline__ void solve_item(const Params& p, const ProducerLane& me, uint32_t group_scratch,
                                           uint32_t area, uint32_t stage) {
  const uint32_t barrier = 1 + me.group;
  reduce_scores<kDiagonal>(p, group_scratch, area, stage, me);
  ptx::named_barrier(barrier, 128);
  if (me.warp == 2 * me.group) invert_diagonal_blocks(group_scratch, area, me.lane);
  ptx::named_barrier(barrier, 128);
  multiply_lower_left(group_scratch, area, me.index());
  publish_diagonal_blocks(group_scratch, area, stage, me.index());
  ptx::named_barrier(barrier, 128);
  publish_lower_left(group_scratch, area, stage, me.warp, me.index());
}

template <class C>
__device__ __forceinline__ void load_ahead(const Params& p, const Position& position, const Place& at,
                                           Ahead<typename C::GateT>& ahead) {
  GateRows rows = gate_rows<typename C::GateT>(p, at.area, position.index, at.me);
  const int count = position.items == 0 ? 0 : item_count(at.area, position.index);
  load_gates<C::kGate>(ahead.gates, rows.at, rows.step, position.items == 0 ? 0 : rows.left);
  ahead.beta = 0.0f;
  if (at.me.warp == 0 && at.me.lane < count) ahead.beta = load_beta_logit(p, at.area, position.index, at.me.lane);
}

// The stage to the consumers here and, by a bulk copy, to those of the other CTA.
__device__ __forceinline__ void publish_stage(const Place& at) {
  ptx::fence_async_proxy();
  ptx::named_barrier(1 + at.me.group, 128);
  if (at.me.index() != 0) return;
  const uint32_t other_full = ptx::map_shared_rank(at.full, at.rank ^ 1);
  ptx::mbarrier_arrive(at.full);
  ptx::mbarrier_arrive_expect_cluster(other_full, Stage::kBytes);
  ptx::bulk_copy_to_cluster(ptx::map_shared_rank(at.stage, at.rank ^ 1), at.stage, Stage::kBytes, other_full);
}

__device__ __forceinline__ void keep_position(const Position& position, uint32_t parity, const Place& at) {
  if (at.me.index() != 0) return;
  ptx::store_shared(at.area + GroupArea::kPosition,
                    static_cast<uint64_t>(static_cast<uint32_t>(position.index)) |
                        static_cast<uint64_t>(static_cast<uint32_t>(position.items) << 1 | parity) << 32);
}

template <class C>
__device__ __forceinline__ void produce(const Params& p) {
  Ahead<typename C::GateT> ahead;
  {
    const Place at;
    if (at.me.index() == 0) ptx::store_shared(at.area + GroupArea::kNextWork, static_cast<uint64_t>(first_work(p)));
    const Position position =
        open_work<C>(p, {static_cast<int>(at.number), 0}, at.shared, at.area, at.me.index(), at.me.group);
    load_ahead<C>(p, position, at, ahead);
    keep_position(position, 1, at);  // parity 1: the first wait for an empty stage passes at once
    ptx::named_barrier(1 + at.me.group, 128);
  }
  while (true) {
    uint32_t items_parity;
    {
      const Place at;
      const uint64_t kept = ptx::load_shared_u64(at.area + GroupArea::kPosition);
      items_parity = static_cast<uint32_t>(kept >> 32);
      if (items_parity < 2) return;
      RawRows raw;
      prepare_rows<C>(raw, p, static_cast<int>(static_cast<uint32_t>(kept)), ahead);
      ptx::named_barrier(1 + at.me.group, 128);
      prepare_operands<C>(raw, p, items_parity & 1);
    }
    const Place next;
    {
      const uint64_t same = ptx::load_shared_u64(next.area + GroupArea::kPosition);
      Position position = {static_cast<int>(static_cast<uint32_t>(same)) + kStages,
                           static_cast<int>(static_cast<uint32_t>(same >> 33))};
      const uint32_t parity = static_cast<uint32_t>(same >> 32) & 1;
      ptx::named_barrier(1 + next.me.group, 128);  // everyone has read it, and written partial scores
      if (position.index >= position.items)
        position = open_work<C>(p, position, next.shared, next.area, next.me.index(), next.me.group);
      load_ahead<C>(p, position, next, ahead);
      keep_position(position, parity ^ 1, next);
    }
    const Place solve_at;
    solve_item<C::kDiagonal>(p, solve_at.me, solve_at.group_scratch, solve_at.area, solve_at.stage);
    publish_stage(Place());
  }
}

}  // namespace kda::cuda::prefill_fused

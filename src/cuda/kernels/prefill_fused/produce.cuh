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
  const int64_t works = p.sequences * p.value_heads;
  do {
    position.index -= position.items;
    ptx::named_barrier(1 + group, 128);
    const uint64_t w = ptx::load_shared_u64(area + GroupArea::kNextWork);
    if (static_cast<int64_t>(w) >= works) return {0, 0};
    ptx::named_barrier(1 + group, 128);
    if (index_in_group == 0)
      ptx::store_shared(area + GroupArea::kNextWork, w + static_cast<uint64_t>(gridDim.x / kClusterSize));
    position.items =
        open_source<C::kGate, typename C::GateT>(p, static_cast<int64_t>(w), order, area, index_in_group);
  } while (position.index >= position.items);
  ptx::named_barrier(1 + group, 128);
  return position;
}

// Finishes what an item needs up to its partial scores. `gates`: the first batch of its gate rows.
template <class C>
__device__ __forceinline__ void prepare_item(const Params& p, int index, const ProducerLane& me, uint32_t scratch,
                                             uint32_t area, uint32_t stage, uint32_t empty, uint32_t parity,
                                             typename C::GateT (&gates)[kGateBatch]) {
  using GateT = typename C::GateT;
  const int count = item_count(area, index);
  RawRows raw;
  load_rows(raw, p, area, index, count, me);
  float beta = 0.0f;
  const bool has_beta = me.warp == 0 && me.lane < count;
  if (has_beta) beta = load_beta_logit(p, area, index, me.lane);
  write_prefix_sums<C::kGate, GateT>(p, area, index, me, scratch, gates);
  write_sums<C::kDiagonal == Diagonal::kAnchored ? 2 : 3>(raw, me, area);
  if (me.warp == 0) ptx::store_shared(area + GroupArea::kBeta + me.lane * 4, has_beta ? beta_value(p, beta) : 0.0f);
  prefetch_rows<GateT>(p, area, index + kStages, me);
  ptx::named_barrier(1 + me.group, 128);
  ptx::mbarrier_wait(empty, parity);

  const int channel = me.lane;
  const float total = load_prefix(scratch, 15, channel) + load_prefix(scratch, 31, channel);
  ptx::store_shared(stage + Stage::kDecay + (32 * me.warp + channel) * 4, exp2_exact(total));

  if constexpr (C::kDiagonal == Diagonal::kAnchored) build_anchored(raw, p, me, scratch, area, stage);
  else build_dyadic(raw, p, me, scratch, area, stage);
}

template <Diagonal kDiagonal>
__device__ __forceinline__ void solve_item(const Params& p, const ProducerLane& me, uint32_t group_scratch,
                                           uint32_t area, uint32_t stage) {
  const uint32_t barrier = 1 + me.group;
  ptx::named_barrier(barrier, 128);
  reduce_scores<kDiagonal>(p, group_scratch, area, stage, me);
  ptx::named_barrier(barrier, 128);
  if (me.warp == 2 * me.group) invert_diagonal_blocks(group_scratch, area, me.lane);
  ptx::named_barrier(barrier, 128);
  multiply_lower_left(group_scratch, area, me.index());
  publish_diagonal_blocks(group_scratch, area, stage, me.index());
  ptx::named_barrier(barrier, 128);
  publish_lower_left(group_scratch, area, stage, me.warp, me.index());
}

// Where a group works. Made anew for every item: kept in registers, it would leave too few for the operands.
struct Place {
  ProducerLane me;
  uint32_t rank, number, shared, area, group_scratch, stage, full;
  __device__ explicit Place(uint32_t shared_base)
      : me(ptx::thread_index_here()), rank(ptx::cluster_rank_here()), shared(renew(shared_base)) {
    number = me.group * kClusterSize + rank;  // its stage
    area = shared + Shared::kGroup + me.group * Shared::kGroupBytes;
    group_scratch = shared + Shared::kScratch + me.group * 16384;
    stage = shared + Shared::kStage + number * Stage::kStride;
    full = shared + Shared::kBarriers + number * 8;
  }
};

template <class C>
__device__ __forceinline__ void load_first_gates(const Params& p, const Position& position, const Place& at,
                                                 typename C::GateT (&gates)[kGateBatch]) {
  const GateRows rows = gate_rows<typename C::GateT>(p, at.area, position.index, at.me);
  load_gates<C::kGate>(gates, rows.at, rows.step, position.items == 0 ? 0 : rows.left);
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

template <class C>
__device__ __forceinline__ void produce(const Params& p, uint32_t shared) {
  typename C::GateT gates[kGateBatch];
  Position position;
  {
    const Place at(shared);
    if (at.me.index() == 0)
      ptx::store_shared(at.area + GroupArea::kNextWork, static_cast<uint64_t>(blockIdx.x / kClusterSize));
    position = open_work<C>(p, {static_cast<int>(at.number), 0}, at.shared, at.area, at.me.index(), at.me.group);
    load_first_gates<C>(p, position, at, gates);
  }
  uint32_t parity = 1;  // the first wait for an empty stage passes at once
  while (position.items != 0) {
    {
      const Place at(shared);
      prepare_item<C>(p, position.index, at.me, at.group_scratch + at.me.warp * 4096, at.area, at.stage,
                      at.full + kStages * 8, parity, gates);
    }
    parity ^= 1;
    position.index += kStages;
    const Place at(shared);
    if (position.index >= position.items)
      position = open_work<C>(p, position, at.shared, at.area, at.me.index(), at.me.group);
    load_first_gates<C>(p, position, at, gates);
    const Place solve_at(shared);
    solve_item<C::kDiagonal>(p, solve_at.me, solve_at.group_scratch, solve_at.area, solve_at.stage);
    publish_stage(Place(shared));
  }
}

}  // namespace kda::cuda::prefill_fused

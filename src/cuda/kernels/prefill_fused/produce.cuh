// The role of a producer warpgroup: every fourth item of its cluster, from raw rows to a full stage in both CTAs.
//
// Waits: empty[stage] (both CTAs' consumers have read the stage) before the first operand store; group barriers
// between the steps that exchange data among its four warps. Publishes: full[stage] here by an arrival, in the other
// CTA by a bulk copy of the stage.
#pragma once

#include "cuda/kernels/prefill_fused/solve.cuh"
#include "cuda/ptx/mbarrier.h"

namespace kda::cuda::prefill_fused {

struct Schedule {
  int64_t first_work, works, step;  // of this cluster
  const uint16_t* order;
};

// The items of this cluster's works, one after another; a group takes every fourth.
struct Cursor {
  int64_t next_work = 0;
  int items = 0;  // of the open work
  int index = 0;  // item of the open work

  // Moves on to the work that holds `index`; false past the last work.
  template <class C>
  __device__ __forceinline__ bool settle(const Params& p, const Schedule& schedule, uint32_t area,
                                         const ProducerLane& me) {
    if (index < items) return true;
    do {
      index -= items;
      items = 0;
      if (next_work >= schedule.works) return false;
      ptx::named_barrier(1 + me.group, 128);
      items = open_source<C::kGate, typename C::GateT>(p, next_work, schedule.order, area, me.index());
      next_work += schedule.step;
    } while (index >= items);
    ptx::named_barrier(1 + me.group, 128);
    return true;
  }
};

template <Gate kGateFamily, class GateType, Diagonal kDiagonalForm>
struct Config {
  static constexpr Gate kGate = kGateFamily;
  static constexpr Diagonal kDiagonal = kDiagonalForm;
  using GateT = GateType;  // uint32_t: bf16 pairs; float2: fp32 pairs
};

template <class C>
__device__ __forceinline__ void prepare_item(const Params& p, int index, const ProducerLane& me, uint32_t scratch,
                                             uint32_t area, uint32_t stage, uint32_t empty, uint32_t parity) {
  using GateT = typename C::GateT;
  const int count = item_count(area, index);
  RawRows raw;
  load_rows(raw, p, area, index, count, me);
  float beta = 0.0f;
  const bool has_beta = me.warp == 0 && me.lane < count;
  if (has_beta) beta = load_beta_logit(p, area, index, me.lane);
  write_prefix_sums<C::kGate, GateT>(p, area, index, count, me, scratch);
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

template <class C>
__device__ __forceinline__ void produce(const Params& p, const Schedule& schedule, uint32_t shared, int group,
                                        uint32_t rank) {
  const ProducerLane me(threadIdx.x, group);
  const int number = group * kClusterSize + static_cast<int>(rank);  // this group's stage
  const uint32_t group_scratch = shared + Shared::kScratch + group * 16384;
  const uint32_t scratch = group_scratch + me.warp * 4096;
  const uint32_t area = shared + Shared::kGroup + group * Shared::kGroupBytes;
  const uint32_t stage = shared + Shared::kStage + number * Stage::kStride;
  const uint32_t full = shared + Shared::kBarriers + number * 8;
  const uint32_t empty = full + kStages * 8;
  const uint32_t other_stage = ptx::map_shared_rank(stage, rank ^ 1);
  const uint32_t other_full = ptx::map_shared_rank(full, rank ^ 1);

  Cursor cursor;
  cursor.next_work = schedule.first_work;
  cursor.index = number;
  uint32_t parity = 1;  // the first wait for an empty stage passes at once
  while (cursor.settle<C>(p, schedule, area, me)) {
    prepare_item<C>(p, cursor.index, renew(me), renew(scratch), renew(area), renew(stage), empty, parity);
    solve_item<C::kDiagonal>(p, renew(me), renew(group_scratch), renew(area), renew(stage));
    ptx::fence_async_proxy();
    ptx::named_barrier(1 + group, 128);
    if (me.index() == 0) {
      ptx::mbarrier_arrive(full);
      ptx::mbarrier_arrive_expect_cluster(other_full, Stage::kBytes);
      ptx::bulk_copy_to_cluster(other_stage, stage, Stage::kBytes, other_full);
    }
    parity ^= 1;
    cursor.index += kStages;
  }
}

}  // namespace kda::cuda::prefill_fused

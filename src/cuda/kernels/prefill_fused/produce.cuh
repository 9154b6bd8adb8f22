// The role of a producer warpgroup: every fourth item of its cluster, from raw rows to a full stage in both CTAs.
//
// Waits: empty[stage] (both CTAs' consumers have read the stage) before the first operand store; group barriers
// between the steps that exchange data among its four warps. Publishes: full[stage] here by an arrival, in the other
// CTA by a bulk copy of the stage.
#pragma once

#include "cuda/kernels/prefill_fused/solve.cuh"
#include "cuda/ptx/mbarrier.h"

namespace kda::cuda::prefill_fused {

// The items of this cluster's works, one after another; this group takes those with number % 4 == start.
struct Cursor {
  Work work;
  int64_t next_work = 0;
  int index = 0;  // item of the work
  bool valid = false;

  __device__ __forceinline__ void start(const Params& p, int64_t first_work, int64_t works, int64_t step,
                                        const uint16_t* order, int first_index) {
    next_work = first_work;
    index = first_index;
    work.items = 0;
    settle(p, works, step, order);
  }
  __device__ __forceinline__ void settle(const Params& p, int64_t works, int64_t step, const uint16_t* order) {
    valid = true;
    while (index >= work.items) {
      index -= work.items;
      if (next_work >= works) {
        valid = false;
        return;
      }
      work = load_work(p, next_work, order);
      next_work += step;
    }
  }
};

struct Schedule {
  int64_t first_work, works, step;  // of this cluster
  const uint16_t* order;
};

template <Gate kGateFamily, class GateType>
struct Config {
  static constexpr Gate kGate = kGateFamily;
  using GateT = GateType;  // uint32_t: bf16 pairs; float2: fp32 pairs
};

template <class C>
__device__ __forceinline__ void prepare_item(const Params& p, const RawRows<typename C::GateT>& raw, const Item& item,
                                             const ProducerLane& me, uint32_t scratch, uint32_t area, uint32_t stage,
                                             uint32_t empty, uint32_t parity) {
  write_prefix_sums<C::kGate>(raw, p, item, me, scratch);
  write_sums(raw, me, area);
  if (me.warp == 0)
    ptx::store_shared(area + GroupArea::kBeta + me.lane * 4, me.lane < item.count ? beta_value(p, raw.beta) : 0.0f);
  ptx::named_barrier(1 + me.group, 128);
  ptx::mbarrier_wait(empty, parity);

  const int channel = me.lane;
  const float total = load_prefix(scratch, 15, channel) + load_prefix(scratch, 31, channel);
  ptx::store_shared(stage + Stage::kDecay + (32 * me.warp + channel) * 4, exp2_exact(total));

  auto norms_of = [&](int block) {
    Norms n;
    n.qa = norm_factor(p, load_sum(area, kSumQ, 16 * block + me.token_a));
    n.qb = norm_factor(p, load_sum(area, kSumQ, 16 * block + me.token_b));
    n.ka = norm_factor(p, load_sum(area, kSumK, 16 * block + me.token_a));
    n.kb = norm_factor(p, load_sum(area, kSumK, 16 * block + me.token_b));
    return n;
  };
  const PrefixView view(scratch, me);
  const uint32_t at_a = stage + operand_offset(me.token_a, me), at_b = stage + operand_offset(me.token_b, me);
  Edges columns, unused, k_rows, q_rows;
  Norms norms = norms_of(0);
  {
    Quad top, lower;
    diagonal_scores<0>(top, lower, raw.q[0], raw.k[0], norms, view, me);
    block_operands<0>(columns, unused, raw.q[0], raw.k[0], norms, view, at_a, at_b);
    __syncwarp();  // prefix rows 0..7 are read no more
    write_quad(top, 0, scratch, me.lane);
    write_quad(lower, 1, scratch, me.lane);
  }
  norms = norms_of(1);
  Quad top, lower, cross[4];
  diagonal_scores<1>(top, lower, raw.q[1], raw.k[1], norms, view, me);
  block_operands<1>(k_rows, q_rows, raw.q[1], raw.k[1], norms, view, at_a, at_b);
  cross_scores(cross, columns, k_rows, q_rows);
  __syncwarp();
  write_quad(top, 2, scratch, me.lane);
  write_quad(lower, 3, scratch, me.lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) write_quad(cross[i], 4 + i, scratch, me.lane);
}

__device__ __forceinline__ void solve_item(const Params& p, const ProducerLane& me, uint32_t group_scratch,
                                           uint32_t area, uint32_t stage) {
  const uint32_t barrier = 1 + me.group;
  ptx::named_barrier(barrier, 128);
  reduce_scores(p, group_scratch, area, stage, me);
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
  cursor.start(p, schedule.first_work, schedule.works, schedule.step, schedule.order, number);
  RawRows<typename C::GateT> raw;
  if (cursor.valid) load_rows<C::kGate>(raw, p, cursor.work, item_of(cursor.work, cursor.index), me);
  uint32_t parity = 1;  // the first wait of an empty stage passes at once
  while (cursor.valid) {
    prepare_item<C>(p, raw, item_of(cursor.work, cursor.index), me, scratch, area, stage, empty, parity);
    parity ^= 1;
    cursor.index += kStages;
    cursor.settle(p, schedule.works, schedule.step, schedule.order);
    if (cursor.valid) load_rows<C::kGate>(raw, p, cursor.work, item_of(cursor.work, cursor.index), me);

    solve_item(p, me, group_scratch, area, stage);
    ptx::fence_async_proxy();
    ptx::named_barrier(1 + group, 128);
    if (me.index() == 0) {
      ptx::mbarrier_arrive(full);
      ptx::mbarrier_arrive_expect_cluster(other_full, Stage::kBytes);
      ptx::bulk_copy_to_cluster(other_stage, stage, Stage::kBytes, other_full);
    }
  }
}

}  // namespace kda::cuda::prefill_fused

// The role of the fused kernel's consumer warpgroup: the state of 64 value rows from the pool through all items to
// the pool (chain_item.cuh).
//
// Waits: full[stage] before an item's operands are read. Publishes: empty[stage], one arrival of each warp at the CTA
// whose producers fill that stage. Values come and outputs go through this warp's own tiles, without barriers.
#pragma once

#include "cuda/kernels/prefill_fused/chain_item.cuh"
#include "cuda/kernels/prefill_fused/produce.cuh"
#include "cuda/ptx/signal.h"

namespace kda::cuda::prefill_fused {

// The stages: empty[stage] counts the warps of both CTAs, in the CTA that fills the stage.
template <Works kWorks>
struct SharedRing : FusedWorks<kWorks> {
  using Plan = Shared;
  static constexpr uint32_t kCount = kStages, kCtas = kClusterSize;
  static constexpr bool kCheckpoints = kWorks == Works::kAny;
  static constexpr bool kHandsOver = kWorks == Works::kShares;  // parts of works, see balance.cuh
  __device__ static void release(uint32_t empty, uint32_t slot, int lane) {
    if (lane == 0) ptx::mbarrier_arrive_cluster(ptx::map_shared_rank(empty, slot % kClusterSize));
  }
  // A warp's rows of the state between the parts of a work: the same warp stores and loads them.
  __device__ static void wait_for_state(int row) {
    const uint32_t* flag = cluster_share().taken_flags + row / 16;
    while (ptx::load_acquire(flag) == 0) continue;
  }
  __device__ static void leave_state(const float (&state)[64], const RowScales& rows, int row,
                                     const ConsumerLane& me) {
    float* to = ptx::in_global(cluster_share().left + lane_in_matrix(row, me));
#pragma unroll
    for (int r = 0; r < 2; ++r) store_rows(state, rows, to, r);
    __syncwarp();  // every lane's stores before the one release
    if (me.lane == 0) ptx::store_release(cluster_share().left_flags + row / 16, 1u);
  }
};

// A warp that moves its rows itself: values three items ahead, outputs an item late.
struct OwnTraffic {
  static constexpr bool kOutputs = true;      // in runs for a state only they are made too, and not stored
  static constexpr bool kAhead = false;       // registers are short
  static constexpr bool kPairs = false;       // the loop would not fit the instruction cache
  static constexpr bool kTakesMaps = false;
  uint32_t tiles;
  RowCursor cursor = {};
  StagedOutput last;
  int staged = 0;  // outputs of the item before that wait in its tile
  __device__ OwnTraffic(uint32_t shared, const ConsumerLane& me) : tiles(shared + Shared::kValues + me.warp * 4096) {}
  __device__ uint32_t tile(int index) const { return tiles + (index & 3) * 1024; }
  __device__ int rows(int index) const { return item_rows(index, cursor.items, cursor.tail); }
  __device__ void fetch(int index, const ConsumerLane& me) {
    const int count = rows(index);
    if (count > 0) {
      copy_values(cursor.values, cursor.value_step, cursor.values == nullptr ? 0 : count, tile(index), me.lane);
      cursor.values += step_bytes(kChunk, cursor.value_step);
    }
    ptx::copy_async_commit();
  }
  __device__ void store(const Params& p, const Work& work, int index, int row, const ConsumerLane& me) {
    store_output(last, p, work, cursor.out[0], cursor.out[0] + step_bytes(16, cursor.out_step), index, staged,
                 tile(index), row, me.lane);
    cursor.out[0] += step_bytes(kChunk, cursor.out_step);  // a second pointer would be one register too many
  }
  __device__ void open(const Params& p, const Work& work, int row, const ConsumerLane& me) {
    cursor = row_cursor(p, work, row, me.lane);
    staged = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 3; ++i) fetch(i, me);
  }
  __device__ void begin(int index, const ConsumerLane& me) { last = load_output(tile(index + 3), me.lane); }
  __device__ void between(const Params& p, const Work& work, int index, int row, const ConsumerLane& me) {
    if (index > 0) store(p, work, index - 1, row, me);
    __syncwarp();
    fetch(index + 3, me);
  }
  __device__ void publish(int, int count, const ConsumerLane&) { staged = min(count, cursor.most); }
  __device__ bool test(int) const { return false; }
  __device__ bool next(ChainItem& item, int index, bool, const ConsumerLane& me) {
    ptx::copy_async_wait<2>();
    __syncwarp();
    load_values(item, tile(index + 1), me);
    return true;
  }
  __device__ void close(const Params& p, const Work& work, int row, const ConsumerLane& me) {
    if (cursor.items > 0) {
      last = load_output(tile(cursor.items - 1), me.lane);
      store(p, work, cursor.items - 1, row, me);
    }
    ptx::copy_async_wait<0>();
  }
};

}  // namespace kda::cuda::prefill_fused

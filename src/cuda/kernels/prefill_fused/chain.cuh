// The staged form's second kernel: serial chains whose operands lie in memory (stages.cuh).
//
// kGroups consumer warpgroups of 64 value rows each. One: clusters of two CTAs share a work, where works are few and
// each step's latency counts; both CTAs load half of every stage for both by multicast. Two: a CTA has the whole
// work. The last warpgroup is the helpers': warps 0-2 move values and outputs for the consumers, warp 3 loads stages.
// Waits: consumers on full[stage] and on values[tile]; the loader on empty[stage] (the consumer warps of all CTAs of
// the work, in each CTA); the movers on outputs[tile]. Nobody waits for another work of its grid; segments wait
// for the opening and the summaries. The grid may start before the
// one before it ends (programmatic dependent launch): tables and initial states are then read meanwhile.
#pragma once

#include "cuda/kernels/prefill_fused/chain_item.cuh"
#include "cuda/kernels/prefill_fused/stages.cuh"

namespace kda::cuda::prefill_fused {

constexpr int kMovers = 3;

template <int kGroups>
constexpr int kChainThreads = kGroups* kConsumerThreads + 128;
template <int kGroups>
constexpr int kChainCtas = kGroups == 1 ? 2 : 1;  // of a work
// Registers of a thread: launched with 168 (the bounds are two groups' for both), redistributed by role. One group
// could be launched with what it needs, but ptxas takes control to be uniform only behind a setmaxnreg: without one
// every lane computes addresses, and shuffles make them uniform again.
template <int kGroups>
constexpr int kChainRegisters = kGroups == 1 ? 248 : 208;
constexpr int kHelperRegisters = 88;
static_assert(128 * (kChainRegisters<1> + kHelperRegisters) <= kChainThreads<1> * 168);
static_assert(256 * kChainRegisters<2> + 128 * kHelperRegisters <= kChainThreads<2> * 168);

// Filled by the loaders of all CTAs of the work, so that each waits for all their consumers.
template <int kGroups>
struct LoadedRing {
  using Plan = ChainShared<kGroups>;
  static constexpr uint32_t kCount = Plan::kStages, kCtas = kChainCtas<kGroups>;
  static constexpr bool kCheckpoints = false;  // the fused form serves them
  static constexpr bool kHandsOver = false;
  __device__ static int64_t count(const Params& p) { return work_count(p); }
  __device__ static int64_t first(const Params& p) { return first_work(p, kCtas); }
  __device__ static int64_t next(const Params& p, int64_t w) { return next_work(p, w, kCtas); }
  __device__ static Work load(const Params& p, int64_t w) { return load_work(p, w); }
  __device__ static StateSource source(const Params& p, const Work& work) { return work_source(p, work); }
  __device__ static StateTarget target(const Params& p, const Work& work) { return work_target(p, work); }
  __device__ static void release(uint32_t empty, uint32_t, int lane) {
    if (lane < static_cast<int>(kCtas)) ptx::mbarrier_arrive_cluster(ptx::map_shared_rank(empty, lane));
  }
};

// The tiles of a consumer warp in the hands of a mover: tile `number` % 4 of the warp's items since the start.
template <int kGroups>
struct TileRing {
  using Plan = ChainShared<kGroups>;
  uint32_t tiles, barriers, counts;
  __device__ TileRing(uint32_t shared, int warp)
      : tiles(shared + Plan::kValues + warp * 4096),
        barriers(shared + Plan::kTileBarriers + warp * 64),
        counts(shared + Plan::kCounts + warp * 16) {}
  __device__ uint32_t tile(uint32_t number) const { return tiles + (number & 3) * 1024; }
  __device__ uint32_t values(uint32_t number) const { return barriers + (number & 3) * 8; }
  __device__ uint32_t outputs(uint32_t number) const { return barriers + 32 + (number & 3) * 8; }
  __device__ uint32_t count(uint32_t number) const { return counts + (number & 3) * 4; }
  __device__ static uint32_t parity(uint32_t number) { return (number >> 2) & 1; }
};

// The consumer's side.
template <int kGroups, bool kMakesOutputs>
struct ServedTraffic {
  static constexpr bool kOutputs = kMakesOutputs;
  static constexpr bool kAhead = true;
  static constexpr bool kPairs = kGroups == 1;  // with two groups it gains nothing
  static constexpr bool kTakesMaps = kMakesOutputs && kGroups == 1;  // with two registers are short
  TileRing<kGroups> ring;
  uint32_t first = 0;  // number of the work's first item
  int items = 0, tail = 0;
  __device__ ServedTraffic(uint32_t shared, const ConsumerLane& me) : ring(shared, me.warp) {}
  __device__ uint32_t tile(int index) const { return ring.tile(first + index); }
  __device__ int rows(int index) const { return item_rows(index, items, tail); }
  __device__ void open(const Params&, const Work& work, int, const ConsumerLane&) {
    first += items;
    items = work.items, tail = last_item_rows(work);
  }
  __device__ void begin(int, const ConsumerLane&) {}
  __device__ void between(const Params&, const Work&, int, int, const ConsumerLane&) {}
  __device__ void publish(int index, int count, const ConsumerLane& me) {
    const uint32_t number = first + index;
    if (me.lane == 0) ptx::store_shared(ring.count(number), static_cast<uint32_t>(count));
    __syncwarp();  // every lane's part of the tile before the one arrival
    if (me.lane == 0) ptx::mbarrier_arrive(ring.outputs(number));
  }
  __device__ bool test(int index) const {
    const uint32_t number = first + index + 1;
    return ptx::mbarrier_test(ring.values(number), ring.parity(number));
  }
  __device__ bool next(ChainItem& item, int index, bool are_there, const ConsumerLane& me) {
    if (index + 1 >= items) return false;
    const uint32_t number = first + index + 1;
    if (!are_there) ptx::mbarrier_wait(ring.values(number), ring.parity(number));
    load_values(item, ring.tile(number), me);
    return true;
  }
  __device__ void close(const Params&, const Work&, int, const ConsumerLane&) {}
};

// A mover warp: values four items ahead, and outputs as they come. The consumer warps' tiles, item after item, go to
// the movers in turn, so that none has more than the others: a chain is not faster than its slowest mover.
// `first_row`: of the CTA.
template <int kGroups>
__device__ __forceinline__ void move_rows(const Params& p, uint32_t shared, int first_row, int mover, int lane) {
  constexpr int kWarps = 4 * kGroups;
  constexpr uint32_t kTurn = kMovers - kWarps % kMovers;
  uint32_t first = 0;  // number of the work's first item
  for (int64_t w = first_work(p, kChainCtas<kGroups>); w < work_count(p); w = next_work(p, w, kChainCtas<kGroups>)) {
    const Work work = load_work(p, w);
    if (work.sequence < 0 || !work.is_active) continue;
    RowCursor cursor = row_cursor(p, work, first_row, lane);
    // Items -4 .. -1 stand for the tiles being free at first.
    for (int index = -4; index < cursor.items; ++index) {
      const int ahead = index + 4;
      const int valid = cursor.values == nullptr ? 0 : item_rows(ahead, cursor.items, cursor.tail);
      // By the item's number since the start: who stores a tile's outputs is who fills it anew, in the next work too.
      const uint32_t number = first + index;
#pragma unroll 1
      for (int warp = (mover + number % kMovers * kTurn) % kMovers; warp < kWarps; warp += kMovers) {
        const TileRing<kGroups> ring(shared, warp);
        if (index >= 0) {
          ptx::mbarrier_wait(ring.outputs(number), ring.parity(number));
          const int count = min(static_cast<int>(ptx::load_shared_u32(ring.count(number))), cursor.most);
          if (count > 0)
            store_output(load_output(ring.tile(number), lane), p, work, cursor.out[0] + 32 * warp,
                         cursor.out[1] + 32 * warp, index, count, ring.tile(number), first_row + 16 * warp, lane);
          __syncwarp();
        }
        if (ahead < cursor.items) {
          copy_values(cursor.values + 32 * warp, cursor.value_step, valid, ring.tile(number + 4), lane);
          ptx::copy_async_arrive(ring.values(number + 4));
        }
      }
      if (index >= 0) {
        cursor.out[0] += step_bytes(kChunk, cursor.out_step);
        cursor.out[1] += step_bytes(kChunk, cursor.out_step);
      }
      cursor.values += step_bytes(kChunk, cursor.value_step);
    }
    first += cursor.items;
  }
}

// Items from `index` on whose stages are there: at least one, waited for, at most 32. A warp.
__device__ __forceinline__ int wait_for_stages(const Params& p, const Work& work, int index, int lane) {
  const bool is_item = index + lane < work.items;
  const int64_t slot = (static_cast<int64_t>(work.first) + index + (is_item ? lane : 0)) * p.value_heads + work.head;
  const uint32_t* flag = stage_flag(p, slot);
  uint32_t ready;
  do {
    ready = __ballot_sync(0xffffffffu, is_item && ptx::load_acquire(flag) != 0);
  } while ((ready & 1) == 0);
  ptx::fence_async_proxy_global();
  return ready == 0xffffffffu ? 32 : __ffs(static_cast<int>(~ready)) - 1;
}

// A block of a map in place of a stage.
template <uint32_t kCtas>
__device__ __forceinline__ void load_map_block(uint32_t target, const char* source, uint32_t full, uint32_t rank) {
  constexpr uint32_t kBytes = kMapBlockBytes / kCtas;
  ptx::bulk_load_multicast(target + rank * kBytes, source + rank * kBytes, kBytes, full, (1u << kCtas) - 1);
}

// This CTA's share of a stage, for all CTAs of the work. Runs for a state only leave Q~ and M behind.
template <uint32_t kCtas, bool kOutputs>
__device__ __forceinline__ void load_stage(uint32_t target, const char* source, uint32_t full, uint32_t rank) {
  const auto load = [&](uint32_t from, uint32_t to) {
    ptx::bulk_load_multicast(target + from, source + from, to - from, full, (1u << kCtas) - 1);
  };
  constexpr uint32_t kLeanHalf = Stage::kUpdateHigh + 6144;
  if constexpr (kOutputs) {
    load(rank == 0 ? 0 : Staged::kHalf, kCtas == 1 || rank != 0 ? Stage::kBytes : Staged::kHalf);
    return;
  }
  if (rank == 0) {
    load(Stage::kKeys, Stage::kQueries);
    load(Stage::kUpdateHigh, kCtas == 1 ? Stage::kScores : kLeanHalf);
  }
  if (kCtas == 1 || rank != 0) {
    if (kCtas != 1) load(kLeanHalf, Stage::kScores);
    load(Stage::kDecay, Stage::kBytes);
  }
}

// One warp: brings the stages of the CTA's works, in order.
template <int kGroups, bool kOutputs>
__device__ __forceinline__ void load_stages(const Params& p, uint32_t shared, uint32_t rank, int lane) {
  using Plan = ChainShared<kGroups>;
  constexpr uint32_t kCtas = kChainCtas<kGroups>;
  const uint32_t barriers = shared + Plan::kBarriers;
  constexpr uint32_t kBytes =
      kOutputs ? Stage::kBytes
               : Stage::kBytes - (Stage::kUpdateHigh - Stage::kQueries) - (Stage::kDecay - Stage::kScores);
  const int64_t works = work_count(p), step = static_cast<int64_t>(p.value_heads) * Staged::kStride;
  const bool is_beside = p.wave > 0;  // the preparation runs: every stage is waited for
  if (!is_beside || p.pass == Pass::kSegments) ptx::wait_for_prerequisites();
  if (p.pass == Pass::kSegments) ptx::fence_async_proxy_global();  // maps were stored by ordinary stores
  uint32_t slot = 0, parity = 1;  // the first wait for an empty stage passes at once
  // load(target, full) brings `bytes` to the next stage of the ring.
  const auto fill = [&](uint32_t bytes, const auto& load) {
    const uint32_t full = barriers + slot * 8;
    if (lane == 0) {
      ptx::mbarrier_wait(full + Plan::kStages * 8, parity);
      ptx::mbarrier_arrive_expect_cluster(ptx::map_shared_rank(full, rank), bytes);
      load(shared + Plan::kStage + slot * Stage::kStride, full);
    }
    __syncwarp();
    slot = slot + 1 == Plan::kStages ? 0 : slot + 1;
    parity ^= slot == 0 ? 1 : 0;
  };
  for (int64_t w = first_work(p, kCtas); w < works; w = next_work(p, w, kCtas)) {
    const Work work = load_work(p, w);
    if (work.sequence < 0 || work.items == 0) continue;
    if (lane == 0) prefetch_state(p, work, rank * kRowsPerCta, kGroups * kRowsPerCta);
    const int blocks = p.pass == Pass::kSegments ? kMapBlocks * maps_before(p, work.segment) : 0;
    for (int i = 0; i < blocks; ++i) {
      const int segment = segment_of_map(p, work.segment, i / kMapBlocks);
      const char* map = reinterpret_cast<const char*>(segment_map(p, work.sequence, work.head, segment));
      fill(kMapBlockBytes, [&](uint32_t target, uint32_t full) {
        load_map_block<kCtas>(target, map + i % kMapBlocks * kMapBlockBytes, full, rank);
      });
    }
    const char* source = stage_in_memory(p, static_cast<int64_t>(work.first) * p.value_heads + work.head);
    int ready = is_beside ? 0 : work.items;
    for (int index = 0; index < work.items; ++index) {
      if (ready == 0) ready = wait_for_stages(p, work, index, lane);
      --ready;
      fill(kBytes, [&](uint32_t target, uint32_t full) { load_stage<kCtas, kOutputs>(target, source, full, rank); });
      source += step;
    }
  }
}

template <int kGroups, bool kOutputs>
__global__ void __cluster_dims__(kChainCtas<kGroups>, 1, 1) __launch_bounds__(kChainThreads<2>, 1)
    chain_kernel(const __grid_constant__ Params p) {
  using Plan = ChainShared<kGroups>;
  const uint32_t shared = ptx::shared_address(s_memory);
  const uint32_t rank = kChainCtas<kGroups> == 1 ? 0 : ptx::cluster_rank();
  ptx::launch_dependents();
  list_sequences(p, kChainThreads<kGroups>);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < Plan::kStages; ++i) {
      ptx::mbarrier_init(shared + Plan::kBarriers + i * 8, 1);
      ptx::mbarrier_init(shared + Plan::kBarriers + (Plan::kStages + i) * 8, 4 * kGroups * kChainCtas<kGroups>);
    }
    for (int i = 0; i < 16 * kGroups; ++i) {
      const uint32_t tile = shared + Plan::kTileBarriers + i / 4 * 64 + i % 4 * 8;
      ptx::mbarrier_init(tile, 32);
      ptx::mbarrier_init(tile + 32, 1);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  // Stages and maps are the loader's alone to wait for; states that chains made also the consumers' (consume).
  if (threadIdx.x < kGroups * kConsumerThreads) {
    ptx::set_max_registers_up<kChainRegisters<kGroups>>();
    consume<LoadedRing<kGroups>, ServedTraffic<kGroups, kOutputs>>(p, shared, rank);
  } else {
    ptx::set_max_registers_down<kHelperRegisters>();
    const int helper = static_cast<int>(threadIdx.x >> 5) - 4 * kGroups, lane = static_cast<int>(threadIdx.x & 31);
    if (helper < kMovers) {
      move_rows<kGroups>(p, shared, static_cast<int>(rank) * kRowsPerCta, helper, lane);
    } else {
      load_stages<kGroups, kOutputs>(p, shared, rank, lane);
      // This grid ends after the one before it; an opening may end before the preparation, of which nothing is left
      // once the last segments have their stages.
      if (p.pass != Pass::kOpening) ptx::wait_for_prerequisites();
    }
  }
  // A CTA's shared memory must outlive its partner's copies and arrivals.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

}  // namespace kda::cuda::prefill_fused

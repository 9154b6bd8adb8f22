// Works of the fused form shared out by time instead of by number: McNaughton's wrap-around rule.
//
// All works lie on a line, sequences in their order, each as long as its items and what a change of works takes.
// T = the larger of an even share of the line and the longest work. Cluster j owns [j T, (j + 1) T), cuts rounded to
// 64 tokens, where N-7 chooses new scales: bits do not tell (H-10). Of the work that reaches beyond its share a
// cluster runs the first items, before all else, and leaves the state in Params::balance_space; the next cluster runs
// the rest, after all else. No work being longer than T, that state has normally been there for long.
//
// Who waits on whom: consumer warps of a rest for the same warps of the next lower cluster, which need nobody for
// what is waited for, their first part. Blocks start in the order of their numbers, so the lower cluster runs or has
// run, however few SMs are free (F28). Producers do not wait.
#pragma once

#include "cuda/kernels/prefill_fused/work.cuh"

namespace kda::cuda::prefill_fused {

constexpr uint32_t kLeftFlags = 8;  // words of a cluster: one of each consumer warp

// On the line: the items of `work` before `items` are the lower cluster's, from there on the higher one's.
struct ShareEnd {
  uint32_t work, items;
};
constexpr uint32_t kNoWork = 0xffffffff;
constexpr uint32_t kShortestPart = 4;  // items: shorter ones would not pay the change of works

// A cluster's share, in shared memory: registers are short.
struct Share {
  ShareEnd cuts[2];  // where it begins and where it ends
  // The states that it takes over and that it leaves, and the words that say that a consumer warp's rows are there.
  float *taken, *left;                 // [128, 128]
  uint32_t *taken_flags, *left_flags;  // [kLeftFlags]
};
static_assert(sizeof(Share) <= kShareBytes);
__device__ __forceinline__ Share& cluster_share() { return *reinterpret_cast<Share*>(s_memory + Shared::kShare); }

// Of a sequence: its items, and how long each of its works is on the line, in halves of an item. A change of works
// takes four to five microseconds, 2.5 items.
struct OnLine {
  uint32_t items, length;
};
__device__ __forceinline__ OnLine on_line(uint32_t rank, uint32_t active) {
  if (rank >= active) return {0, 0};
  const SequenceEntry& entry = sequence_table()[sequence_order()[rank]];
  const uint32_t items = (entry.flags & 1) != 0 ? item_total(entry.length) : 0;
  return {items, 2 * items + (items > 1 ? 5 : 3)};
}

// `at`: on the line, from the start of the works of this sequence, of which `first` is the number of the first.
__device__ __forceinline__ ShareEnd cut_near(uint32_t at, const OnLine& sequence, uint32_t first) {
  const uint32_t head = at / sequence.length, behind = at - head * sequence.length;
  const uint32_t cut = behind > 5 ? (behind - 5 + 2) / 4 * 2 : 0;  // the change of works comes first
  if (cut < kShortestPart) return {first + head, 0};
  return cut + kShortestPart > sequence.items ? ShareEnd{first + head + 1, 0} : ShareEnd{first + head, cut};
}

// One warp, behind a barrier after list_sequences; another must follow. Not inlined: registers.
__device__ __noinline__ inline void cut_share(int lane) {
  const Params& p = shared_params();
  Share& own = cluster_share();
  const auto heads = static_cast<uint32_t>(p.value_heads), active = static_cast<uint32_t>(active_sequences(p));
  const uint32_t clusters = gridDim.x / kClusterSize, cluster = blockIdx.x / kClusterSize;
  uint32_t total = 0, longest = 0;
#pragma unroll 1
  for (uint32_t rank = lane; rank - lane < active; rank += 32) {
    const uint32_t length = on_line(rank, active).length;
    total += __reduce_add_sync(0xffffffffu, length);
    longest = max(longest, __reduce_max_sync(0xffffffffu, length));
  }
  const uint32_t share = max((heads * total + clusters - 1) / clusters, longest);
  if (lane < 2) own.cuts[lane] = {active * heads, 0};
  if (lane == 0) {
    own.left = p.balance_space + cluster * kMatrix;
    own.left_flags = reinterpret_cast<uint32_t*>(p.balance_space + clusters * kMatrix) + cluster * kLeftFlags;
    own.taken = own.left - kMatrix, own.taken_flags = own.left_flags - kLeftFlags;
  }
  __syncwarp();
  uint32_t before = 0;  // the works of the sequences in turns before
#pragma unroll 1
  for (uint32_t rank = lane; rank - lane < active; rank += 32) {
    const OnLine mine = on_line(rank, active);
    uint32_t end = heads * mine.length;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, end, step);
      if (lane >= step) end += other;
    }
    const uint32_t at = cluster * share - before - (end - heads * mine.length);
    if (at < heads * mine.length) own.cuts[0] = cut_near(at, mine, rank * heads);
    if (at + share < heads * mine.length) own.cuts[1] = cut_near(at + share, mine, rank * heads);
    before += __shfl_sync(0xffffffffu, end, 31);
  }
}

// A cluster's works in its order: the one that it leaves to the next cluster, those between its cuts, and the one
// that it takes over.
__device__ __forceinline__ uint32_t next_of_share(uint32_t w) {
  const ShareEnd begin = cluster_share().cuts[0], end = cluster_share().cuts[1];
  if (w == begin.work) return kNoWork;
  const uint32_t next = (w == end.work ? begin.work : w) + 1;
  return next == end.work ? begin.work : next;
}
__device__ __forceinline__ uint32_t first_of_share() {
  const ShareEnd begin = cluster_share().cuts[0], end = cluster_share().cuts[1];
  if (end.items > 0) return end.work;
  return begin.work == end.work ? kNoWork : next_of_share(end.work);
}

// What a fused kernel runs. Three kernels, since what runs once a work is cold, and slower with every line more. (But
// load_any_work stays in all of them: without it ptxas spills registers in the item loop.)
template <Works kWorks>
struct FusedWorks {
  static constexpr bool kShares = kWorks == Works::kShares, kAny = kWorks == Works::kAny;
  __device__ static int64_t count(const Params& p) {
    return kAny ? work_count(p) : p.sequences * p.value_heads;
  }
  __device__ static int64_t first(const Params& p) {
    if constexpr (kShares) return first_of_share();
    return kAny ? first_work(p, kClusterSize) : blockIdx.x / kClusterSize;
  }
  __device__ static int64_t next(const Params& p, int64_t w) {
    if constexpr (kShares) return next_of_share(static_cast<uint32_t>(w));
    return kAny ? next_work(p, w, kClusterSize) : w + gridDim.x / kClusterSize;
  }
  __device__ static Work load(const Params& p, int64_t w) {
    Work work = load_work(p, w);
    if constexpr (kShares) {
      const ShareEnd begin = cluster_share().cuts[0], end = cluster_share().cuts[1];
      if (w == end.work) {
        work.part = Part::kFirst;
        work.items = static_cast<int32_t>(end.items);
        work.span.length = int64_t{end.items} * kChunk;
      } else if (w == begin.work && begin.items > 0) {
        work.part = Part::kRest;
        work.items -= static_cast<int32_t>(begin.items);
        work.span.begin += int64_t{begin.items} * kChunk;
        work.span.length -= int64_t{begin.items} * kChunk;
      }
    }
    return work;
  }
  __device__ static StateSource source(const Params& p, const Work& work) {
    if (kShares && work.part == Part::kRest) return {cluster_share().taken, Real::kF32, 0};
    return kAny ? work_source(p, work) : pool_source(p, work.slots, work.head);
  }
  __device__ static StateTarget target(const Params& p, const Work& work) {
    if (kShares && work.part == Part::kFirst) return {};
    return kAny ? work_target(p, work) : final_target(p, work.slots, work.head);
  }
};

}  // namespace kda::cuda::prefill_fused

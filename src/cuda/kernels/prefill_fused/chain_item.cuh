// One item of the serial chain, as a consumer warpgroup runs it: the products of recurrence.cuh in the order of the
// chain, and in the time that they take, what does not lie on it.
#pragma once

#include "cuda/kernels/prefill_fused/segments.cuh"
#include "cuda/ptx/grid.h"

namespace kda::cuda::prefill_fused {

// What an item needs besides the state: made while the products of the item before run.
struct ChainItem {
  uint32_t values[8];
  int exponent;    // value_exponent
  float peaks[2];  // of the state, this lane's columns
};

__device__ __forceinline__ void load_values(ChainItem& item, uint32_t tile, const ConsumerLane& me) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    uint32_t quad[4];
    ptx::load_matrix_x4_trans(quad, fragment_address(tile, j, me));
#pragma unroll
    for (int i = 0; i < 4; ++i) item.values[4 * j + i] = quad[i];
  }
}

// R = V - S K~^T, scaled, as the A operand of the solve. Finite, so that tokens from the limit on, which are left out
// of U, cannot reach back through the zeros of T' (H-9).
__device__ __forceinline__ void pack_rhs(uint32_t (&rhs)[8], const uint32_t (&values)[8], const float (&product)[16],
                                         const RowScales& rows) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float scale = rows.scale[i & 1];
    rhs[i] = ptx::pack_f16_finite(fmaf(ptx::bf16_low(values[i]), scale, -product[2 * i]),
                                  fmaf(ptx::bf16_high(values[i]), scale, -product[2 * i + 1]));
  }
}

// What settle_wild works on.
struct WildItem {
  float state[64];
  uint32_t rhs[8], u[8];
  RowScales rows;
  bool is_replaced;  // the state is already that of the item's end
};

// The rare case: a right-hand side or U near fp16's end, or a solve that may enlarge. Settles U (columns from the
// limit on are cleared), and decays the state or runs the slow path. Returns the first token that needs the slow
// path. Not inlined: it would push the chain out of the instruction cache.
__device__ __noinline__ inline int settle_wild(const Params& p, const Work& work, int index, int count, WildItem* x,
                                               uint32_t stage, int row) {
  const ConsumerLane me(threadIdx.x);
  uint32_t rhs[8], u[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) rhs[i] = x->rhs[i], u[i] = x->u[i];
  const int limit = min(first_over_limit(rhs, me), first_over_limit(u, me));
  clear_from(u, limit, me);
#pragma unroll
  for (int i = 0; i < 8; ++i) x->u[i] = u[i];
  x->is_replaced = limit < count;
  if (limit < count) {
    run_slow_path(p, work, item_of(work, index), work.has_output ? limit : kChunk, x->state, x->rows.inverse(0),
                  x->rows.inverse(1), row, threadIdx.x);
  } else {
    float state[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = x->state[i];
    StateDecay decay;
    load_decay(decay, stage, me);
    decay_state(state, decay);
#pragma unroll
    for (int i = 0; i < 64; ++i) x->state[i] = state[i];
  }
  return limit;
}

// Scales are chosen for two items: the grid of 64 tokens (H-10). The first of them chooses, the second finds the
// peaks for the next two. kAny: either, told by the index.
enum class Turn { kFirst, kSecond, kAny };
template <Turn kTurn>
__device__ __forceinline__ bool is_first(int index) {
  return kTurn == Turn::kAny ? index % 2 == 0 : kTurn == Turn::kFirst;
}

// An item's stage.
struct ChainPlace {
  uint32_t stage;    // shared address
  uint32_t full;     // its barrier, and the phase to wait for
  uint32_t parity;
};

// A stage's shared address / 16, known to be the same in all lanes. Shared addresses carry the CTA's rank in their
// upper bits, which a descriptor has no room for.
__device__ __forceinline__ uint32_t uniform_stage16(uint32_t stage) {
  return __shfl_sync(0xffffffffu, (stage & 0x3ffffu) >> 4, 0);
}

// `traffic` moves values and outputs: begin and between are called while products run that do not need the warp,
// publish when an item's outputs lie in their tile, next for the next item's values, if there is one (`are_there`: no
// need to wait; test asks that early). kOutputs false: for a state only. kAhead: the stage is waited for behind the
// item before, and decays are read among the first products: the registers of their addresses are not written there,
// since such a write would wait until the loads have read them. `row` is the warp's first value row.
template <Turn kTurn, class Traffic>
__device__ __forceinline__ void run_item(float (&state)[64], RowScales& rows, ChainItem& item, const Params& p,
                                         const Work& work, Traffic& traffic, int index, const ChainPlace& at,
                                         const ChainPlace& next, int row, const ConsumerLane& me) {
  const bool is_first_item = is_first<kTurn>(index);
  if (is_first_item) {
    float change[2];
    choose_scales(rows, change, item.peaks, item.exponent);
    rescale_state(state, change);
  }
  float product[16], out[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) product[i] = out[i] = 0.0f;
  uint32_t packed[32];
  const uint32_t stage16 = uniform_stage16(at.stage);  // takes as long as what follows
  if constexpr (!Traffic::kAhead) ptx::mbarrier_wait(at.full, at.parity);
  // Packed as they are needed, but where the state was multiplied just now: ptxas would wait at every fence.
  constexpr int kAtOnce = kTurn == Turn::kSecond ? 4 : 8;
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    if (s % kAtOnce == 0) {
#pragma unroll
      for (int i = s; i < s + kAtOnce; ++i) pack_step(packed, state, i);
      ptx::wgmma_fence();
    }
    multiply_step<Stage::kKeys>(product, packed, stage16, s);
  }
  ptx::wgmma_commit();
  StateDecay decay;
  if constexpr (Traffic::kAhead) load_decay(decay, at.stage, me);
  if constexpr (Traffic::kOutputs) {
#pragma unroll
    for (int s = 0; s < 4; ++s) multiply_step<Stage::kQueries>(out, packed, stage16, s);
  }
  ptx::wgmma_commit();
  const uint32_t is_wild = ptx::load_shared_u32(at.stage + Stage::kWild);
  const bool values_are_there = traffic.test(index);  // the answer takes a while
  ptx::wgmma_wait<1>();
  ptx::pin_registers(product);

  uint32_t rhs[8];
  pack_rhs(rhs, item.values, product, rows);
#pragma unroll
  for (int i = 0; i < 16; ++i) product[i] = 0.0f;
  ptx::wgmma_fence();
  apply_inverse(product, rhs, stage16);
  ptx::wgmma_commit();
  const auto multiply_queries = [&] {
    if constexpr (Traffic::kOutputs) {
#pragma unroll
      for (int s = 4; s < 8; ++s) multiply_step<Stage::kQueries>(out, packed, stage16, s);
    }
    ptx::wgmma_commit();
  };
  if constexpr (!Traffic::kAhead) multiply_queries();
  const bool is_calm = !__any_sync(0xffffffffu, largest_magnitude(rhs) >= kCalmBits || is_wild != 0);
  if (__builtin_expect(is_calm, 1)) {
    if constexpr (!Traffic::kAhead) load_decay(decay, at.stage, me);
    decay_state(state, decay);
  }
  if constexpr (Traffic::kAhead) {
    ptx::wgmma_fence();
    multiply_queries();
  }
  ptx::wgmma_wait<1>();
  ptx::pin_registers(product);

  const int count = traffic.rows(index);
  int limit = kChunk;  // first token that needs the slow path
  uint32_t u[8], u_out[8];
  pack_pairs(u, product);
#pragma unroll
  for (int i = 0; i < 8; ++i) u_out[i] = u[i];
  if (__builtin_expect(!is_calm, 0)) {
    ptx::wgmma_wait<0>();
    ptx::pin_registers(out);
    WildItem wild;
#pragma unroll
    for (int i = 0; i < 64; ++i) wild.state[i] = state[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) wild.rhs[i] = rhs[i], wild.u[i] = u[i];
    wild.rows = rows;
    limit = settle_wild(p, work, index, count, &wild, at.stage, row);
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = wild.state[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) u_out[i] = wild.u[i], u[i] = wild.is_replaced ? 0 : wild.u[i];
  }
  traffic.begin(index, me);
  ptx::wgmma_fence();
  if constexpr (Traffic::kOutputs) add_scores(out, u_out, stage16);
  ptx::wgmma_commit();
  update_half<0>(state, u, stage16);
  ptx::wgmma_commit();
  update_half<32>(state, u, stage16);
  ptx::wgmma_commit();
  bool has_next = true, is_full = false;
  if constexpr (Traffic::kAhead) {
    is_full = ptx::mbarrier_test(next.full, next.parity);
    has_next = traffic.next(item, index, values_are_there, me);
  }
  traffic.between(p, work, index, row, me);
  ptx::wgmma_wait<2>();
  ptx::pin_registers(out);
  if constexpr (Traffic::kOutputs) stage_output(out, rows, p, traffic.tile(index), me);
  if (limit < count) rows = RowScales();  // what the slow path made
  traffic.publish(index, min(limit, count), me);
  if (Traffic::kAhead && has_next && !is_full) ptx::mbarrier_wait(next.full, next.parity);
  ptx::wgmma_wait<1>();
  ptx::pin_part<0, 32>(state);
  if (!is_first_item) {
    half_peaks<0>(item.peaks, state);
    if constexpr (Traffic::kAhead) ptx::pin_registers(item.peaks);  // not behind what follows
  }
  if constexpr (!Traffic::kAhead) traffic.next(item, index, false, me);
  if (!is_first_item) item.exponent = value_exponent(item.values, me);
  ptx::wgmma_wait<0>();
  ptx::pin_part<32, 32>(state);
  if (!is_first_item) {
    float high[2];
    half_peaks<32>(high, state);
    item.peaks[0] = fmaxf(item.peaks[0], high[0]), item.peaks[1] = fmaxf(item.peaks[1], high[1]);
  }
}

// What a consumer warp keeps of its work in shared memory: local memory misses the L1 there (900 cycles).
struct OpenWork {
  Work work;
  StateTarget target;  // of its last state
};
static_assert(sizeof(OpenWork) <= kOpenWorkBytes);

// Of the next stage in a ring.
template <uint32_t kCount>
struct StageCursor {
  uint32_t slot = 0, parity = 0;
  __device__ void advance() {
    slot = slot + 1 == kCount ? 0 : slot + 1;
    parity ^= slot == 0 ? 1 : 0;
  }
};
template <>
struct StageCursor<4> {
  uint32_t number = 0, slot = 0, parity = 0;
  __device__ void advance() {
    ++number;
    slot = number & 3, parity = (number >> 2) & 1;
  }
};

// What differs between the kernels that run chains. Ring: the stages; Traffic: the rows.
template <class Ring, class Traffic>
__device__ __forceinline__ void consume(const Params& p, uint32_t window, uint32_t rank) {
  using Plan = typename Ring::Plan;
  // Where registers are short, ptxas may read the thread's index anew.
  ConsumerLane me(static_cast<int>(Traffic::kAhead ? hold(threadIdx.x) : renew(threadIdx.x)));
  // A lane's part of an address stays in its register, and the rest is uniform: see kAhead.
  if constexpr (Traffic::kAhead) me.decays = hold(me.decays);
  const uint32_t shared = renew(window);
  const uint32_t first_row = rank * kRowsPerCta + 16 * me.warp;
  const uint32_t barriers = shared + Plan::kBarriers;
  OpenWork& open = *reinterpret_cast<OpenWork*>(s_memory + Plan::kOpenWorks + me.warp * kOpenWorkBytes);
  const auto works = static_cast<uint32_t>(Ring::count(p));  // below 2^31
  auto w = static_cast<uint32_t>(Ring::first(p));
  StageCursor<Ring::kCount> ring;
  Traffic traffic(shared, me);
  float state[64];
  RowScales rows;
  StateTarget target;  // of the work before
  while (true) {
    const int row = static_cast<int>(renew(first_row));  // what is made from it is not kept across the items
    Work next;
    bool is_open = false;
    while (!is_open && w < works) {
      next = Ring::load(p, w);
      w = static_cast<uint32_t>(Ring::next(p, w));
      is_open = next.sequence >= 0 && next.is_active;
      if (!is_open && next.sequence >= 0 && next.has_output) clear_output(p, next, row, me);
    }
    StateSource source;
    if (is_open) {
      if (me.lane == 0) open = {next, Ring::target(p, next)};
      __syncwarp();
      traffic.open(p, next, row, me);
      source = Ring::source(p, next);
    }
    if constexpr (Ring::kHandsOver) {
      if (__builtin_expect(next.part == Part::kRest, 0)) Ring::wait_for_state(row);
    }
    constexpr bool kSegments = Traffic::kAhead, kTakesMaps = Traffic::kTakesMaps;
    const bool has_maps = kTakesMaps && p.pass == Pass::kSegments;
    if (has_maps) ptx::wait_for_prerequisites();  // what opening and summaries made
    const bool stays = kSegments && is_open && goes_on(p, next);
    exchange_state<kSegments, !Traffic::kOutputs>(state, rows, target, source, next.is_map, stays, row, me);
    if (!is_open) return;
    const Work& work = open.work;
    rows = RowScales();
    const auto place = [&] {
      return ChainPlace{shared + Plan::kStage + ring.slot * Stage::kStride, barriers + ring.slot * 8, ring.parity};
    };
    const int maps = has_maps ? maps_before(p, next.segment) : 0;
#pragma unroll 1
    for (int i = 0; kTakesMaps && i < maps; ++i) {
      float sum[64];
      load_sums(sum, segment_sum(p, next.sequence, next.head, segment_of_map(p, next.segment, i)), row, me);
#pragma unroll 1
      for (int block = 0; block < kMapBlocks; ++block) {
        const ChainPlace at = place();
        const uint32_t slot = ring.slot;
        ring.advance();
        ptx::mbarrier_wait(at.full, at.parity);
        add_map_block(sum, state, uniform_stage16(at.stage));
        __syncwarp();
        Ring::release(at.full + Ring::kCount * 8, slot, me.lane);
      }
#pragma unroll
      for (int j = 0; j < 64; ++j) state[j] = sum[j];
    }
    int due = 0x7fffffff;  // items after which a checkpoint is to be stored
    if (Ring::kCheckpoints && p.checkpoints > 0 && work.checkpoint < 0)
      due = next_checkpoint(p, work.sequence, work.span.length, 0);
    ChainItem item;
    {
      float low[2], high[2];
      half_peaks<0>(low, state);
      half_peaks<32>(high, state);
      item.peaks[0] = fmaxf(low[0], high[0]), item.peaks[1] = fmaxf(low[1], high[1]);
    }
    if (traffic.next(item, -1, false, me)) {
      if constexpr (Traffic::kAhead) ptx::mbarrier_wait(place().full, place().parity);
      item.exponent = value_exponent(item.values, me);
    }
    const int items = next.items;
    int index = 0;
    const auto run = [&]<Turn kTurn>() {
      const ChainPlace at = place();
      const uint32_t slot = ring.slot;
      ring.advance();
      run_item<kTurn>(state, rows, item, p, work, traffic, index, at, place(), row, me);
      __syncwarp();  // every lane's reads of the stage before the one arrival
      Ring::release(at.full + Ring::kCount * 8, slot, me.lane);
      ++index;
    };
    while (index < items) {
      if constexpr (Traffic::kPairs) {
        run.template operator()<Turn::kFirst>();
        if (index == items) break;
        run.template operator()<Turn::kSecond>();
      } else {
        run.template operator()<Turn::kAny>();
      }
      if (Ring::kCheckpoints && __builtin_expect(index == due, 0)) {
#pragma unroll 1
        for (int c = 0; c < p.checkpoints; ++c)
          if (is_checkpoint_due(p, work, c, due))
            store_state(state, rows, checkpoint_target(p, work.sequence, work.head, c), row, me);
        due = next_checkpoint(p, work.sequence, work.span.length, due);
      }
    }
    // The vote says that the branch is uniform: ptxas would guard every product of the loop otherwise.
    if constexpr (Ring::kHandsOver) {
      if (__any_sync(0xffffffffu, work.part == Part::kFirst))
        Ring::leave_state(state, rows, static_cast<int>(renew(first_row)), me);
    }
    target = open.target;
    traffic.close(p, work, row, me);
    __syncwarp();  // every lane has read the work
  }
}

}  // namespace kda::cuda::prefill_fused

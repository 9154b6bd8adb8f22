// The role of the consumer warpgroup: the state of 64 value rows from the pool through all items to the pool.
//
// Waits: full[stage] before an item's operands are read. Publishes: empty[stage], one arrival of each warp at the CTA
// whose producers fill that stage. Values come and outputs go through this warp's own tiles, without barriers.
#pragma once

#include "cuda/kernels/prefill_fused/produce.cuh"
#include "cuda/kernels/prefill_fused/slow_path.cuh"

namespace kda::cuda::prefill_fused {

// Pairs of a state may lie at any element (P-1): `whole` if they are aligned to their size.
__device__ __forceinline__ bool has_whole_pairs(const void* base, Real type, int64_t offset) {
  const uint32_t size = type == Real::kF32 ? 4 : 2;
  return ((static_cast<uint32_t>(reinterpret_cast<uintptr_t>(base)) + static_cast<uint32_t>(offset) * size) &
          (2 * size - 1)) == 0;
}

__device__ __forceinline__ float2 load_state_pair(const void* base, Real type, int64_t at, bool whole) {
  if (type == Real::kF32) {
    const float* from = static_cast<const float*>(base) + at;
    return whole ? *reinterpret_cast<const float2*>(from) : float2{from[0], from[1]};
  }
  const uint16_t* from = static_cast<const uint16_t*>(base) + at;
  const uint32_t x =
      whole ? *reinterpret_cast<const uint32_t*>(from) : from[0] | static_cast<uint32_t>(from[1]) << 16;
  return type == Real::kBf16 ? float2{ptx::bf16_low(x), ptx::bf16_high(x)} : ptx::unpack_f16(x);
}

__device__ __forceinline__ void store_state_pair(void* base, Real type, int64_t at, float x, float y, bool whole) {
  if (type == Real::kF32) {
    float* to = static_cast<float*>(base) + at;
    if (whole) *reinterpret_cast<float2*>(to) = float2{x, y};
    else to[0] = x, to[1] = y;
  } else {
    uint16_t* to = static_cast<uint16_t*>(base) + at;
    const uint32_t packed = type == Real::kBf16 ? ptx::pack_bf16(x, y) : ptx::pack_f16(x, y);
    if (whole) *reinterpret_cast<uint32_t*>(to) = packed;
    else to[0] = static_cast<uint16_t>(packed), to[1] = static_cast<uint16_t>(packed >> 16);
  }
}

__device__ __forceinline__ void load_state(float (&state)[64], const StateSource& source, bool is_map, int row,
                                           const ConsumerLane& me) {
  if (source.base == nullptr) {
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        state[4 * n + e] = is_map && row + me.g + 8 * (e >> 1) == 8 * n + 2 * me.c + (e & 1) ? 1.0f : 0.0f;
    return;
  }
  const bool whole = has_whole_pairs(source.base, source.type, source.offset);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t at = source.offset + (row + me.g + 8 * r) * kDim + 2 * me.c;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float2 x = load_state_pair(source.base, source.type, at + 8 * n, whole);
      state[4 * n + 2 * r] = x.x;
      state[4 * n + 2 * r + 1] = x.y;
    }
  }
}

__device__ __forceinline__ void store_state(const float (&state)[64], const RowScales& rows,
                                            const StateTarget& target, int row, const ConsumerLane& me) {
  if (target.base == nullptr) return;
  const bool whole = has_whole_pairs(target.base, target.type, target.offset);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t at = target.offset + (row + me.g + 8 * r) * kDim + 2 * me.c;
#pragma unroll
    for (int n = 0; n < 16; ++n)
      store_state_pair(target.base, target.type, at + 8 * n, state[4 * n + 2 * r] * rows.inverse[r],
                       state[4 * n + 2 * r + 1] * rows.inverse[r], whole);
  }
}

// What the item loop keeps of a work: this lane's next values to fetch and next outputs to store (token row lane / 2,
// 16-byte half lane % 2), and how many rows the last item has.
struct RowCursor {
  const char* values;
  char* out;
  uint32_t value_step, out_step;  // bytes of a token row
  int items, tail;
  int most;     // outputs of an item that may be stored: 0 in runs for a state only
  bool is_map;  // values are zero
};

__device__ __forceinline__ int item_rows(const RowCursor& rows, int index) {
  return index + 1 < rows.items ? kChunk : (index + 1 == rows.items ? rows.tail : 0);
}

__device__ __forceinline__ RowCursor row_cursor(const Params& p, const Work& work, int row, const ConsumerLane& me) {
  RowCursor rows;
  const int64_t v = row_offset(p.v_rows, work, me.lane >> 1, work.head) + row + 8 * (me.lane & 1);
  const int64_t out = row_offset(p.out_rows, work, me.lane >> 1, work.head) + row + 8 * (me.lane & 1);
  rows.values = static_cast<const char*>(p.v) + 2 * v;
  rows.out = static_cast<char*>(p.out) + 2 * out;
  rows.value_step = renew(2 * static_cast<uint32_t>(p.v_rows.token));
  rows.out_step = renew(2 * static_cast<uint32_t>(p.out_rows.token));
  rows.items = work.items;
  rows.tail = static_cast<int>(work.span.length - static_cast<int64_t>(work.items - 1) * kChunk);
  rows.most = work.has_output ? kChunk : 0;
  rows.is_map = work.is_map;
  return rows;
}

// Copies the value tile of item `index`, the next one in order; rows past the end become zero.
__device__ __forceinline__ void fetch_values(RowCursor& rows, int index, uint32_t tiles, const ConsumerLane& me) {
  const int count = item_rows(rows, index);
  if (count > 0) {
    const uint32_t target = tiles + (index & 3) * 1024 + tile_offset(me.lane >> 1, me.lane & 1);
    const int valid = rows.is_map ? 0 : count;
    const bool first = (me.lane >> 1) < valid, second = (me.lane >> 1) + 16 < valid;
    ptx::copy_async_16(target, first ? rows.values : nullptr, first ? 16 : 0);
    ptx::copy_async_16(target + 512, second ? rows.values + step_bytes(16, rows.value_step) : nullptr,
                       second ? 16 : 0);
    rows.values += step_bytes(kChunk, rows.value_step);
  }
  ptx::copy_async_commit();
}

// Fragment address of this lane for the transposed 8x8 loads and stores of token rows 16j..16j+15.
__device__ __forceinline__ uint32_t fragment_address(uint32_t tile, int j, const ConsumerLane& me) {
  const int matrix = me.lane >> 3;
  return tile + tile_offset(16 * j + 8 * (matrix >> 1) + (me.lane & 7), matrix & 1);
}

// Output rows through the list of R-41; not inlined, rare.
__device__ __noinline__ void store_listed_rows(const Params& p, const Work& work, int64_t first, int limit,
                                               uint32_t tile, int row, int lane) {
  for (int token = lane >> 1; token < limit; token += 16) {
    const uint4 x = ptx::load_shared_u4(tile + tile_offset(token, lane & 1));
    const int64_t target = output_row(p, work.span.begin + first + token);
    const int64_t at = work.span.batch * p.out_rows.batch + target * p.out_rows.token + work.head * p.out_rows.head;
    if (target >= 0) *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + at + row + 8 * (lane & 1)) = x;
  }
}

// An item's outputs, rounded once (N-4), to its tile.
__device__ __forceinline__ void stage_output(const float (&out)[16], const RowScales& scales, const Params& p,
                                             uint32_t tile, const ConsumerLane& me) {
  // A power of two times the scale: exact (the inverse is at most 2^126).
  const float factor[2] = {scales.inverse[0] * p.scale, scales.inverse[1] * p.scale};
  uint32_t packed[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) packed[i] = ptx::pack_bf16(out[2 * i] * factor[i & 1], out[2 * i + 1] * factor[i & 1]);
#pragma unroll
  for (int j = 0; j < 2; ++j)
    ptx::store_matrix_x4_trans(fragment_address(tile, j, me), packed[4 * j], packed[4 * j + 1], packed[4 * j + 2],
                               packed[4 * j + 3]);
}

// A lane's 16-byte pieces of a staged output tile. A __syncwarp lies between staging and this.
struct StagedOutput {
  uint4 x, y;
};
__device__ __forceinline__ StagedOutput load_output(uint32_t tile, const ConsumerLane& me) {
  const uint32_t source = tile + tile_offset(me.lane >> 1, me.lane & 1);
  return {ptx::load_shared_u4(source), ptx::load_shared_u4(source + 512)};
}

// The staged outputs of item `index`, tokens below `limit`, to memory.
__device__ __forceinline__ void store_output(const StagedOutput& staged, const Params& p, const Work& work,
                                             RowCursor& rows, int index, int limit, uint32_t tile, int row,
                                             const ConsumerLane& me) {
  if (__builtin_expect(p.out_row_of.data == nullptr, 1)) {
    if ((me.lane >> 1) < limit) *reinterpret_cast<uint4*>(rows.out) = staged.x;
    if ((me.lane >> 1) + 16 < limit) *reinterpret_cast<uint4*>(rows.out + step_bytes(16, rows.out_step)) = staged.y;
  } else {
    store_listed_rows(p, work, static_cast<int64_t>(index) * kChunk, limit, tile, row, me.lane);
  }
  rows.out += step_bytes(kChunk, rows.out_step);
}

__device__ inline void clear_output(const Params& p, const Work& work, int row, const ConsumerLane& me) {
  for (int64_t token = me.lane >> 1; token < work.span.length; token += 16) {
    const int64_t target = output_row(p, work.span.begin + token);
    const int64_t at = work.span.batch * p.out_rows.batch + target * p.out_rows.token + work.head * p.out_rows.head;
    if (target >= 0)
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + at + row + 8 * (me.lane & 1)) = uint4{};
  }
}

// What an item needs besides the state: made while the products of the item before run.
struct ChainItem {
  uint32_t values[8];
  int exponent;    // value_exponent
  float peaks[2];  // of the state, this lane's columns
};

__device__ __forceinline__ void load_values(ChainItem& item, uint32_t tile, bool scales, const ConsumerLane& me) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    uint32_t quad[4];
    ptx::load_matrix_x4_trans(quad, fragment_address(tile, j, me));
#pragma unroll
    for (int i = 0; i < 4; ++i) item.values[4 * j + i] = quad[i];
  }
  if (scales) item.exponent = value_exponent(item.values, me);
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
template <class C>
__device__ __noinline__ int settle_wild(const Params& p, const Work& work, int index, int count, WildItem* x,
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
    run_slow_path<C>(p, work, item_of(work, index), work.has_output ? limit : kChunk, x->state, x->rows.inverse[0],
                     x->rows.inverse[1], row, threadIdx.x);
    x->rows = RowScales();
  } else {
    float state[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = x->state[i];
    decay_state(state, stage, me);
#pragma unroll
    for (int i = 0; i < 64; ++i) x->state[i] = state[i];
  }
  return limit;
}

constexpr int kScaleItems = 2;  // items for which a scale is chosen: the grid of 64 tokens (H-10)

// Where the loop over items stands.
struct ChainPlace {
  uint32_t stage;      // shared address of the item's stage
  uint32_t stage16;    // the same / 16 without the CTA's rank, uniform
  uint32_t tile;       // value and output tile of the item
  uint32_t last_tile;  // that of the item before; the next to be filled
  int index;
};

// One item: the products of recurrence.cuh in the order of the chain, and in the time that they take, what does not
// lie on the chain: the decay while U is made; while the state's update runs, `before` (the outputs of the item
// before go out), this item's outputs to their tile, and `after` (the next item's values come in). Returns how many
// outputs may be stored. `row` is the warp's first value row.
template <class C, class Before, class After>
__device__ __forceinline__ int run_item(float (&state)[64], RowScales& rows, ChainItem& item, const Params& p,
                                        const Work& work, const RowCursor& cursor, const ChainPlace& at,
                                        uint32_t full, uint32_t parity, int row, const ConsumerLane& me,
                                        const Before& before, const After& after) {
  if (at.index % kScaleItems == 0) {
    float change[2];
    choose_scales(rows, change, item.peaks, item.exponent);
    rescale_state(state, change);
  }
  float product[16], out[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) product[i] = out[i] = 0.0f;
  uint32_t packed[32];
  pack_pairs(packed, state);
  ptx::mbarrier_wait(full, parity);
  ptx::wgmma_fence();
#pragma unroll
  for (int s = 0; s < 8; ++s) multiply_step<Stage::kKeys>(product, packed, at.stage16, s);
  ptx::wgmma_commit();
#pragma unroll
  for (int s = 0; s < 4; ++s) multiply_step<Stage::kQueries>(out, packed, at.stage16, s);
  ptx::wgmma_commit();
  const uint32_t is_wild = ptx::load_shared_u32(at.stage + Stage::kWild);
  ptx::wgmma_wait<1>();
  ptx::pin_registers(product);

  uint32_t rhs[8];
  pack_rhs(rhs, item.values, product, rows);
#pragma unroll
  for (int i = 0; i < 16; ++i) product[i] = 0.0f;
  ptx::wgmma_fence();
  apply_inverse(product, rhs, at.stage16);
  ptx::wgmma_commit();
#pragma unroll
  for (int s = 4; s < 8; ++s) multiply_step<Stage::kQueries>(out, packed, at.stage16, s);
  ptx::wgmma_commit();
  const bool is_calm = !__any_sync(0xffffffffu, largest_magnitude(rhs) >= kCalmBits || is_wild != 0);
  if (__builtin_expect(is_calm, 1)) decay_state(state, at.stage, me);
  ptx::wgmma_wait<1>();
  ptx::pin_registers(product);

  const int count = item_rows(cursor, at.index);
  const RowScales scales_of_item = rows;
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
    limit = settle_wild<C>(p, work, at.index, count, &wild, at.stage, row);
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = wild.state[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) u_out[i] = wild.u[i], u[i] = wild.is_replaced ? 0 : wild.u[i];
    rows = wild.rows;
  }
  const StagedOutput last = load_output(at.last_tile, me);
  ptx::wgmma_fence();
  add_scores(out, u_out, at.stage16);
  ptx::wgmma_commit();
  update_half<0>(state, u, at.stage16);
  ptx::wgmma_commit();
  update_half<32>(state, u, at.stage16);
  ptx::wgmma_commit();
  before(last);
  ptx::wgmma_wait<2>();
  ptx::pin_registers(out);
  stage_output(out, scales_of_item, p, at.tile, me);
  ptx::wgmma_wait<1>();
  ptx::pin_part<0, 32>(state);
  const bool scales_next = at.index % kScaleItems == kScaleItems - 1;
  if (scales_next) half_peaks<0>(item.peaks, state);
  after(item);
  ptx::wgmma_wait<0>();
  ptx::pin_part<32, 32>(state);
  if (scales_next) {
    float high[2];
    half_peaks<32>(high, state);
    item.peaks[0] = fmaxf(item.peaks[0], high[0]), item.peaks[1] = fmaxf(item.peaks[1], high[1]);
  }
  return min(min(limit, count), cursor.most);
}

template <class C>
__device__ __forceinline__ void consume(const Params& p, uint32_t window, uint32_t rank) {
  const ConsumerLane me(static_cast<int>(renew(threadIdx.x)));
  const uint32_t shared = renew(window);
  const int row = static_cast<int>(rank) * kRowsPerCta + 16 * me.warp;
  const uint32_t tiles = shared + Shared::kValues + me.warp * 4096;
  const uint32_t barriers = shared + Shared::kBarriers;
  const int64_t works = work_count(p);
  uint32_t number = 0;  // items of this cluster so far
  float state[64];
  for (int64_t w = first_work(p); w < works; w = next_work(p, w)) {
    const Work work = load_work(p, w);
    if (work.sequence < 0) continue;
    if (!work.is_active) {
      if (work.checkpoint < 0) clear_output(p, work, row, me);
      continue;
    }
    RowScales rows;
    RowCursor cursor = row_cursor(p, work, row, me);
    int due = 0x7fffffff;  // items after which a checkpoint is to be stored
    if (p.checkpoints > 0 && work.checkpoint < 0) due = next_checkpoint(p, work.sequence, work.span.length, 0);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 3; ++i) fetch_values(cursor, i, tiles, me);
    load_state(state, work_source(p, work), work.is_map, row, me);
    ChainItem item;
    {
      float low[2], high[2];
      half_peaks<0>(low, state);
      half_peaks<32>(high, state);
      item.peaks[0] = fmaxf(low[0], high[0]), item.peaks[1] = fmaxf(low[1], high[1]);
    }
    ptx::copy_async_wait<2>();
    __syncwarp();
    load_values(item, tiles, true, me);
    int staged = 0;  // outputs of the item before that wait in its tile
    const int items = work.items;
    for (int index = 0; index < items; ++index, ++number) {
      const uint32_t slot = number & 3;
      ChainPlace at;
      at.stage = shared + Shared::kStage + slot * Stage::kStride;
      // Shared addresses carry the CTA's rank in their upper bits, which a descriptor has no room for.
      at.stage16 = __shfl_sync(0xffffffffu, (at.stage & 0x3ffffu) >> 4, 0);
      at.tile = tiles + (index & 3) * 1024;
      at.index = index;
      at.last_tile = tiles + ((index + 3) & 3) * 1024;
      const auto before = [&](const StagedOutput& last) {
        if (index > 0) store_output(last, p, work, cursor, index - 1, staged, at.last_tile, row, me);
        __syncwarp();
        fetch_values(cursor, index + 3, tiles, me);
      };
      const auto after = [&](ChainItem& following) {
        ptx::copy_async_wait<2>();
        __syncwarp();
        load_values(following, tiles + ((index + 1) & 3) * 1024, (index + 1) % kScaleItems == 0, me);
      };
      staged = run_item<C>(state, rows, item, p, work, cursor, at, barriers + slot * 8, (number >> 2) & 1, row, me,
                           before, after);
      __syncwarp();  // every lane's reads of the stage before the one arrival
      if (me.lane == 0)
        ptx::mbarrier_arrive_cluster(ptx::map_shared_rank(barriers + (kStages + slot) * 8, slot % kClusterSize));
      if (__builtin_expect(index + 1 == due, 0)) {
#pragma unroll 1
        for (int c = 0; c < p.checkpoints; ++c)
          if (is_checkpoint_due(p, work, c, due))
            store_state(state, rows, checkpoint_target(p, work.sequence, work.head, c), row, me);
        due = next_checkpoint(p, work.sequence, work.span.length, due);
      }
    }
    if (items > 0) {
      const uint32_t tile = tiles + ((items - 1) & 3) * 1024;
      store_output(load_output(tile, me), p, work, cursor, items - 1, staged, tile, row, me);
    }
    ptx::copy_async_wait<0>();
    store_state(state, rows, work_target(p, work), row, me);
  }
}

}  // namespace kda::cuda::prefill_fused

// The role of the consumer warpgroup: the state of 64 value rows from the pool through all items to the pool.
//
// Waits: full[stage] before an item's operands are read. Publishes: empty[stage], one arrival of each warp at the CTA
// whose producers fill that stage. Values come and outputs go through this warp's own tiles, without barriers.
#pragma once

#include "cuda/kernels/prefill_fused/produce.cuh"
#include "cuda/kernels/prefill_fused/slow_path.cuh"

namespace kda::cuda::prefill_fused {

__device__ __forceinline__ float2 load_state_pair(const void* base, Real type, int64_t at) {
  if (type == Real::kF32) return *reinterpret_cast<const float2*>(static_cast<const float*>(base) + at);
  const uint32_t x = *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(base) + at);
  return type == Real::kBf16 ? float2{ptx::bf16_low(x), ptx::bf16_high(x)} : ptx::unpack_f16(x);
}

__device__ __forceinline__ void store_state_pair(void* base, Real type, int64_t at, float x, float y) {
  if (type == Real::kF32) {
    *reinterpret_cast<float2*>(static_cast<float*>(base) + at) = float2{x, y};
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(base) + at) =
        type == Real::kBf16 ? ptx::pack_bf16(x, y) : ptx::pack_f16(x, y);
  }
}

// Element of value row `row`, column 2c, in a slot of a pool.
__device__ __forceinline__ int64_t state_offset(int64_t slot, int64_t stride, int head, int row, int column) {
  return slot * stride + (static_cast<int64_t>(head) * kDim + row) * kDim + column;
}

__device__ __forceinline__ void load_state(float (&state)[64], const Params& p, const Work& work, const Slots& slots,
                                           int row, const ConsumerLane& me) {
  if (slots.is_fresh) {
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = 0.0f;
    return;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t at = state_offset(slots.read, p.state_in_stride, work.head, row + me.g + 8 * r, 2 * me.c);
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float2 x = load_state_pair(p.state_in, p.state_in_type, at + 8 * n);
      state[4 * n + 2 * r] = x.x;
      state[4 * n + 2 * r + 1] = x.y;
    }
  }
}

__device__ __forceinline__ void store_state(const float (&state)[64], const RowScales& rows,
                                            const StateTarget& target, const Work& work, int row,
                                            const ConsumerLane& me) {
  if (target.base == nullptr) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t at = target.offset + state_offset(0, 0, work.head, row + me.g + 8 * r, 2 * me.c);
#pragma unroll
    for (int n = 0; n < 16; ++n)
      store_state_pair(target.base, target.type, at + 8 * n, state[4 * n + 2 * r] * rows.inverse[r],
                       state[4 * n + 2 * r + 1] * rows.inverse[r]);
  }
}

// What the item loop keeps of a work: this lane's next values to fetch and next outputs to store (token row lane / 2,
// 16-byte half lane % 2), and how many rows the last item has.
struct RowCursor {
  const char* values;
  char* out;
  uint32_t value_step, out_step;  // bytes of a token row
  int items, tail;
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
  rows.value_step = 2 * static_cast<uint32_t>(p.v_rows.token);
  rows.out_step = 2 * static_cast<uint32_t>(p.out_rows.token);
  rows.items = work.items;
  rows.tail = static_cast<int>(work.span.length - static_cast<int64_t>(work.items - 1) * kChunk);
  return rows;
}

// Copies the value tile of item `index`, the next one in order; rows past the end become zero.
__device__ __forceinline__ void fetch_values(RowCursor& rows, int index, uint32_t tiles, const ConsumerLane& me) {
  const int count = item_rows(rows, index);
  if (count > 0) {
    const uint32_t target = tiles + (index & 3) * 1024 + tile_offset(me.lane >> 1, me.lane & 1);
    const bool first = (me.lane >> 1) < count, second = (me.lane >> 1) + 16 < count;
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

__device__ __forceinline__ void store_output(const float (&out)[16], const RowScales& scales, const Params& p,
                                             const Work& work, RowCursor& rows, int index, int limit, uint32_t tile,
                                             int row, const ConsumerLane& me) {
  // A power of two times the scale: exact (the inverse is at most 2^126).
  const float factor[2] = {scales.inverse[0] * p.scale, scales.inverse[1] * p.scale};
  uint32_t packed[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) packed[i] = ptx::pack_bf16(out[2 * i] * factor[i & 1], out[2 * i + 1] * factor[i & 1]);
#pragma unroll
  for (int j = 0; j < 2; ++j)
    ptx::store_matrix_x4_trans(fragment_address(tile, j, me), packed[4 * j], packed[4 * j + 1], packed[4 * j + 2],
                               packed[4 * j + 3]);
  __syncwarp();
  if (__builtin_expect(p.out_row_of.data == nullptr, 1)) {
    const uint32_t source = tile + tile_offset(me.lane >> 1, me.lane & 1);
    const uint4 x = ptx::load_shared_u4(source), y = ptx::load_shared_u4(source + 512);
    if ((me.lane >> 1) < limit) *reinterpret_cast<uint4*>(rows.out) = x;
    if ((me.lane >> 1) + 16 < limit) *reinterpret_cast<uint4*>(rows.out + step_bytes(16, rows.out_step)) = y;
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

// One item: see recurrence.cuh. `row` is the warp's first value row.
template <class C>
__device__ __forceinline__ void run_item(float (&state)[64], RowScales& rows, const Params& p, const Work& work,
                                         RowCursor& cursor, int index, uint32_t stage, uint32_t full, uint32_t parity,
                                         uint32_t tile, int row, const ConsumerLane& me) {
  const int count = item_rows(cursor, index);
  // Shared addresses carry the CTA's rank in their upper bits, which a descriptor has no room for.
  const uint32_t stage16 = __shfl_sync(0xffffffffu, (stage & 0x3ffffu) >> 4, 0);
  uint32_t values[8];
  {
    uint32_t quad[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      ptx::load_matrix_x4_trans(quad, fragment_address(tile, j, me));
#pragma unroll
      for (int i = 0; i < 4; ++i) values[4 * j + i] = quad[i];
    }
  }
  const uint32_t first_values[2] = {values[0], values[1]};
  rescale_state(state, rows, first_values, me);
  uint32_t packed[32];
  pack_state(packed, state);
  ptx::mbarrier_wait(full, parity);

  float product[16], out[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) product[i] = out[i] = 0.0f;
  ptx::wgmma_fence();
  multiply_state<Stage::kKeys>(product, packed, stage16);
  ptx::wgmma_commit();
  multiply_state<Stage::kQueries>(out, packed, stage16);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>();
  ptx::pin_registers(product);

  uint32_t rhs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float scale = rows.scale[i & 1];
    const float r0 = fmaf(ptx::bf16_low(values[i]), scale, -product[2 * i]);
    const float r1 = fmaf(ptx::bf16_high(values[i]), scale, -product[2 * i + 1]);
    rhs[i] = ptx::pack_f16(r0, r1);
  }
  int limit = kChunk;  // first token that needs the slow path
  const uint32_t largest = __reduce_max_sync(0xffffffffu, largest_magnitude(rhs));
  if (__builtin_expect(largest >= kLimitBits, 0)) {
    limit = first_over_limit(rhs, me);
    clear_from(rhs, limit, me);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) product[i] = 0.0f;
  ptx::wgmma_fence();
  apply_inverse(product, rhs, stage16);
  ptx::wgmma_commit();
  if (__builtin_expect(largest < kCalmBits, 1)) decay_state(state, stage, me);  // while the product runs
  ptx::wgmma_wait<0>();
  ptx::pin_registers(product);
  ptx::pin_registers(out);

  uint32_t u[8];
  pack_pairs(u, product);
  if (__builtin_expect(__any_sync(0xffffffffu, largest_magnitude(u) >= kLimitBits || limit < kChunk), 0)) {
    limit = min(limit, first_over_limit(u, me));
    clear_from(u, limit, me);
  }
  const RowScales scales_of_item = rows;
  uint32_t u_out[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) u_out[i] = u[i];
  if (__builtin_expect(limit < count, 0)) {
    float memory[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) memory[i] = state[i];
    run_slow_path<C>(p, work, item_of(work, index), work.checkpoint < 0 ? limit : kChunk, memory, rows.inverse[0],
                     rows.inverse[1], row, threadIdx.x);
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = memory[i];
    rows = RowScales();
    clear_from(u, 0, me);
  } else if (__builtin_expect(largest >= kCalmBits, 0)) {
    decay_state(state, stage, me);
  }
  ptx::wgmma_fence();
  add_scores(out, u_out, stage16);
  ptx::wgmma_commit();
  update_state(state, u, stage16);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>();
  ptx::pin_registers(out);
  store_output(out, scales_of_item, p, work, cursor, index, work.checkpoint < 0 ? min(limit, count) : 0, tile, row,
               me);
  ptx::wgmma_wait<0>();
  ptx::pin_registers(state);
}

template <class C>
__device__ __forceinline__ void consume(const Params& p, uint32_t shared, uint32_t rank) {
  const ConsumerLane me(threadIdx.x);
  const int row = static_cast<int>(rank) * kRowsPerCta + 16 * me.warp;
  const uint32_t tiles = shared + Shared::kValues + me.warp * 4096;
  const uint32_t barriers = shared + Shared::kBarriers;
  const uint16_t* order = sequence_order(p, shared);
  const int64_t works = work_count(p);
  uint32_t number = 0;  // items of this cluster so far
  float state[64];
  for (int64_t w = first_work(p); w < works; w = next_work(p, w)) {
    const Work work = load_work(p, w, order);
    if (work.sequence < 0) continue;
    if (!work.is_active) {
      if (work.checkpoint < 0) clear_output(p, work, row, me);
      continue;
    }
    const Slots slots = sequence_slots(p, work.sequence);
    RowScales rows;
    RowCursor cursor = row_cursor(p, work, row, me);
    int due = 0x7fffffff;  // items after which a checkpoint is to be stored
    if (p.checkpoints > 0 && work.checkpoint < 0) due = next_checkpoint(p, work.sequence, work.span.length, 0);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 3; ++i) fetch_values(cursor, i, tiles, me);
    load_state(state, p, work, slots, row, me);
    for (int index = 0; index < work.items; ++index, ++number) {
      __syncwarp();
      fetch_values(cursor, index + 3, tiles, me);
      ptx::copy_async_wait<3>();
      __syncwarp();
      const uint32_t slot = number & 3;
      run_item<C>(state, rows, p, work, cursor, index, shared + Shared::kStage + slot * Stage::kStride,
                  barriers + slot * 8, (number >> 2) & 1, tiles + (index & 3) * 1024, row, me);
      __syncwarp();  // every lane's reads of the stage before the one arrival
      if (me.lane == 0)
        ptx::mbarrier_arrive_cluster(ptx::map_shared_rank(barriers + (kStages + slot) * 8, slot % kClusterSize));
      if (__builtin_expect(index + 1 == due, 0)) {
#pragma unroll 1
        for (int c = 0; c < p.checkpoints; ++c)
          if (is_checkpoint_due(p, work, c, due))
            store_state(state, rows, checkpoint_target(p, work.sequence, c), work, row, me);
        due = next_checkpoint(p, work.sequence, work.span.length, due);
      }
    }
    ptx::copy_async_wait<0>();
    store_state(state, rows,
                work.checkpoint < 0 ? final_target(p, slots) : checkpoint_target(p, work.sequence, work.checkpoint),
                work, row, me);
  }
}

}  // namespace kda::cuda::prefill_fused

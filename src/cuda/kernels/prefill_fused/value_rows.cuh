// The rows of a consumer warp in memory and in its tiles: states, values and outputs.
//
// A tile is [32 tokens, 16 value rows] bf16, four a warp: item i's values come to tile i % 4 and are read into
// registers, its outputs take their place there and are stored from there.
#pragma once

#include "cuda/kernels/prefill_fused/slow_path.cuh"
#include "cuda/kernels/prefill_fused/terms.cuh"

namespace kda::cuda::prefill_fused {

// Pairs of a state may lie at any element (P-1): `whole` if they are aligned to their size.
__device__ __forceinline__ bool has_whole_pairs(const void* base, Real type, int64_t offset) {
  const uint32_t size = type == Real::kF32 ? 4 : 2;
  return ((static_cast<uint32_t>(reinterpret_cast<uintptr_t>(base)) + static_cast<uint32_t>(offset) * size) &
          (2 * size - 1)) == 0;
}

// fp32 in whole pairs and rows of a pool, or nowhere at all.
template <class Place>
__device__ __forceinline__ bool is_simple(const Place& x) {
  return x.base == nullptr ||
         (x.type == Real::kF32 && x.layout == Layout::kRows && has_whole_pairs(x.base, x.type, x.offset));
}

__device__ __forceinline__ float2 load_state_pair(const StateSource& source, bool is_whole, int64_t at) {
  if (source.type == Real::kF32) {
    const float* from = static_cast<const float*>(source.base) + at;
    return is_whole ? *reinterpret_cast<const float2*>(from) : float2{from[0], from[1]};
  }
  const uint16_t* from = static_cast<const uint16_t*>(source.base) + at;
  const uint32_t x =
      is_whole ? *reinterpret_cast<const uint32_t*>(from) : from[0] | static_cast<uint32_t>(from[1]) << 16;
  return source.type == Real::kBf16 ? float2{ptx::bf16_low(x), ptx::bf16_high(x)} : ptx::unpack_f16(x);
}

__device__ __forceinline__ void store_state_pair(const StateTarget& target, bool is_whole, int64_t at, float x,
                                                 float y) {
  if (target.type == Real::kF32) {
    float* to = static_cast<float*>(target.base) + at;
    if (is_whole) *reinterpret_cast<float2*>(to) = float2{x, y};
    else to[0] = x, to[1] = y;
  } else {
    uint16_t* to = static_cast<uint16_t*>(target.base) + at;
    const uint32_t packed = target.type == Real::kBf16 ? ptx::pack_bf16(x, y) : ptx::pack_f16(x, y);
    if (is_whole) *reinterpret_cast<uint32_t*>(to) = packed;
    else to[0] = static_cast<uint16_t>(packed), to[1] = static_cast<uint16_t>(packed >> 16);
  }
}

// Where a lane's state starts in a matrix: row me.g of the warp's sixteen, and 8 more.
__device__ __forceinline__ int64_t lane_in_matrix(int row, const ConsumerLane& me) {
  return (row + me.g) * kDim + 2 * me.c;
}

__device__ __forceinline__ void store_state(const float (&state)[64], const RowScales& rows,
                                            const StateTarget& target, int row, const ConsumerLane& me) {
  if (target.base == nullptr) return;
  const bool is_whole = has_whole_pairs(target.base, target.type, target.offset);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int r = i & 1, n = i >> 1;
    store_state_pair(target, is_whole, target.offset + lane_in_matrix(row, me) + 8 * r * kDim + 8 * n,
                     state[4 * n + 2 * r] * rows.inverse(r), state[4 * n + 2 * r + 1] * rows.inverse(r));
  }
}

// Rows g and 8 r more of an fp32 state in whole pairs, from `to` on.
__device__ __forceinline__ void store_rows(const float (&state)[64], const RowScales& rows, float* to, int r) {
#pragma unroll
  for (int n = 0; n < 16; ++n)
    *reinterpret_cast<float2*>(to + 8 * r * kDim + 8 * n) =
        float2{state[4 * n + 2 * r] * rows.inverse(r), state[4 * n + 2 * r + 1] * rows.inverse(r)};
}

// Layout::kSums: element (row, column) at row * 128 + column % 8 * 16 + column / 8, what a lane has of a row
// together. f(place, first): this lane's sixteen runs of four, which are elements first, first + 4, ... of its
// accumulators.
template <class F>
__device__ __forceinline__ void for_sums(int row, const ConsumerLane& me, const F& f) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int r = i >> 3, side = i >> 2 & 1, q = i & 3;
    f((row + me.g + 8 * r) * kDim + (2 * me.c + side) * 16 + 4 * q, 16 * q + 2 * r + side);
  }
}
__device__ __forceinline__ void load_sums(float (&x)[64], const void* from, int row, const ConsumerLane& me) {
  const float* base = ptx::in_global(static_cast<const float*>(from));
  for_sums(row, me, [&](int place, int first) {
    const float4 run = *reinterpret_cast<const float4*>(base + place);
    x[first] = run.x, x[first + 4] = run.y, x[first + 8] = run.z, x[first + 12] = run.w;
  });
}
__device__ __forceinline__ void store_sums(const float (&x)[64], void* to, int row, const ConsumerLane& me) {
  float* base = ptx::in_global(static_cast<float*>(to));
  for_sums(row, me, [&](int place, int first) {
    *reinterpret_cast<float4*>(base + place) = float4{x[first], x[first + 4], x[first + 8], x[first + 12]};
  });
}

// Layout::kMap: M as the products of segments.cuh read it, for each 32 channels (rows of M) 16 KB of high terms and
// 16 KB of low ones: [128 columns][32 channels] with 128-byte swizzle, of every eight channels the even ones first.
constexpr uint32_t kMapTermBytes = 16384, kMapBlockBytes = 2 * kMapTermBytes;
__device__ __forceinline__ void store_map(const float (&x)[64], void* to, int row, const ConsumerLane& me) {
  char* base = ptx::in_global(static_cast<char*>(to));
  const int lane_of_four = me.g >> 1;  // of the lanes that have the even, or the odd, channels of the same columns
  const bool low_bit = (lane_of_four & 1) != 0, high_bit = (lane_of_four & 2) != 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int q = i >> 2, r = i >> 1 & 1, side = i & 1;
    float v[4];  // of one channel, four columns
#pragma unroll
    for (int n = 0; n < 4; ++n) v[n] = x[16 * q + 4 * n + 2 * r + side];
    // Among the four lanes: of one column, four channels.
    const auto trade = [&](float& first, float& second, bool is_upper, int distance) {
      const float got = __shfl_xor_sync(0xffffffffu, is_upper ? first : second, distance);
      first = is_upper ? got : first, second = is_upper ? second : got;
    };
    trade(v[0], v[1], low_bit, 8), trade(v[2], v[3], low_bit, 8);
    trade(v[0], v[2], high_bit, 16), trade(v[1], v[3], high_bit, 16);
    const int channel = row + 8 * r, column = 8 * (4 * q + lane_of_four) + 2 * me.c + side;
    char* at = base + (channel >> 5) * kMapBlockBytes + swizzle_128(column, (channel & 24) / 4 + (me.g & 1));
    const Terms terms[4] = {Terms(v[0]), Terms(v[1]), Terms(v[2]), Terms(v[3])};
    *reinterpret_cast<uint4*>(at) = uint4{terms[0].high, terms[1].high, terms[2].high, terms[3].high};
    *reinterpret_cast<uint4*>(at + kMapTermBytes) = uint4{terms[0].low, terms[1].low, terms[2].low, terms[3].low};
  }
}

// The state of one work goes and the next one's comes, a half on its way while the other half goes; or, `goes_on`,
// stays. kSegments: of cut sequences too; kMaps: also maps are stored.
template <bool kSegments, bool kMaps>
__device__ __forceinline__ void exchange_state(float (&state)[64], const RowScales& rows, const StateTarget& target,
                                               const StateSource& source, bool is_map, bool goes_on, int row,
                                               const ConsumerLane& me) {
  const bool has_source = source.base != nullptr;
  if (__builtin_expect(is_simple(target) && is_simple(source), 1)) {
    float* to = ptx::in_global(static_cast<float*>(target.base) + target.offset + lane_in_matrix(row, me));
    const float* from =
        ptx::in_global(static_cast<const float*>(source.base) + source.offset + lane_in_matrix(row, me));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (target.base != nullptr) store_rows(state, rows, to, r);
      if (has_source) {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
          const float2 x = *reinterpret_cast<const float2*>(from + 8 * r * kDim + 8 * n);
          state[4 * n + 2 * r] = x.x, state[4 * n + 2 * r + 1] = x.y;
        }
      }
    }
  } else {
    if (!kSegments || target.layout == Layout::kRows) {
      store_state(state, rows, target, row, me);
    } else {
      rescale_state(state, {rows.inverse(0), rows.inverse(1)});
      if (kMaps && target.layout == Layout::kMap) store_map(state, target.base, row, me);
      else store_sums(state, target.base, row, me);
    }
    if (kSegments && source.layout != Layout::kRows) load_sums(state, source.base, row, me);
    const bool is_whole = has_whole_pairs(source.base, source.type, source.offset);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (!has_source || (kSegments && source.layout != Layout::kRows)) break;
      const int r = i & 1, n = i >> 1;
      const float2 x =
          load_state_pair(source, is_whole, source.offset + lane_in_matrix(row, me) + 8 * r * kDim + 8 * n);
      state[4 * n + 2 * r] = x.x, state[4 * n + 2 * r + 1] = x.y;
    }
  }
  if (has_source || (kSegments && goes_on)) return;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int r = (i >> 1) & 1, n = i >> 2;
    state[i] = is_map && row + me.g + 8 * r == 8 * n + 2 * me.c + (i & 1) ? 1.0f : 0.0f;
  }
}

// What a warp keeps of a work's rows: this lane's next values to fetch and next outputs to store (token row lane / 2,
// 16-byte half lane % 2), and how many rows the last item has.
struct RowCursor {
  const char* values;             // null: they are zero
  char* out[2];                   // of token rows lane / 2 and 16 more
  uint32_t value_step, out_step;  // bytes of a token row
  int items, tail;
  int most;  // outputs of an item that may be stored: 0 in runs for a state only
};

__device__ __forceinline__ int last_item_rows(const Work& work) {
  return static_cast<int>(work.span.length - static_cast<int64_t>(work.items - 1) * kChunk);
}
__device__ __forceinline__ int item_rows(int index, int items, int tail) {
  return index + 1 < items ? kChunk : (index + 1 == items ? tail : 0);
}

__device__ __forceinline__ RowCursor row_cursor(const Params& p, const Work& work, int row, int lane) {
  RowCursor rows;
  const int64_t v = row_offset(p.v_rows, work, lane >> 1, work.head) + row + 8 * (lane & 1);
  const int64_t out = row_offset(p.out_rows, work, lane >> 1, work.head) + row + 8 * (lane & 1);
  rows.values = work.is_map ? nullptr : static_cast<const char*>(p.v) + 2 * v;
  rows.value_step = renew(work.is_map ? 0 : 2 * static_cast<uint32_t>(p.v_rows.token));
  rows.out_step = renew(2 * static_cast<uint32_t>(p.out_rows.token));
  rows.out[0] = static_cast<char*>(p.out) + 2 * out;
  rows.out[1] = rows.out[0] + step_bytes(16, rows.out_step);
  rows.items = work.items;
  rows.tail = last_item_rows(work);
  rows.most = work.has_output ? kChunk : 0;
  return rows;
}

// Starts copying `valid` value rows, 16 bytes of two token rows a lane, from `values` on to a tile; the others become
// zero.
__device__ __forceinline__ void copy_values(const char* values, uint32_t step, int valid, uint32_t tile, int lane) {
  const uint32_t target = tile + tile_offset(lane >> 1, lane & 1);
  const bool first = (lane >> 1) < valid, second = (lane >> 1) + 16 < valid;
  ptx::copy_async_16(target, first ? values : nullptr, first ? 16 : 0);
  ptx::copy_async_16(target + 512, second ? values + step_bytes(16, step) : nullptr, second ? 16 : 0);
}

// Fragment address of this lane for the transposed 8x8 loads and stores of token rows 16j..16j+15.
__device__ __forceinline__ uint32_t fragment_address(uint32_t tile, int j, const ConsumerLane& me) {
  const int matrix = me.lane >> 3;
  return tile + tile_offset(16 * j + 8 * (matrix >> 1) + (me.lane & 7), matrix & 1);
}

// Output rows through the list of R-41; not inlined, rare.
__device__ __noinline__ inline void store_listed_rows(const Params& p, const Work& work, int64_t first, int limit,
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
  const float factor[2] = {scales.inverse(0) * p.scale, scales.inverse(1) * p.scale};
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
__device__ __forceinline__ StagedOutput load_output(uint32_t tile, int lane) {
  const uint32_t source = tile + tile_offset(lane >> 1, lane & 1);
  return {ptx::load_shared_u4(source), ptx::load_shared_u4(source + 512)};
}

// The staged outputs of item `index`, tokens below `limit`, to memory: this lane's two pieces.
__device__ __forceinline__ void store_output(const StagedOutput& staged, const Params& p, const Work& work,
                                             char* first, char* second, int index, int limit, uint32_t tile, int row,
                                             int lane) {
  if (__builtin_expect(p.out_row_of.data == nullptr, 1)) {
    if ((lane >> 1) < limit) *reinterpret_cast<uint4*>(first) = staged.x;
    if ((lane >> 1) + 16 < limit) *reinterpret_cast<uint4*>(second) = staged.y;
  } else {
    store_listed_rows(p, work, static_cast<int64_t>(index) * kChunk, limit, tile, row, lane);
  }
}

__device__ inline void clear_output(const Params& p, const Work& work, int row, const ConsumerLane& me) {
  for (int64_t token = me.lane >> 1; token < work.span.length; token += 16) {
    const int64_t target = output_row(p, work.span.begin + token);
    const int64_t at = work.span.batch * p.out_rows.batch + target * p.out_rows.token + work.head * p.out_rows.head;
    if (target >= 0)
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + at + row + 8 * (me.lane & 1)) = uint4{};
  }
}

}  // namespace kda::cuda::prefill_fused

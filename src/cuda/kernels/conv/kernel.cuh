// y_t = io(silu(sum_{j<W} w_j x_{t-W+1+j})) over rows of any length, windows before and after (spec W-1, W-2, K-2).
//
// Grid       x = groups of a warp's channels, four a block; y, z = tiles of at most `tile_rows` rows of a sequence;
//            as many as T and N allow for. A warp finds its tile by a scan over the lengths and takes further ones if
//            the grid is short (offsets that overlap, P-13). No warp waits for another.
// Warp       lanes own 4 channels of a row and go down the rows with the last W-1 in registers, eight rows ahead on
//            their way. A tile begins with the W-1 rows before it.
// Windows    the warp of a sequence's first tile alone reads its old window and writes the new one and the
//            checkpoints: channels are independent, so nothing else touches them (W-5). It does so before it goes
//            down the rows where it can, and never element by element: it would end last.
// Precision  fp32 sums and SiLU, one rounding. Windows are copied as bits.
// Limits     vectors: W = 4, rows of whole, aligned groups of four; scalars: W <= 8, any alignment.
#pragma once

#include <type_traits>

#include "cuda/kernels/conv/stream.cuh"

namespace kda::cuda {

template <class Io_, bool kVectors_>
struct ConvConfig {
  using Io = Io_;
  static constexpr bool kVectors = kVectors_;
  static constexpr int kChannels = kVectors ? 4 : 1;  // of a lane
  static constexpr int kWidth = kVectors ? 4 : kMostConvWidth;
  static constexpr int kRows = kVectors && sizeof(Io) == 2 ? 8 : 4;    // on their way
  static constexpr int kBlocks = kVectors && sizeof(Io) == 2 ? 5 : 4;  // of one multiprocessor, at least
  using Vector = std::conditional_t<sizeof(Io) == 4, uint4, uint2>;
};

// A lane's channels of one row.
template <class C>
struct ConvVector {
  using Io = typename C::Io;
  Io element[C::kChannels];
  __device__ __forceinline__ void load(const Io* p) {
    if constexpr (C::kVectors) {
      const auto bits = *reinterpret_cast<const typename C::Vector*>(p);
      memcpy(element, &bits, sizeof(bits));
    } else {
      element[0] = *p;
    }
  }
  __device__ __forceinline__ void store(Io* p) const {
    if constexpr (C::kVectors) {
      typename C::Vector bits;
      memcpy(&bits, element, sizeof(bits));
      *reinterpret_cast<typename C::Vector*>(p) = bits;
    } else {
      *p = element[0];
    }
  }
};

struct ConvTile {
  int64_t n = -1, index = 0;  // n -1: behind the last
};

// Tile number -> (sequence, tile of it), by a warp, a sequence a lane. A sequence of no rows has one tile: its window
// is stored.
__device__ __forceinline__ ConvTile find_tile(const ConvParams& p, int64_t tile) {
  const int64_t active = active_sequences(p.sequences);
  const int lane = static_cast<int>(threadIdx.x % 32);
  ConvTile found;
  if (p.sequences.count == 1) return {active - 1, tile};  // the grid has all of its tiles, and some may be empty
#pragma unroll 1
  for (int64_t base = 0; base < active; base += 32) {
    const int64_t n = base + lane;
    int64_t tiles = 0;
    if (n < active) {
      const int64_t length = sequence_span(p.sequences, n).length;
      tiles = length > p.tile_rows ? (length + p.tile_rows - 1) / p.tile_rows : 1;
    }
    int64_t scan = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t left = __shfl_up_sync(kFullMask, scan, step);
      if (lane >= step) scan += left;
    }
    const int64_t total = __shfl_sync(kFullMask, scan, 31), before = scan - tiles;
    if (tile >= total) {
      tile -= total;
      continue;
    }
    const int owner = __ffs(static_cast<int>(__ballot_sync(kFullMask, tile >= before && tile < scan))) - 1;
    found.n = base + owner;
    found.index = tile - __shfl_sync(kFullMask, before, owner);
    break;
  }
  return found;
}

__device__ __forceinline__ int64_t conv_out_row(const ConvParams& p, int64_t row) {
  if (!p.out_rows.present()) return row;
  const int64_t to = p.out_rows.at(row);
  return to >= 0 && to < p.out_count ? to : -1;
}

// One warp's channels of one tile.
template <class C>
struct ConvWarp {
  using Io = typename C::Io;
  static constexpr int kChannels = C::kChannels, kWidth = C::kWidth, kRows = C::kRows;
  const ConvParams& p;
  const ConvPart& part;
  const ConvRow& row;
  int32_t channel;     // the lane's first
  int64_t begin, end;  // rows of the sequence

  __device__ __forceinline__ const Io* input(int64_t t) const {
    return static_cast<const Io*>(part.in.x) + row.span.batch * part.in.x_batch +
           (row.span.begin + t) * part.in.x_row + channel;
  }
  __device__ __forceinline__ Io* output(int64_t t) const {
    const int64_t to = conv_out_row(p, row.span.begin + t);
    return to < 0 ? nullptr
                  : static_cast<Io*>(part.out) + row.span.batch * part.out_batch + to * part.out_row + channel;
  }

  __device__ __forceinline__ void zero() const {
    ConvVector<C> nothing;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) from_fp32(0.0f, nothing.element[c]);
    for (int64_t t = begin; t < end; ++t) {
      if (Io* to = output(t)) nothing.store(to);
    }
  }

  __device__ __forceinline__ void load_taps(float (&w)[kChannels][kWidth], int32_t width) const {
    const float* taps = part.in.weight + static_cast<int64_t>(channel) * width;
    if (C::kVectors && p.taps_aligned) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const float4 x = __ldg(reinterpret_cast<const float4*>(taps) + c);
        w[c][0] = x.x, w[c][1 % kWidth] = x.y, w[c][2 % kWidth] = x.z, w[c][3 % kWidth] = x.w;
      }
      return;
    }
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) w[c][j] = j < width ? taps[c * width + j] : 0.0f;
    }
  }

  // past[i] = stream[begin + i] where some of it is the window's.
  __device__ __forceinline__ void load_past(float (&past)[kWidth - 1][kChannels], int32_t width) const {
    if (C::kVectors && begin == 0 && (row.fresh || part.in.window.dtype == p.io)) {
      Io old[kWidth - 1][kChannels];
      const WindowRef& window = part.in.window;
      const Io* from = static_cast<const Io*>(window.data) + window_offset(window, row.read_slot, channel, 0);
#pragma unroll
      for (int i = 0; i < kWidth - 1; ++i, from += window.column_stride) {
        const Io* element = from;
#pragma unroll
        for (int c = 0; c < kChannels; ++c, element += window.channel_stride)
          if (row.fresh) from_fp32(0.0f, old[i][c]);
          else old[i][c] = *element;
      }
#pragma unroll
      for (int i = 0; i < kWidth - 1; ++i) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) past[i][c] = to_fp32(old[i][c]);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kWidth - 1; ++i) {
      if (i >= width - 1) break;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const StreamElement e = stream_at(part.in, row, p.rule, p.io, width, channel + c, begin + i);
        past[i][c] = element_value(e.bits, e.dtype);
      }
    }
  }

  // What a lane holds on its way down the rows.
  struct Walk {
    ConvVector<C> ring[kRows];  // the next rows: each is asked for as soon as its place is free
    float w[kChannels][kWidth], past[kWidth - 1][kChannels];
    const Io* ahead;
    Io* to;
    int32_t left;
  };

  // `window_first`: the sequence's new window is stored before its rows are convolved. A tile that saw to it at its
  // end would end last.
  __device__ __forceinline__ void run(bool window_first) const {
    const int32_t width = C::kVectors ? kWidth : p.width;
    Walk walk;
    walk.left = static_cast<int32_t>(end - begin);
    walk.ahead = input(begin);
    const bool inside = C::kVectors && begin >= kWidth - 1;
    ConvVector<C> before[kWidth - 1];
    if (inside) {
#pragma unroll
      for (int i = 0; i < kWidth - 1; ++i) before[i].load(input(begin - (kWidth - 1) + i));
    } else {
      load_past(walk.past, width);
      if (window_first) store_last_rows();
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r, walk.ahead += part.in.x_row) {
      if (r < walk.left) walk.ring[r].load(walk.ahead);
    }
    load_taps(walk.w, width);
    if (inside) {
#pragma unroll
      for (int i = 0; i < kWidth - 1; ++i) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) walk.past[i][c] = to_fp32(before[i].element[c % kChannels]);
      }
    }
    const bool in_order = !p.out_rows.present();
    const bool usual = C::kVectors && in_order && part.in.bias == nullptr && p.activation != 0;
    walk.to = in_order ? output(begin) : nullptr;
#pragma unroll 1
    for (int64_t t = begin; walk.left > 0; t += kRows, walk.left -= kRows) {
      if (usual && walk.left >= kRows) pass<true>(walk, t, width);
      else pass<false>(walk, t, width);
    }
  }

  // The ring's rows. kUsual: all of them exist, go out in order, without bias, through SiLU; what is asked of each
  // row otherwise costs as many instructions as the row.
  template <bool kUsual>
  __device__ __forceinline__ void pass(Walk& walk, int64_t t, int32_t width) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r, walk.ahead += part.in.x_row) {
      if (!kUsual && r >= walk.left) break;
      ConvVector<C> y = walk.ring[r];
      if (r + kRows < walk.left) walk.ring[r].load(walk.ahead);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        from_fp32(advance<kUsual>(walk.w[c], walk.past, c, to_fp32(y.element[c]), width), y.element[c]);
      }
      if (!kUsual && p.out_rows.present()) walk.to = output(t + r);
      if (kUsual || walk.to != nullptr) y.store(walk.to);
      walk.to += part.out_row;
    }
  }

  // One output of channel c; the past moves on by x.
  template <bool kUsual>
  __device__ __forceinline__ float advance(const float (&w)[kWidth], float (&past)[kWidth - 1][kChannels], int c,
                                           float x, int32_t width) const {
    float sum = __fmul_rn(w[0], past[0][c]);
    if constexpr (C::kVectors) {
#pragma unroll
      for (int j = 1; j < kWidth - 1; ++j) sum = __fmaf_rn(w[j], past[j][c], sum);
      sum = __fmaf_rn(w[kWidth - 1], x, sum);
    } else {
#pragma unroll
      for (int j = 1; j < kWidth; ++j) {
        if (j < width - 1) sum = __fmaf_rn(w[j], past[j][c], sum);
        if (j == width - 1) sum = __fmaf_rn(w[j], x, sum);
      }
    }
    if (!kUsual && part.in.bias != nullptr) sum = __fadd_rn(sum, __ldg(part.in.bias + channel + c));
#pragma unroll
    for (int j = 0; j + 1 < kWidth - 1; ++j) {
      if (C::kVectors || j + 1 < width - 1) past[j][c] = past[j + 1][c];
    }
    if constexpr (C::kVectors) {
      past[kWidth - 2][c] = x;
    } else {
#pragma unroll
      for (int j = 0; j < kWidth - 1; ++j) {
        if (j == width - 2) past[j][c] = x;
      }
    }
    return kUsual || p.activation ? silu(sum) : sum;
  }

  __device__ __forceinline__ void store_checkpoints(int64_t n) const {
    for (int c = 0; c < kChannels; ++c) {
      for (int k = 0; k < p.checkpoints; ++k) {
        const int64_t offset = p.checkpoint_offsets.at(n, k), slot = p.checkpoint_slots.at(n, k);
        if (offset <= 0 || offset > row.span.length) continue;
        if (!slot_is_live(slot, p.rule.slots.count, p.rule.slots.null_slot)) continue;
        copy_stream(part.in, row, p.rule, p.io, p.width, channel + c, offset, slot, 0, p.width - 1);
      }
    }
  }

  // The new window is the row's last W-1 inputs, in vectors.
  __device__ __forceinline__ bool ends_in_rows() const {
    return C::kVectors && p.has_pool && part.in.window.dtype == p.io && row.span.length >= kWidth - 1;
  }
  __device__ __forceinline__ void store_last_rows() const {
    if (row.write_slot < 0) return;
    ConvVector<C> rows[kWidth - 1];
#pragma unroll
    for (int i = 0; i < kWidth - 1; ++i) rows[i].load(input(row.span.length - (kWidth - 1) + i));
    auto* to = static_cast<Io*>(part.in.window.data) + window_offset(part.in.window, row.write_slot, channel, 0);
#pragma unroll
    for (int i = 0; i < kWidth - 1; ++i) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
        to[c * part.in.window.channel_stride + i * part.in.window.column_stride] = rows[i].element[c];
    }
  }

  __device__ __forceinline__ void store_new_window() const {
    if (!p.has_pool) return;
    for (int c = 0; c < kChannels; ++c) store_window(part.in, row, p.rule, p.io, p.width, channel + c);
  }
};

// One tile by one lane. The first of a sequence sees to the window and the checkpoints, which may hold entries of the
// old one.
template <class C>
__device__ __forceinline__ void convolve_tile(const ConvParams& p, const ConvPart& part, const ConvTile& tile,
                                              int32_t channel) {
  const auto row_of_tile = [&] { return conv_row(p.rule, p.records, p.has_pool != 0, p.sequences, tile.n); };
  const bool first = tile.index == 0;
  bool window_first;
  {
    const ConvRow row = row_of_tile();
    const int64_t begin = tile.index * p.tile_rows;
    const ConvWarp<C> work{p, part, row, channel, begin, min(row.span.length, begin + p.tile_rows)};
    if (!row.active) return work.zero();
    window_first = first && p.checkpoints == 0 && work.ends_in_rows();
    if (begin < work.end) work.run(window_first);
  }
  if (!first || window_first) return;
  const ConvRow row = row_of_tile();  // again: nothing of it takes a register on the way down the rows
  const ConvWarp<C> work{p, part, row, channel, 0, 0};
  work.store_checkpoints(tile.n);
  work.store_new_window();
}

template <class C>
__global__ void __launch_bounds__(128, C::kBlocks) conv_prefill_kernel(const __grid_constant__ ConvParams p) {
  touch_parameters(p);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  int32_t group = static_cast<int32_t>(blockIdx.x) * 4 + warp;
  const bool mine = group < p.groups;
  int part = 0;
  while (part + 1 < p.parts && group >= p.part[part].groups) group -= p.part[part++].groups;
  const ConvPart& where = p.part[part];
  const int32_t channel = (group * 32 + lane) * C::kChannels;
  wait_for_previous_grid();
  const int64_t tiles = static_cast<int64_t>(gridDim.y) * gridDim.z;
  for (int64_t t = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;; t += tiles) {
    const ConvTile tile = find_tile(p, t);
    if (tile.n < 0) return;
    if (mine && channel < where.channels) convolve_tile<C>(p, where, tile, channel);
    if (p.sequences.count == 1) return;  // the grid has all of its tiles
  }
}

}  // namespace kda::cuda

// Classes (M-4, M-7), order (M-8), slots (M-9) and every table of M-10 in one launch, chunk tables included.
//
// Grid       up to 128 blocks, each with a contiguous share of the rows and of every table's padding. Blocks exchange
//            nothing: each sums up the whole step once, so it knows the groups' sizes and what lies before its share.
//            9 or 13 bytes a row, in the L2: cheaper than one round of waiting between blocks. Where a block has a
//            thread for every row of the step, each places all rows, and the lists are shared out by position (a
//            prompt of 4,096 tokens is one row).
// Latency    is the time: a thread's own row and slot are loaded along with the rows that it adds up, and rows are
//            loaded before the device's count of active ones is known.
// Groups     a step has two kinds of rows: recurrent ones (the spec group, or decodes if width = 1) and the rest
//            (prefills; under by_drafts all decodes if no row of the rest says otherwise, M-7). A sum of both kinds
//            is all that pass 1 needs (sums.cuh).
// Pass 2     a thread a row: its place follows from running sums over the block's tile. Warps without rows write the
//            padding meanwhile, a table a warp. What token and chunk lists have behind a row's first entry is then
//            written by position, each thread searching the owner of its own, so that one long row keeps all threads
//            busy.
// Lengths    as in chunks.cuh: cut only where bad offsets add up to more than T tokens (M-19); out of line.
// Code size  is time here: a build runs every instruction about once, so loops are kept rolled.
// Limits     N < 2^31 - 1, T < 2^31 (host-checked); sums of lengths that may exceed that in 64 bits.
#pragma once

#include "cuda/kernels/metadata/sums.cuh"

namespace kda::cuda {

// The length of this thread's row in a tile of the share; `before` moves on to the next tile.
__device__ __noinline__ int32_t cut_in_tile(int32_t length, uint64_t& before, int32_t tokens, MetadataShared& s) {
  const uint64_t x[1] = {static_cast<uint64_t>(length)};
  uint64_t ahead[1], sum[1];
  block_running_sums(x, ahead, sum, s.scan);
  const auto cut = static_cast<int32_t>(cut_length(length, static_cast<int64_t>(before + ahead[0]), tokens));
  before += sum[0];
  return cut;
}

// Where the two kinds of rows go.
struct Layout {
  int32_t recurrent_group, rest_group;
  uint32_t rest_row = 0, rest_token = 0;  // start of the rest in the non-spec lists

  __device__ __forceinline__ Layout(const MetadataParams& p, const MetadataShared& s) {
    recurrent_group = p.by_drafts || p.width > 1 ? kSpecGroup : kDecodeGroup;
    rest_group = p.by_drafts && s.unplain == 0 ? kDecodeGroup : kPrefillGroup;
    if (recurrent_group == kDecodeGroup) rest_row = s.all[kRecurrent], rest_token = s.all[kRecurrentTokens];
  }
};

// Thread g of the first warp gives the sizes of group g, thread kGroups the others.
__device__ __forceinline__ void publish_sizes(const MetadataParams& p, const Layout& l, Me me, MetadataShared& s) {
  const int32_t g = me.thread;
  if (g < kGroups) {
    const int32_t kind = g == l.recurrent_group ? kRecurrent : g == l.rest_group ? kRest : -1;
    s.size[2 * g] = kind < 0 ? 0 : s.all[kind];
    s.size[2 * g + 1] = kind < 0 ? 0 : s.all[kind + 1];
  }
  if (g == kGroups) {
    s.size[kNonSpecRows] = s.all[kRest] + l.rest_row;
    s.size[kNonSpecTokens] = s.all[kRestTokens] + l.rest_token;
    s.size[kChunks] = l.rest_group == kPrefillGroup ? s.all[kRestChunks] : 0;
    s.size[kStepRows] = static_cast<uint32_t>(p.n);
  }
}

// Slot tables are int32: an index that does not fit is dead in every pool, and so is -1 (P-5).
__device__ __forceinline__ int32_t narrow_slot(int64_t slot) {
  return slot < INT32_MIN || slot > INT32_MAX ? -1 : static_cast<int32_t>(slot);
}

template <class Offset>
__device__ __forceinline__ void set(void* table, int64_t i, int64_t value) {
  static_cast<Offset*>(table)[i] = static_cast<Offset>(value);
}

// The tables of one row: number `at` of its group, with `tokens` tokens of the group before it.
template <class Offset>
__device__ __forceinline__ void write_row(const MetadataParams& p, const Layout& layout, int32_t i, const Row& row,
                                          int64_t slot, int32_t group, uint32_t at, uint32_t tokens,
                                          uint32_t chunks) {
  const GroupRef& g = p.groups[group];
  if (g.slots) {
    g.slots[int64_t{at} * g.columns] = narrow_slot(slot);
#pragma unroll 1
    for (int32_t c = 1; c < g.columns; ++c) {
      g.slots[int64_t{at} * g.columns + c] = narrow_slot(p.slots.at(i, c));
    }
  }
  const int64_t end = int64_t{tokens} + row.length;
  if (g.rows) g.rows[at] = i;
  if (g.begin) set<Offset>(g.begin, at, row.begin);
  if (g.length) set<Offset>(g.length, at, row.length);
  if (g.offsets) set<Offset>(g.offsets, int64_t{at} + 1, end);
  if (group != kSpecGroup && p.non_spec_offsets) {
    const bool rest = row.kind == kRestRow;
    set<Offset>(p.non_spec_offsets, int64_t{at} + (rest ? layout.rest_row : 0) + 1,
                end + (rest ? layout.rest_token : 0));
  }
  if (group == kPrefillGroup) {
    if (p.has_initial) p.has_initial[at] = row.state;
    if (p.chunks.offsets) p.chunks.offsets[at] = chunks;
  }
  if (group == kSpecGroup && p.accepted_out) {
    p.accepted_out[at] = p.accepted.data ? p.accepted.data[i * p.accepted.stride] : 1;
  }
}

// Entries of the lists but each row's first.
__device__ __forceinline__ uint32_t later_tokens(const OwnSums& sums) {
  return sums.x[kRecurrentTokens] + sums.x[kRestTokens] - sums.x[kRecurrent] - sums.x[kRest];
}
__device__ __forceinline__ uint32_t later_chunks(const OwnSums& sums, bool chunked) {
  return chunked ? sums.x[kRestChunks] - sums.x[kRest] : 0;
}

// A row's first entries of the lists; most rows have no other.
template <class Offset>
__device__ __forceinline__ void write_first(const MetadataParams& p, const Row& row, bool spec, int32_t token_at,
                                            uint32_t place, uint32_t chunk_at, uint32_t chunks) {
  int32_t* list = spec ? p.spec_tokens : p.non_spec_tokens;
  if (list) list[token_at] = row.begin;
  if (chunks == 0 || !p.chunks.indices || int64_t{chunk_at} >= p.chunks.rows) return;
  set<Offset>(p.chunks.indices, 2 * int64_t{chunk_at}, place);
  set<Offset>(p.chunks.indices, 2 * int64_t{chunk_at} + 1, 0);
}

// The other entries of a tile by position: those from `first` on, `step` apart, are this thread's.
template <class Offset>
__device__ __forceinline__ void write_lists(const MetadataParams& p, const MetadataShared& s, int32_t rows,
                                            uint32_t tokens, uint32_t chunks, uint32_t first, uint32_t step) {
  if (p.non_spec_tokens || p.spec_tokens) {
#pragma unroll 1
    for (uint32_t t = first; t < tokens; t += step) {
      const int32_t r = owner_of(s.token_prefix, rows, t);
      const auto within = static_cast<int32_t>(t - s.token_prefix[r]) + 1;
      const int32_t at = s.token_at[r];
      int32_t* list = at < 0 ? p.spec_tokens : p.non_spec_tokens;
      if (list) list[(at < 0 ? ~at : at) + within] = s.begin[r] + within;
    }
  }
  if (p.chunks.indices) {
#pragma unroll 1
    for (uint32_t c = first; c < chunks; c += step) {
      const int32_t r = owner_of(s.chunk_prefix, rows, c);
      const uint32_t within = c - s.chunk_prefix[r] + 1;
      const int64_t row = int64_t{s.chunk_at[r]} + within;
      if (row >= p.chunks.rows) continue;
      set<Offset>(p.chunks.indices, 2 * row, s.ordinal[r]);
      set<Offset>(p.chunks.indices, 2 * row + 1, within);
    }
  }
}

// This block's part of everything behind the last entry of each table: a table a warp, the last warps first.
__device__ __forceinline__ void write_padding(const MetadataParams& p, Me me, const MetadataShared& s) {
#pragma unroll 1
  for (int32_t t = kMetadataWarps - 1 - me.warp; t < p.pads; t += kMetadataWarps) {
    const PadRef& pad = p.pad[t];
    const int64_t value = pad.value < 0 ? pad.constant : int64_t{s.size[pad.value]};
    const int64_t start = int64_t{s.size[pad.start]} * pad.scale + pad.skip;
#pragma unroll 1
    for (int64_t i = start + int64_t{blockIdx.x} * 32 + me.lane; i < pad.entries; i += int64_t{gridDim.x} * 32) {
      if (pad.bytes == 4) static_cast<int32_t*>(pad.data)[i] = static_cast<int32_t>(value);
      else if (pad.bytes == 8) static_cast<int64_t*>(pad.data)[i] = value;
      else static_cast<uint8_t*>(pad.data)[i] = static_cast<uint8_t>(value);
    }
  }
}

// Single entries: the counts, and the zero that every offset list starts with.
template <class Offset>
__device__ __forceinline__ void write_heads(const MetadataParams& p, Me me, const MetadataShared& s) {
  if (blockIdx.x != 0) return;
  if (p.counts && me.thread < 8) {
    // Decode and prefill change places; chunks come last.
    const int32_t t = me.thread;
    const uint32_t all = s.size[kNonSpecTokens] + s.size[kSpecTokens];
    p.counts[t] = static_cast<int32_t>(t == 6 ? all : s.size[t < 4 ? t ^ 2 : t == 7 ? kChunks : t]);
  }
  if (me.thread != 32) return;
  if (p.groups[kPrefillGroup].offsets) set<Offset>(p.groups[kPrefillGroup].offsets, 0, 0);
  if (p.groups[kSpecGroup].offsets) set<Offset>(p.groups[kSpecGroup].offsets, 0, 0);
  if (p.non_spec_offsets) set<Offset>(p.non_spec_offsets, 0, 0);
}

// Running sums of this thread's row within its warp; the warp's totals go to `totals`.
__device__ __forceinline__ void warp_place(const Row& row, uint32_t chunks, Me me, OwnSums& before,
                                           uint32_t (&totals)[kRowSums]) {
  const auto length = static_cast<uint32_t>(row.length);
  const bool recurrent = row.kind == kRecurrentRow, rest = row.kind == kRestRow;
  const unsigned recurrents = __ballot_sync(kFullMask, recurrent), rests = __ballot_sync(kFullMask, rest);
  const unsigned ahead = (1u << me.lane) - 1;
  const uint32_t a = recurrent ? length : 0, b = rest ? length : 0;
  const uint32_t sum_a = warp_running_sum(a, me.lane), sum_b = warp_running_sum(b, me.lane),
                 sum_c = warp_running_sum(chunks, me.lane);
  before.x[kRecurrent] = __popc(recurrents & ahead);
  before.x[kRecurrentTokens] = sum_a - a;
  before.x[kRest] = __popc(rests & ahead);
  before.x[kRestTokens] = sum_b - b;
  before.x[kRestChunks] = sum_c - chunks;
  if (me.lane != 31) return;
  totals[kRecurrent] = __popc(recurrents);
  totals[kRecurrentTokens] = sum_a;
  totals[kRest] = __popc(rests);
  totals[kRestTokens] = sum_b;
  totals[kRestChunks] = sum_c;
}

// Pass 2. `own`: this thread's row of the first tile.
template <class Offset>
__device__ __forceinline__ void write_share(const MetadataParams& p, Shares shares, OwnRow<Offset> own,
                                            int32_t active, bool cut, Me me, const Layout& layout,
                                            MetadataShared& s) {
  const RowShare share = shares.placed;
  OwnSums at;  // before this tile
#pragma unroll
  for (int i = 0; i < kRowSums; ++i) at.x[i] = s.before[i];
  uint64_t lengths_before = s.lengths_before;
  bool padded = false;
  int64_t tile = share.first;
#pragma unroll 1
  do {  // once even without rows: for the padding
    const auto rows = static_cast<int32_t>(min(int64_t{share.last} - tile, int64_t{kMetadataThreads}));
    const int64_t i = tile + me.thread;
    const bool exists = me.thread < rows;
    const bool busy = me.warp * 32 < rows;  // this warp has a row
    const bool chunked = layout.rest_group == kPrefillGroup;
    Row row;
    uint32_t own_chunks = 0;
    OwnSums before;
    if (tile != share.first) own = OwnRow<Offset>(p, i, share.last);
    if (i >= active) own.raw = {};  // not looked at (P-7)
    if (busy || cut) {
      int32_t length = raw_length(p, own.raw);
      if (cut) length = cut_in_tile(length, lengths_before, p.tokens, s);
      row = classify(p, own.raw, length);
    }
    if (busy) {
      if (chunked && row.kind == kRestRow) own_chunks = chunk_count(static_cast<uint32_t>(row.length), p.divisor);
      warp_place(row, own_chunks, me, before, s.warp_sums[me.warp]);
    }
    __syncthreads();
    OwnSums all;
#pragma unroll 1
    for (int w = 0; w * 32 < rows; ++w) {
#pragma unroll
      for (int k = 0; k < kRowSums; ++k) {
        all.x[k] += s.warp_sums[w][k];
        if (w < me.warp) before.x[k] += s.warp_sums[w][k];
      }
    }
    if (busy) {
      const bool recurrent = row.kind == kRecurrentRow;
      const int32_t group = recurrent ? layout.recurrent_group : layout.rest_group;
      const uint32_t place = recurrent ? at.x[kRecurrent] + before.x[kRecurrent] : at.x[kRest] + before.x[kRest];
      const uint32_t tokens =
          recurrent ? at.x[kRecurrentTokens] + before.x[kRecurrentTokens] : at.x[kRestTokens] + before.x[kRestTokens];
      const uint32_t chunks = at.x[kRestChunks] + before.x[kRestChunks];
      const bool mine = exists && i >= shares.written.first && i < shares.written.last;
      const auto token_at = static_cast<int32_t>(tokens + (recurrent ? 0 : layout.rest_token));
      if (mine && row.kind != kEmptyRow) {
        write_row<Offset>(p, layout, static_cast<int32_t>(i), row, own.slot, group, place, tokens, chunks);
        write_first<Offset>(p, row, group == kSpecGroup, token_at, place, chunks, own_chunks);
      }
      if (mine && p.spec_mask) p.spec_mask[i] = row.kind != kEmptyRow && group == kSpecGroup;
      s.token_prefix[me.thread] = later_tokens(before);
      s.chunk_prefix[me.thread] = later_chunks(before, chunked);
      s.begin[me.thread] = row.begin;
      s.token_at[me.thread] = group == kSpecGroup ? ~token_at : token_at;
      s.chunk_at[me.thread] = static_cast<int32_t>(chunks);
      s.ordinal[me.thread] = static_cast<int32_t>(place);
    }
    if (!padded) write_padding(p, me, s);
    padded = true;
    __syncthreads();
    const uint32_t first = shares.together ? blockIdx.x * kMetadataThreads : 0;
    const uint32_t step = shares.together ? gridDim.x * kMetadataThreads : kMetadataThreads;
    write_lists<Offset>(p, s, rows, later_tokens(all), later_chunks(all, chunked), first + me.thread, step);
#pragma unroll
    for (int k = 0; k < kRowSums; ++k) at.x[k] += all.x[k];
    tile += kMetadataThreads;
    if (tile < share.last) __syncthreads();
  } while (tile < share.last);
}

template <class Offset>
__global__ void __launch_bounds__(kMetadataThreads) build_metadata_kernel(const __grid_constant__ MetadataParams p) {
  __shared__ MetadataShared s;
  touch_parameters(p);
  const Me me;
  clear_sums(me, s);
  __syncthreads();
  wait_for_previous_grid();
  int32_t active = p.active;
  if (p.num_active) active = min(max(*p.num_active, 0), p.n);
  const Shares shares(p);
  const OwnRow<Offset> own(p, shares.placed.first + me.thread, shares.placed.last);
  sum_up<Offset>(p, shares.placed, active, me, s);
  const bool cut = all_lengths(s) > static_cast<uint64_t>(p.tokens);
  if (cut) sum_up_cut<Offset>(p, shares.placed, active, me, s);
  const Layout layout(p, s);
  publish_sizes(p, layout, me, s);
  __syncthreads();
  write_heads<Offset>(p, me, s);
  write_share<Offset>(p, shares, own, active, cut, me, layout, s);
}

}  // namespace kda::cuda

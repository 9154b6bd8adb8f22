// Classes (M-4, M-7), order (M-8), slots (M-9) and every table of M-10 in one launch, chunk tables included.
//
// Grid       a few blocks, each with a contiguous share of the rows and of every table's padding. Blocks exchange
//            nothing: each sums up the whole step once, so it knows the groups' sizes and what lies before its share.
//            13 bytes a row, in the L2: cheaper than one round of waiting between blocks. Where a block has a thread
//            for every row of the step, each places all rows, and the lists are shared out by position (a prompt of
//            4,096 tokens is one row).
// Latency    is the time: a thread's own row and slot are loaded along with the rows that it adds up, and rows are
//            loaded before the device's count of active ones is known.
// Groups     a step has two kinds of rows: recurrent ones (the spec group, or decodes if width = 1) and the rest
//            (prefills; under by_drafts all decodes if no row of the rest says otherwise, M-7). A sum of both kinds
//            is all that pass 1 needs.
// Pass 2     a thread a row: its place follows from running sums over the block's tile. Warps without rows write the
//            padding meanwhile, a table a warp. Token and chunk lists are then written by position, each thread
//            searching the owner of its own, so that one long row keeps all threads busy.
// Lengths    as in chunks.cuh: cut only where bad offsets add up to more than T tokens (M-19); out of line.
// Code size  is time here: a build runs every instruction about once, so loops are kept rolled.
// Limits     N < 2^31 - 1, T < 2^31 (host-checked); sums of lengths that may exceed that in 64 bits.
#pragma once

#include "cuda/kernels/metadata/chunks.cuh"

namespace kda::cuda {

enum RowKind : int32_t { kEmptyRow = 0, kRecurrentRow = 1, kRestRow = 2 };

// A row's inputs as loaded: all loads are out before the first is looked at.
template <class Offset>
struct RawRow {
  Offset begin = 0, end = 0;
  int32_t state = 0;  // has one if positive
  int32_t drafts = -1;
  uint8_t prefilling = 0;
};

struct Row {
  int32_t begin = 0, length = 0;
  int32_t kind = kEmptyRow;
  bool state = false;
  bool plain = true;  // of the rest: could be a decode under by_drafts
};

template <class Offset>
__device__ __forceinline__ RawRow<Offset> load_row(const MetadataParams& p, int64_t i, int64_t rows) {
  RawRow<Offset> r;
  if (i >= rows) return r;
  const auto* cu = static_cast<const Offset*>(p.cu) + i * p.cu_stride;
  r.begin = cu[0];
  r.end = cu[p.cu_stride];
  r.state = p.computed.data ? p.computed.data[i * p.computed.stride] : p.has_state.data[i * p.has_state.stride];
  if (p.prefilling.data) r.prefilling = p.prefilling.data[i * p.prefilling.stride];
  if (p.by_drafts && p.drafts.data) r.drafts = p.drafts.data[i * p.drafts.stride];
  return r;
}

// The row that a thread writes, with its first slot.
template <class Offset>
struct OwnRow {
  RawRow<Offset> raw;
  int64_t slot = 0;
  __device__ __forceinline__ OwnRow(const MetadataParams& p, int64_t i, int64_t rows)
      : raw(load_row<Offset>(p, i, rows)) {
    if (i < rows && p.slots.data) slot = p.slots.at(i, 0);
  }
};

template <class Offset>
__device__ __forceinline__ int32_t clamped(Offset x, int32_t tokens) {
  return static_cast<int32_t>(min(max(x, Offset{0}), Offset{tokens}));
}

template <class Offset>
__device__ __forceinline__ int32_t raw_length(const MetadataParams& p, const RawRow<Offset>& r) {
  return max(clamped(r.end, p.tokens) - clamped(r.begin, p.tokens), 0);
}

template <class Offset>
__device__ __forceinline__ Row classify(const MetadataParams& p, const RawRow<Offset>& r, int32_t length) {
  Row row;
  row.begin = clamped(r.begin, p.tokens);
  row.length = length;
  row.state = r.state > 0;
  const bool recurrent = p.by_drafts ? r.drafts >= 0 : row.state && r.prefilling == 0;
  row.kind = length == 0 ? kEmptyRow : recurrent && length <= p.width ? kRecurrentRow : kRestRow;
  row.plain = length == 1 && row.state && r.prefilling == 0;
  return row;
}

// Sums over rows, as numbered below.
enum RowSum : int32_t { kRecurrent, kRecurrentTokens, kRest, kRestTokens, kRestChunks, kRowSums };

struct MetadataShared {
  uint32_t all[kRowSums], before[kRowSums];  // of all rows, of those before the share
  uint32_t unplain;                          // a row of the rest that is no decode
  uint64_t lengths, lengths_before;          // raw
  uint32_t size[kStepSizes];
  uint32_t warp_sums[kMetadataWarps][kRowSums];
  uint64_t scan[kMetadataWarps][1];
  uint32_t token_prefix[kMetadataThreads], chunk_prefix[kMetadataThreads];
  int32_t begin[kMetadataThreads];
  int32_t token_at[kMetadataThreads];  // place of the row's first token in its list; ~place: the spec list
  int32_t chunk_at[kMetadataThreads], ordinal[kMetadataThreads];
};

__device__ __forceinline__ uint32_t chunk_count(uint32_t length, const ChunkDivisor& d) {
  const auto high = static_cast<uint32_t>(uint64_t{2 * (length - 1)} * d.factor >> 32);
  return length != 0 ? (high >> d.shift) + 1 : 0;
}

// A thread's own sums.
struct OwnSums {
  uint32_t x[kRowSums] = {};
  __device__ __forceinline__ void add(const Row& r, const ChunkDivisor& divisor) {
    const auto length = static_cast<uint32_t>(r.length);
    const uint32_t recurrent = r.kind == kRecurrentRow, rest = r.kind == kRestRow;
    x[kRecurrent] += recurrent;
    x[kRecurrentTokens] += recurrent ? length : 0;
    x[kRest] += rest;
    x[kRestTokens] += rest ? length : 0;
    x[kRestChunks] += rest ? chunk_count(length, divisor) : 0;
  }
};

// Adds a warp's sums to the block's.
__device__ __forceinline__ void contribute(const OwnSums& all, const OwnSums& before, bool unplain, uint64_t lengths,
                                           MetadataShared& s) {
  constexpr int kLow = 27;  // bits: 32 of them add up below 2^32
  const uint64_t sum = warp_sum(static_cast<uint32_t>(lengths & ((1u << kLow) - 1))) +
                       (uint64_t{warp_sum(static_cast<uint32_t>(lengths >> kLow))} << kLow);
  const bool any = __any_sync(kFullMask, unplain);
  uint32_t mine = 0;  // one sum a lane, so that they are added at once
#pragma unroll
  for (int i = 0; i < kRowSums; ++i) {
    const uint32_t a = warp_sum(all.x[i]), b = warp_sum(before.x[i]);
    if (lane_id() == i) mine = a;
    if (lane_id() == kRowSums + i) mine = b;
  }
  if (lane_id() < kRowSums) atomicAdd(&s.all[lane_id()], mine);
  else if (lane_id() < 2 * kRowSums) atomicAdd(&s.before[lane_id() - kRowSums], mine);
  if (lane_id() != 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&s.lengths), sum);
  if (any) s.unplain = 1;
}

__device__ __forceinline__ void clear_sums(MetadataShared& s) {
  if (threadIdx.x < kRowSums) s.all[threadIdx.x] = s.before[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.unplain = 0, s.lengths = s.lengths_before = 0;
}

// Pass 1.
template <class Offset>
__device__ __forceinline__ void sum_up(const MetadataParams& p, const Share& share, int64_t active,
                                       MetadataShared& s) {
  constexpr int kBatch = 8;
  if (int64_t{warp_id()} * 32 < p.n) {
    OwnSums all, before;
    uint64_t lengths = 0;
    bool unplain = false;
#pragma unroll 1
    for (int64_t base = threadIdx.x; base < p.n; base += kBatch * kMetadataThreads) {
      RawRow<Offset> raw[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) raw[u] = load_row<Offset>(p, base + u * kMetadataThreads, p.n);
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (base + u * kMetadataThreads >= active) break;  // not looked at (P-7)
        const int32_t length = raw_length(p, raw[u]);
        const Row row = classify(p, raw[u], length);
        lengths += static_cast<uint64_t>(length);
        all.add(row, p.divisor);
        if (base + u * kMetadataThreads < share.first) before = all;  // a thread's rows ascend
        unplain = unplain || (row.kind == kRestRow && !row.plain);
      }
    }
    __syncwarp();
    contribute(all, before, unplain, lengths, s);
  }
  __syncthreads();
}

// Pass 1 once more, in order, where bad offsets add up to more than T tokens.
template <class Offset>
__device__ __noinline__ void sum_up_cut(const MetadataParams& p, Share share, int64_t active,
                                        MetadataShared& s) {
  __syncthreads();
  clear_sums(s);
  __syncthreads();
  OwnSums all, before;
  uint64_t running = 0;
  bool unplain = false;
#pragma unroll 1
  for (int64_t tile = 0; tile < active; tile += kMetadataThreads) {
    const int64_t i = tile + threadIdx.x;
    const RawRow<Offset> raw = load_row<Offset>(p, i, active);  // rows behind are not looked at (P-7)
    const int32_t length = raw_length(p, raw);
    const uint64_t x[1] = {static_cast<uint64_t>(length)};
    uint64_t ahead[1], sum[1];
    block_running_sums(x, ahead, sum, s.scan);
    const auto at = static_cast<int64_t>(running + ahead[0]);
    const Row row = classify(p, raw, static_cast<int32_t>(cut_length(length, at, p.tokens)));
    all.add(row, p.divisor);
    if (i < share.first) before = all;
    if (i == share.first) s.lengths_before = static_cast<uint64_t>(at);
    unplain = unplain || (row.kind == kRestRow && !row.plain);
    running += sum[0];
  }
  contribute(all, before, unplain, 0, s);
  __syncthreads();
}

// The length of this thread's row in a tile of the share; `before` moves on to the next tile.
__device__ __noinline__ int32_t cut_in_tile(int32_t length, uint64_t& before, int32_t tokens, MetadataShared& s) {
  const uint64_t x[1] = {static_cast<uint64_t>(length)};
  uint64_t ahead[1], sum[1];
  block_running_sums(x, ahead, sum, s.scan);
  const auto cut = static_cast<int32_t>(cut_length(length, static_cast<int64_t>(before + ahead[0]), tokens));
  before += sum[0];
  return cut;
}

// The rows whose places a block finds, and those whose tables it writes.
struct Shares {
  bool together;  // every block places all rows
  Share written, placed;
  __device__ __forceinline__ explicit Shares(int64_t n) : together(n <= kMetadataThreads), written(n), placed(written) {
    if (together) placed.first = 0, placed.last = n;
  }
};

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
__device__ __forceinline__ void publish_sizes(const MetadataParams& p, const Layout& l, MetadataShared& s) {
  const auto g = static_cast<int32_t>(threadIdx.x);
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

// The lists of a tile by position: entries from `first` on, `step` apart, are this thread's.
template <class Offset>
__device__ __forceinline__ void write_lists(const MetadataParams& p, const MetadataShared& s, int32_t rows,
                                            uint32_t tokens, uint32_t chunks, uint32_t first, uint32_t step) {
  if (p.non_spec_tokens || p.spec_tokens) {
#pragma unroll 1
    for (uint32_t t = first; t < tokens; t += step) {
      const int32_t r = owner_of(s.token_prefix, rows, t);
      const auto within = static_cast<int32_t>(t - s.token_prefix[r]);
      const int32_t at = s.token_at[r];
      int32_t* list = at < 0 ? p.spec_tokens : p.non_spec_tokens;
      if (list) list[(at < 0 ? ~at : at) + within] = s.begin[r] + within;
    }
  }
  if (p.chunks.indices) {
#pragma unroll 1
    for (uint32_t c = first; c < chunks; c += step) {
      const int32_t r = owner_of(s.chunk_prefix, rows, c);
      const uint32_t within = c - s.chunk_prefix[r];
      const int64_t row = int64_t{s.chunk_at[r]} + within;
      if (row >= p.chunks.rows) continue;
      set<Offset>(p.chunks.indices, 2 * row, s.ordinal[r]);
      set<Offset>(p.chunks.indices, 2 * row + 1, within);
    }
  }
}

// This block's part of everything behind the last entry of each table: a table a warp, the last warps first.
__device__ __forceinline__ void write_padding(const MetadataParams& p, const MetadataShared& s) {
#pragma unroll 1
  for (int32_t t = kMetadataWarps - 1 - warp_id(); t < p.pads; t += kMetadataWarps) {
    const PadRef& pad = p.pad[t];
    const int64_t value = pad.value < 0 ? pad.constant : int64_t{s.size[pad.value]};
    const int64_t start = int64_t{s.size[pad.start]} * pad.scale + pad.skip;
#pragma unroll 1
    for (int64_t i = start + int64_t{blockIdx.x} * 32 + lane_id(); i < pad.entries; i += int64_t{gridDim.x} * 32) {
      if (pad.bytes == 4) static_cast<int32_t*>(pad.data)[i] = static_cast<int32_t>(value);
      else if (pad.bytes == 8) static_cast<int64_t*>(pad.data)[i] = value;
      else static_cast<uint8_t*>(pad.data)[i] = static_cast<uint8_t>(value);
    }
  }
}

// Single entries: the counts, and the zero that every offset list starts with.
template <class Offset>
__device__ __forceinline__ void write_heads(const MetadataParams& p, const MetadataShared& s) {
  if (blockIdx.x != 0) return;
  if (p.counts && threadIdx.x < 8) {
    // Decode and prefill change places; chunks come last.
    const auto t = static_cast<int32_t>(threadIdx.x);
    const uint32_t all = s.size[kNonSpecTokens] + s.size[kSpecTokens];
    p.counts[t] = static_cast<int32_t>(t == 6 ? all : s.size[t < 4 ? t ^ 2 : t == 7 ? kChunks : t]);
  }
  if (threadIdx.x != 32) return;
  if (p.groups[kPrefillGroup].offsets) set<Offset>(p.groups[kPrefillGroup].offsets, 0, 0);
  if (p.groups[kSpecGroup].offsets) set<Offset>(p.groups[kSpecGroup].offsets, 0, 0);
  if (p.non_spec_offsets) set<Offset>(p.non_spec_offsets, 0, 0);
}

// Running sums of this thread's row within its warp; the warp's totals go to `totals`.
__device__ __forceinline__ void warp_place(const Row& row, uint32_t chunks, OwnSums& before,
                                           uint32_t (&totals)[kRowSums]) {
  const auto length = static_cast<uint32_t>(row.length);
  const bool recurrent = row.kind == kRecurrentRow, rest = row.kind == kRestRow;
  const unsigned recurrents = __ballot_sync(kFullMask, recurrent), rests = __ballot_sync(kFullMask, rest);
  const unsigned ahead = (1u << lane_id()) - 1;
  const uint32_t a = recurrent ? length : 0, b = rest ? length : 0;
  const uint32_t sum_a = warp_running_sum(a), sum_b = warp_running_sum(b), sum_c = warp_running_sum(chunks);
  before.x[kRecurrent] = __popc(recurrents & ahead);
  before.x[kRecurrentTokens] = sum_a - a;
  before.x[kRest] = __popc(rests & ahead);
  before.x[kRestTokens] = sum_b - b;
  before.x[kRestChunks] = sum_c - chunks;
  if (lane_id() != 31) return;
  totals[kRecurrent] = __popc(recurrents);
  totals[kRecurrentTokens] = sum_a;
  totals[kRest] = __popc(rests);
  totals[kRestTokens] = sum_b;
  totals[kRestChunks] = sum_c;
}

// Pass 2. `own`: this thread's row of the first tile.
template <class Offset>
__device__ __forceinline__ void write_share(const MetadataParams& p, Shares shares, OwnRow<Offset> own,
                                            int64_t active, bool cut, const Layout& layout, MetadataShared& s) {
  const Share share = shares.placed;
  OwnSums at;  // before this tile
#pragma unroll
  for (int i = 0; i < kRowSums; ++i) at.x[i] = s.before[i];
  uint64_t lengths_before = s.lengths_before;
  bool padded = false;
  int64_t tile = share.first;
#pragma unroll 1
  do {  // once even without rows: for the padding
    const auto rows = static_cast<int32_t>(min(share.last - tile, int64_t{kMetadataThreads}));
    const int64_t i = tile + threadIdx.x;
    const bool exists = static_cast<int32_t>(threadIdx.x) < rows;
    const bool busy = warp_id() * 32 < rows;  // this warp has a row
    Row row;
    OwnSums before;
    if (tile != share.first) own = OwnRow<Offset>(p, i, share.last);
    if (i >= active) own.raw = {};  // not looked at (P-7)
    if (busy || cut) {
      int32_t length = raw_length(p, own.raw);
      if (cut) length = cut_in_tile(length, lengths_before, p.tokens, s);
      row = classify(p, own.raw, length);
    }
    if (busy) {
      const bool chunked = row.kind == kRestRow && layout.rest_group == kPrefillGroup;
      const uint32_t chunks = chunked ? chunk_count(static_cast<uint32_t>(row.length), p.divisor) : 0;
      warp_place(row, chunks, before, s.warp_sums[warp_id()]);
    }
    __syncthreads();
    OwnSums all;
#pragma unroll 1
    for (int w = 0; w * 32 < rows; ++w) {
#pragma unroll
      for (int k = 0; k < kRowSums; ++k) {
        all.x[k] += s.warp_sums[w][k];
        if (w < warp_id()) before.x[k] += s.warp_sums[w][k];
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
      if (mine && row.kind != kEmptyRow)
        write_row<Offset>(p, layout, static_cast<int32_t>(i), row, own.slot, group, place, tokens, chunks);
      if (mine && p.spec_mask) p.spec_mask[i] = row.kind != kEmptyRow && group == kSpecGroup;
      s.token_prefix[threadIdx.x] = before.x[kRecurrentTokens] + before.x[kRestTokens];
      s.chunk_prefix[threadIdx.x] = before.x[kRestChunks];
      s.begin[threadIdx.x] = row.begin;
      const auto token_at = static_cast<int32_t>(tokens + (recurrent ? 0 : layout.rest_token));
      s.token_at[threadIdx.x] = group == kSpecGroup ? ~token_at : token_at;
      s.chunk_at[threadIdx.x] = static_cast<int32_t>(chunks);
      s.ordinal[threadIdx.x] = static_cast<int32_t>(place);
    }
    if (!padded) write_padding(p, s);
    padded = true;
    __syncthreads();
    const uint32_t first = shares.together ? blockIdx.x * kMetadataThreads : 0;
    const uint32_t step = shares.together ? gridDim.x * kMetadataThreads : kMetadataThreads;
    write_lists<Offset>(p, s, rows, all.x[kRecurrentTokens] + all.x[kRestTokens], all.x[kRestChunks],
                        first + threadIdx.x, step);
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
  clear_sums(s);
  __syncthreads();
  wait_for_previous_grid();
  int32_t active = p.active;
  if (p.num_active) active = min(max(*p.num_active, 0), p.n);
  const Shares shares(p.n);
  const OwnRow<Offset> own(p, shares.placed.first + threadIdx.x, shares.placed.last);
  sum_up<Offset>(p, shares.placed, active, s);
  const bool cut = s.lengths > static_cast<uint64_t>(p.tokens);
  if (cut) sum_up_cut<Offset>(p, shares.placed, active, s);
  const Layout layout(p, s);
  publish_sizes(p, layout, s);
  __syncthreads();
  write_heads<Offset>(p, s);
  write_share<Offset>(p, shares, own, active, cut, layout, s);
}

}  // namespace kda::cuda

// Pass 1 of a build: sums over the rows of the whole step and over those before a block's share.
//
// A thread takes four neighbouring rows at a time, by vector loads where it can, and counts what costs the fewest
// instructions; the sums of the two kinds of rows follow from that (GroupSums).
#pragma once

#include "cuda/kernels/common/hold.cuh"
#include "cuda/kernels/metadata/chunks.cuh"

namespace kda::cuda {

// The thread's place in its block, read once: the special registers take tens of cycles each time.
struct Me {
  int32_t thread, lane, warp;
  __device__ __forceinline__ Me() : thread(static_cast<int32_t>(hold(threadIdx.x))) {
    lane = thread % 32, warp = thread / 32;
  }
};

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

// Four neighbouring rows as loaded. Rows that do not exist have no length.
constexpr int kGroupRows = 4;
template <class Offset>
struct RawGroup {
  Offset at[kGroupRows + 1] = {};
  int32_t state[kGroupRows] = {}, drafts[kGroupRows] = {-1, -1, -1, -1};
  uint8_t prefilling[kGroupRows] = {};
};

__device__ __forceinline__ void load_four(const int32_t* from, int32_t* to) {
  const auto x = *reinterpret_cast<const uint4*>(from);
  to[0] = static_cast<int32_t>(x.x), to[1] = static_cast<int32_t>(x.y);
  to[2] = static_cast<int32_t>(x.z), to[3] = static_cast<int32_t>(x.w);
}
__device__ __forceinline__ void load_four(const int64_t* from, int64_t* to) {
  int32_t half[8];
  load_four(reinterpret_cast<const int32_t*>(from), half);
  load_four(reinterpret_cast<const int32_t*>(from) + 4, half + 4);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const auto low = static_cast<uint32_t>(half[2 * j]), high = static_cast<uint32_t>(half[2 * j + 1]);
    to[j] = static_cast<int64_t>(uint64_t{high} << 32 | low);
  }
}
template <class To>
__device__ __forceinline__ void load_four_flags(const uint8_t* from, To* to) {
  const uint32_t word = *reinterpret_cast<const uint32_t*>(from);
#pragma unroll
  for (int j = 0; j < 4; ++j) to[j] = static_cast<To>(word >> (8 * j) & 0xff);
}

// kVectors: as p.vectors.
template <class Offset, bool kVectors>
__device__ __forceinline__ RawGroup<Offset> load_group(const MetadataParams& p, int64_t i) {
  RawGroup<Offset> r;
  if (i >= p.n) return r;
  if constexpr (kVectors) {
    const auto* cu = static_cast<const Offset*>(p.cu) + i;
    load_four(cu, r.at);
    r.at[kGroupRows] = cu[kGroupRows];
    if (p.computed.data) load_four(p.computed.data + i, r.state);
    else load_four_flags(p.has_state.data + i, r.state);
    if (p.prefilling.data) load_four_flags(p.prefilling.data + i, r.prefilling);
    if (p.by_drafts && p.drafts.data) load_four(p.drafts.data + i, r.drafts);
  } else {
    RawRow<Offset> row[kGroupRows];
#pragma unroll
    for (int j = 0; j < kGroupRows; ++j) row[j] = load_row<Offset>(p, i + j, p.n);
#pragma unroll
    for (int j = 0; j < kGroupRows; ++j) {
      r.at[j] = i + j < p.n ? row[j].begin : r.at[j];
      r.at[j + 1] = i + j < p.n ? row[j].end : r.at[j];
      r.state[j] = row[j].state, r.drafts[j] = row[j].drafts, r.prefilling[j] = row[j].prefilling;
    }
  }
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

constexpr int kLengthParts = 3, kLengthBits = 24;

struct MetadataShared {
  uint32_t all[kRowSums], before[kRowSums];  // of all rows, of those before the share
  uint32_t unplain;                          // a row of the rest that is no decode
  uint32_t length_parts[kLengthParts];       // all raw lengths added, by kLengthBits: warps add them in 32 bits
  uint64_t lengths_before;                   // raw
  uint32_t size[kStepSizes];
  uint32_t warp_sums[kMetadataWarps][kRowSums];
  uint64_t scan[kMetadataWarps][1];
  uint32_t token_prefix[kMetadataThreads], chunk_prefix[kMetadataThreads];  // entries of a row behind its first
  int32_t begin[kMetadataThreads];
  int32_t token_at[kMetadataThreads];  // place of the row's first token in its list; ~place: the spec list
  int32_t chunk_at[kMetadataThreads], ordinal[kMetadataThreads];
};

// Chunks that end before the last token; of no meaning for a length of 0.
__device__ __forceinline__ uint32_t steps_of(uint32_t length, const ChunkDivisor& d) {
  return static_cast<uint32_t>(uint64_t{2 * (length - 1)} * d.factor >> 32) >> d.shift;
}
__device__ __forceinline__ uint32_t chunk_count(uint32_t length, const ChunkDivisor& d) {
  return length != 0 ? steps_of(length, d) + 1 : 0;
}

// Rows of this block.
struct RowShare {
  int32_t first, last;
};

// The rows whose places a block finds, and those whose tables it writes.
struct Shares {
  bool together;  // every block places all rows
  RowShare written, placed;
  __device__ __forceinline__ explicit Shares(const MetadataParams& p) : together(p.n <= kMetadataThreads) {
    const auto n = static_cast<uint32_t>(p.n), each = static_cast<uint32_t>(p.share);
    written.first = static_cast<int32_t>(min(n, each * blockIdx.x));
    written.last = static_cast<int32_t>(min(n, each * blockIdx.x + each));
    placed = together ? RowShare{0, p.n} : written;
  }
};

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

// The same sums in the fewest instructions: rows that are empty, recurrent or of the rest are not told apart one by
// one.
struct GroupSums {
  uint64_t lengths = 0;
  uint32_t rows = 0, used = 0;  // looked at; of them not empty
  uint32_t recurrent = 0, recurrent_tokens = 0;
  uint32_t steps = 0;  // whole chunks before the last token of each row's part in the rest, all added
  bool unplain = false;

  template <class Offset>
  __device__ __forceinline__ void add(const MetadataParams& p, const RawGroup<Offset>& raw, int64_t left) {
    int32_t edge[kGroupRows + 1];
#pragma unroll
    for (int j = 0; j <= kGroupRows; ++j) edge[j] = clamped(raw.at[j], p.tokens);
    int32_t length[kGroupRows];
#pragma unroll
    for (int j = 0; j < kGroupRows; ++j) length[j] = max(edge[j + 1] - edge[j], 0);
    if (left < kGroupRows) {  // rows behind are not looked at (P-7)
#pragma unroll
      for (int j = 0; j < kGroupRows; ++j) length[j] = j < left ? length[j] : 0;
    }
#pragma unroll
    for (int j = 0; j < kGroupRows; ++j) {
      const bool asks = p.by_drafts ? raw.drafts[j] >= 0 : raw.state[j] > 0 && raw.prefilling[j] == 0;
      const bool is_recurrent = asks && static_cast<uint32_t>(length[j]) - 1 < static_cast<uint32_t>(p.width);
      const uint32_t own = is_recurrent ? static_cast<uint32_t>(length[j]) : 0;
      used += static_cast<uint32_t>(min(length[j], 1));
      recurrent += is_recurrent;
      recurrent_tokens += own;
      steps += steps_of(static_cast<uint32_t>(length[j]) - own, p.divisor);
    }
    lengths += uint64_t{static_cast<uint32_t>(length[0]) + static_cast<uint32_t>(length[1])} +
               (static_cast<uint32_t>(length[2]) + static_cast<uint32_t>(length[3]));
    rows += kGroupRows;
    if (!p.by_drafts) return;
#pragma unroll
    for (int j = 0; j < kGroupRows; ++j) {
      const bool is_recurrent = raw.drafts[j] >= 0 && length[j] <= p.width;
      const bool plain = length[j] == 1 && raw.state[j] > 0 && raw.prefilling[j] == 0;
      unplain = unplain || (length[j] != 0 && !is_recurrent && !plain);
    }
  }

  __device__ __forceinline__ OwnSums sums(const ChunkDivisor& divisor) const {
    OwnSums all;
    all.x[kRecurrent] = recurrent;
    all.x[kRecurrentTokens] = recurrent_tokens;
    all.x[kRest] = used - recurrent;
    all.x[kRestTokens] = static_cast<uint32_t>(lengths) - recurrent_tokens;
    // A row without a part in the rest has added steps_of(0).
    all.x[kRestChunks] = steps + all.x[kRest] - (rows - all.x[kRest]) * steps_of(0, divisor);
    return all;
  }
};

// Adds a warp's sums to the block's.
__device__ __forceinline__ void contribute(const OwnSums& all, const OwnSums& before, bool unplain, uint64_t lengths,
                                           Me me, MetadataShared& s) {
  constexpr int kLow = 27;  // bits: 32 of them add up below 2^32
  const uint64_t sum = warp_sum(static_cast<uint32_t>(lengths & ((1u << kLow) - 1))) +
                       (uint64_t{warp_sum(static_cast<uint32_t>(lengths >> kLow))} << kLow);
  const bool any = __any_sync(kFullMask, unplain);
  uint32_t mine = 0;  // one sum a lane, so that they are added at once
#pragma unroll
  for (int i = 0; i < kRowSums; ++i) {
    const uint32_t a = warp_sum(all.x[i]), b = warp_sum(before.x[i]);
    if (me.lane == i) mine = a;
    if (me.lane == kRowSums + i) mine = b;
  }
#pragma unroll
  for (int i = 0; i < kLengthParts; ++i) {
    const auto part = static_cast<uint32_t>(sum >> (kLengthBits * i)) & ((1u << kLengthBits) - 1);
    if (me.lane == 2 * kRowSums + i) mine = part;
  }
  uint32_t* const to = me.lane < kRowSums       ? &s.all[me.lane]
                       : me.lane < 2 * kRowSums ? &s.before[me.lane - kRowSums]
                                                : &s.length_parts[me.lane - 2 * kRowSums];
  if (me.lane < 2 * kRowSums + kLengthParts) atomicAdd(to, mine);
  if (me.lane == 0 && any) s.unplain = 1;
}

__device__ __forceinline__ void clear_sums(Me me, MetadataShared& s) {
  if (me.thread < kRowSums) s.all[me.thread] = s.before[me.thread] = 0;
  if (me.thread < kLengthParts) s.length_parts[me.thread] = 0;
  if (me.thread == 0) s.unplain = 0, s.lengths_before = 0;
}

__device__ __forceinline__ uint64_t all_lengths(const MetadataShared& s) {
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kLengthParts; ++i) sum += uint64_t{s.length_parts[i]} << (kLengthBits * i);
  return sum;
}

// Pass 1. A thread takes groups of rows, ascending; shares are whole groups.
template <class Offset, bool kVectors>
__device__ __forceinline__ void sum_rows(const MetadataParams& p, const RowShare& share, int32_t active, Me me,
                                         MetadataShared& s) {
  constexpr int kBatch = 2;
  constexpr int kStep = kGroupRows * kMetadataThreads;
  GroupSums all, before;
#pragma unroll 1
  for (int64_t base = me.thread * kGroupRows; base < p.n; base += kBatch * kStep) {
    RawGroup<Offset> raw[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) raw[u] = load_group<Offset, kVectors>(p, base + u * kStep);
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int64_t i = base + u * kStep;
      if (i >= active) break;
      all.add(p, raw[u], active - i);
      if (i < share.first) before = all;
    }
  }
  __syncwarp();
  contribute(all.sums(p.divisor), before.sums(p.divisor), all.unplain, all.lengths, me, s);
}

template <class Offset>
__device__ __forceinline__ void sum_up(const MetadataParams& p, const RowShare& share, int32_t active, Me me,
                                       MetadataShared& s) {
  if (me.warp * 32 * kGroupRows < p.n) {
    if (p.vectors) sum_rows<Offset, true>(p, share, active, me, s);
    else sum_rows<Offset, false>(p, share, active, me, s);
  }
  __syncthreads();
}

// Pass 1 once more, in order, where bad offsets add up to more than T tokens.
template <class Offset>
__device__ __noinline__ void sum_up_cut(const MetadataParams& p, RowShare share, int32_t active, Me me,
                                        MetadataShared& s) {
  __syncthreads();
  clear_sums(me, s);
  __syncthreads();
  OwnSums all, before;
  uint64_t running = 0;
  bool unplain = false;
#pragma unroll 1
  for (int64_t tile = 0; tile < active; tile += kMetadataThreads) {
    const int64_t i = tile + me.thread;
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
  contribute(all, before, unplain, 0, me, s);
  __syncthreads();
}

}  // namespace kda::cuda

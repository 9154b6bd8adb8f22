// Decode and verify with a state per token (V-1..V-9), verify with records and folded commit (V-10, V-10b), commit.
//
// Equations  E-1, E-4, E-5, E-7 per token in recurrence/tile.cuh; replay of records as V-10.
// Grid       x = (value head, slice of value rows), y and z = sequence; neighbours read neighbouring states.
// Block      four warps own 2 * kSlots state rows each, in registers from first load to last store. All four prepare the
//            tokens in dynamic shared memory: q, k, e^g [K], v [rows] of each, 1.7 KB at K = 128.
// Waiting    one block barrier between preparing tokens and using them. State loads are issued before it. Slices of one
//            head form a cluster where records are written: every slice has read the old keys and gates before one of
//            them writes the new. No other block waits for a block (F28).
// Hazards    a part of the start state is loaded before anything is stored (V-5). Counts of records are set by a kernel
//            of their own after this one: every head of a row reads the old count.
// Precision  fp32 throughout; the pool's dtype at loads and stores only (N-1, N-2).
// Limits     K, V <= 256. Exact shape: K = V = 128 and 16-byte rows, all tokens of a row prepared at once (<= 16);
//            masked shapes take anything else, in chunks.
#pragma once

#include "cuda/kernels/decode/commit_row.cuh"
#include "cuda/kernels/decode/launch.h"
#include "cuda/kernels/recurrence/source.cuh"

namespace kda::cuda {

template <class Pool_, Shape kShape_, Flow kFlow_>
struct DecodeConfig {
  using Pool = Pool_;
  static constexpr Shape kShape = kShape_;
  static constexpr Flow kFlow = kFlow_;
  static constexpr bool kExact = kShape == Shape::kExact128;
  // Small blocks mix reads and writes best (measured on copies); 16-bit states need more rows to have as much in flight.
  static constexpr bool kSmall = kExact && kFlow == Flow::kColumns && sizeof(Pool) == 4;
  using Tile = StateTile<Pool, kShape_, kSmall || kShape == Shape::kMasked256 ? 4 : 8>;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  // Resident on one multiprocessor, at least: bounds the registers. Masked shapes have addresses to keep.
  static constexpr int kBlocks = kSmall ? 6 : kExact ? 4 : 2;
  using Slot = TokenSlot<Tile::kKeys, kWarps * Tile::kRows, kExact>;
};

template <class Pool, class P>
__device__ __forceinline__ HeadState head_state(const P& p, int64_t slot, int32_t head) {
  const int64_t payload = static_cast<int64_t>(p.form.values) * p.form.keys;
  return {static_cast<Pool*>(p.pool.data) + slot * p.pool.slot_stride + head * payload, p.form.keys, p.form.values,
          p.vectors != 0};
}

// Output rows of an inactive sequence (P-5): this block's value rows.
template <class P>
__device__ __forceinline__ void zero_outputs(const P& p, const HeadPlace& at) {
  for (int64_t t = 0; t < at.span.length; ++t) {
    const int64_t row = p.out.row(at.span.begin + t);
    if (row < 0) continue;
    const int64_t to = p.out.offset(at.span.batch, row, at.head) + at.first_row;
    for (int r = static_cast<int>(threadIdx.x); r < at.rows; r += static_cast<int>(blockDim.x)) {
      store_element(p.out.data, to + r, p.out.dtype, 0.0f);
    }
  }
}

// Grid: x = slices of the value heads of a sequence, so that neighbours read neighbouring states; y, z = sequence.
__device__ __forceinline__ HeadPlace place_of_block(const AttentionForm& form, const HeadSplit& split) {
  HeadPlace at;
  at.n = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const auto x = static_cast<int32_t>(blockIdx.x);
  at.head = split.slices == 1 ? x : x / split.slices;
  at.query_head = form.heads == form.value_heads ? at.head : at.head / (form.value_heads / form.heads);
  at.first_row = (x - at.head * split.slices) * split.rows_per_block;
  at.rows = min(split.rows_per_block, form.values - at.first_row);
  return at;
}

// Tokens of a sequence; plans bound them below 2^31.
__device__ __forceinline__ int length_of(const HeadPlace& at) { return static_cast<int>(at.span.length); }

struct RowPlace {
  HeadPlace at;
  DecodeRow row;
};

// The block's head and row into one warp's shared memory; false behind the active sequences.
__device__ __forceinline__ bool find_place(const DecodeParams& p, RowPlace& s_place) {
  touch_parameters(p);
  HeadPlace at = place_of_block(p.form, p.split);
  wait_for_previous_grid();
  if (at.n >= p.sequences.count) return false;  // the grid's last z
  const DecodeLoads loads = load_decode_row(p.rule, p.sequences, at.n);
  if (at.n >= active_sequences(p.sequences)) return false;
  const DecodeRow row = resolve_decode_row(loads, p.rule, p.records, p.sequences, at.n);
  at.span = row.span;
  if (lane_id() == 0) {
    s_place.at = at;
    s_place.row = row;
  }
  __syncwarp();
  return true;
}

// V; known where the shape is exact, and then one pass of a block holds all of a head.
template <class Tile>
__device__ __forceinline__ int values_of(const AttentionForm& form) {
  return Tile::kExact ? 128 : form.values;
}

// `row` of the block is one of the head's; the warps of an exact shape that have rows have all of them.
template <class Tile>
__device__ __forceinline__ bool row_exists(int row, const HeadPlace& at) {
  return Tile::kExact || row < at.rows;
}

// A warp's rows of a head: which it has, and the row of the lane's results.
template <class Tile>
struct WarpRows {
  int first = 0;      // row of the head
  int mine = 0;       // row of the block that this lane's slot_of_lane() is
  bool any = false;

  __device__ __forceinline__ WarpRows(const HeadPlace& at, const HeadSplit& split, const AttentionForm& form) {
    first = at.first_row + warp_id() * Tile::kRows;
    mine = warp_id() * Tile::kRows + Tile::row_of(Tile::slot_of_lane());
    any = warp_id() < split.row_warps && first < values_of<Tile>(form);
  }
};

// Applies one prepared token and stores its output; gives u.
template <class Tile, class P, class Slot>
__device__ __forceinline__ float apply_token(Tile& tile, const P& p, const HeadPlace& at, const WarpRows<Tile>& rows,
                                             const Slot& s) {
  const float v = row_exists<Tile>(rows.mine, at) ? s.v[rows.mine] : 0.0f;
  const auto r = tile.token(s.decay, s.k, s.q, s.beta, v, p.form.scale);
  if (Tile::owns_row() && row_exists<Tile>(rows.mine, at) && s.out_row >= 0) {
    store_element(p.out.data, p.out.offset(at.span.batch, s.out_row, at.head) + at.first_row + rows.mine, p.out.dtype,
                  r.o);
  }
  return r.u;
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) decode_kernel(const __grid_constant__ DecodeParams p) {
  using Tile = typename C::Tile;
  using Slot = typename C::Slot;
  // Each warp's copy: what a block knows of its row would cost two dozen registers.
  __shared__ RowPlace s_place[C::kWarps];
  Slot* const s = token_slots<Slot>();
  RowPlace& place = s_place[warp_id()];
  if (!find_place(p, place)) return;
  const HeadPlace& at = place.at;
  const DecodeRow& row = place.row;
  if (!row.active) return zero_outputs(p, at);

  const WarpRows<Tile> rows(at, p.split, p.form);
  const bool per_token = p.rule.per_token != 0;
  const DirectSource<DecodeParams, Slot> source{p, at, per_token};
  PartQueue<DirectSource<DecodeParams, Slot>> parts(source);
  int count = min(p.split.chunk, length_of(at));
  parts.start(0, count);
  typename Tile::Raw raw;
  if (rows.any && !row.fresh) Tile::load(raw, head_state<typename C::Pool>(p, row.start_slot, at.head), rows.first);
  else Tile::zero(raw);
  parts.finish(0, count, s);
  __syncthreads();

  Tile tile;
  tile.widen(raw);
  const auto store = [&](int64_t slot) {
    if (slot >= 0) tile.store(head_state<typename C::Pool>(p, slot, at.head), rows.first);
  };
  for (int first = 0;;) {
#pragma unroll 1
    for (int i = 0; i < count && rows.any; ++i) {
      (void)apply_token(tile, p, at, rows, s[i]);
      if (per_token) store(s[i].store_slot);
    }
    first += p.split.chunk;
    if (Tile::kExact || first >= length_of(at)) break;
    count = min(p.split.chunk, length_of(at) - first);
    __syncthreads();
    parts.start(first, count);
    parts.finish(first, count, s);
    __syncthreads();
  }
  if (!rows.any) return;
  // A fresh row of no tokens becomes zero, another keeps its bits (P-11).
  if (at.span.length == 0 ? row.fresh : !per_token) store(store_slot(p.rule.slots, at.n, 0));
}

// Replays recorded tokens.
template <class Tile, class Slot>
__device__ __forceinline__ void replay_tokens(Tile& tile, const HeadPlace& at, const WarpRows<Tile>& rows,
                                              const Slot* s, int count) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    tile.replay(s[i].decay, s[i].k, row_exists<Tile>(rows.mine, at) ? s[i].v[rows.mine] : 0.0f);
  }
}

// Key and raw gate of a row's tokens into its records, in the gate's dtype: that is the io dtype or fp32, so that a key
// fits exactly (P-3).
__device__ __forceinline__ void record_tokens(const DecodeParams& p, const HeadPlace& at, int64_t record) {
  for (int i = static_cast<int>(threadIdx.x); i < length_of(at) * p.form.keys; i += static_cast<int>(blockDim.x)) {
    const int t = i / p.form.keys, c = i % p.form.keys;
    const int64_t to = record_kg_offset(p.records, record, at.head, t) + c;
    const int64_t row = at.span.begin + t;
    const float k = load_element(p.k.data, p.k.offset(at.span.batch, row, at.query_head) + c, p.form.io);
    const float g = load_element(p.gate.data, p.gate.offset(at.span.batch, row, at.head) + c, p.gate.dtype);
    store_element(p.records.kg, to, p.gate.dtype, k);
    store_element(p.records.kg, to + p.form.keys, p.gate.dtype, g);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) verify_record_kernel(const __grid_constant__ DecodeParams p) {
  using Tile = typename C::Tile;
  using Slot = typename C::Slot;
  __shared__ RowPlace s_place[C::kWarps];
  Slot* const s = token_slots<Slot>();
  RowPlace& place = s_place[warp_id()];
  // All blocks of a cluster see the same row, so they leave together.
  if (!find_place(p, place)) return;
  const HeadPlace& at = place.at;
  const DecodeRow& row = place.row;
  if (!row.active) return zero_outputs(p, at);

  const WarpRows<Tile> rows(at, p.split, p.form);
  const auto committed = static_cast<int>(row.commit);
  typename Tile::Raw raw;
  {
    const RecordSource<Slot> source{p.records, p.gate_rule, p.form, p.gate.dtype, at, row.record};
    PartQueue<RecordSource<Slot>> parts(source);
    parts.start(0, committed);
    if (rows.any) Tile::load(raw, head_state<typename C::Pool>(p, row.start_slot, at.head), rows.first);
    else Tile::zero(raw);
    parts.finish(0, committed, s);
  }
  {
    const DirectSource<DecodeParams, Slot> source{p, at, false};
    PartQueue<DirectSource<DecodeParams, Slot>> parts(source);
    parts.start(0, length_of(at));
    parts.finish(0, length_of(at), s + committed);
  }
  __syncthreads();
  cluster_arrive();

  Tile tile;
  tile.widen(raw);
  if (committed > 0) {
    replay_tokens(tile, at, rows, s, committed);
    if (rows.any) tile.store(head_state<typename C::Pool>(p, row.start_slot, at.head), rows.first);
    tile.round_to_pool();
  }
#pragma unroll 1
  for (int i = 0; i < length_of(at) && rows.any; ++i) {
    const float u = apply_token(tile, p, at, rows, s[committed + i]);
    if (!Tile::owns_row() || !row_exists<Tile>(rows.mine, at)) continue;
    p.records.u[record_u_offset(p.records, row.record, at.head, i) + at.first_row + rows.mine] = u;
  }
  cluster_wait();
  if (at.first_row == 0) record_tokens(p, at, row.record);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) commit_kernel(const __grid_constant__ CommitParams p) {
  using Tile = typename C::Tile;
  using Slot = typename C::Slot;
  Slot* const s = token_slots<Slot>();
  touch_parameters(p);
  HeadPlace at = place_of_block(p.form, p.split);
  wait_for_previous_grid();
  if (at.n >= committing_sequences(p)) return;
  const CommitRow row = commit_row(p, at.n);
  if (row.tokens <= 0) return;

  const WarpRows<Tile> rows(at, p.split, p.form);
  const auto tokens = static_cast<int>(row.tokens);
  const RecordSource<Slot> source{p.records, p.gate_rule, p.form, p.gate_dtype, at, row.record};
  PartQueue<RecordSource<Slot>> parts(source);
  parts.start(0, tokens);
  typename Tile::Raw raw;
  if (rows.any) Tile::load(raw, head_state<typename C::Pool>(p, row.slot, at.head), rows.first);
  else Tile::zero(raw);
  parts.finish(0, tokens, s);
  __syncthreads();
  if (!rows.any) return;
  Tile tile;
  tile.widen(raw);
  replay_tokens(tile, at, rows, s, tokens);
  tile.store(head_state<typename C::Pool>(p, row.slot, at.head), rows.first);
}

// The built kernel of one pool dtype.
template <class C>
KernelInfo kernel_info(const void* function, const char* name) {
  return {function, name, C::kThreads, C::Tile::kRows, static_cast<int32_t>(sizeof(typename C::Slot))};
}

template <class Pool, Shape kShape>
KernelInfo decode_kernel_of(Flow flow) {
  using Columns = DecodeConfig<Pool, kShape, Flow::kColumns>;
  using Records = DecodeConfig<Pool, kShape, Flow::kRecords>;
  using Commit = DecodeConfig<Pool, kShape, Flow::kCommit>;
  switch (flow) {
    case Flow::kColumns:
      return kernel_info<Columns>(reinterpret_cast<const void*>(decode_kernel<Columns>), "decode_kernel");
    case Flow::kRecords:
      return kernel_info<Records>(reinterpret_cast<const void*>(verify_record_kernel<Records>), "verify_record_kernel");
    case Flow::kCommit:
      return kernel_info<Commit>(reinterpret_cast<const void*>(commit_kernel<Commit>), "commit_kernel");
  }
  return {};
}

template <class Pool>
KernelInfo decode_kernel_of(Shape shape, Flow flow) {
  switch (shape) {
    case Shape::kExact128: return decode_kernel_of<Pool, Shape::kExact128>(flow);
    case Shape::kMasked128: return decode_kernel_of<Pool, Shape::kMasked128>(flow);
    case Shape::kMasked256: return decode_kernel_of<Pool, Shape::kMasked256>(flow);
  }
  return {};
}

}  // namespace kda::cuda

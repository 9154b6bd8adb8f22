// Decode and verify with a state per token (V-1..V-9) in general, verify with records and folded commit (V-10,
// V-10b), commit. The tuned decode and verify is in heads.cuh.
//
// Equations  E-1, E-4, E-5, E-7 per token in recurrence/tile.cuh; replay of records as V-10.
// Grid       x = (value head, slice of value rows), y and z = sequence; neighbours read neighbouring states.
// Block      four warps (exact shape: eight) own 2 * kSlots state rows each, in registers from first load to last
//            store. All prepare the tokens in dynamic shared memory: q, k, e^g [K], v [rows] of each, 1.7 KB at K
//            = 128.
// Waiting    one block barrier between preparing tokens and using them. State loads are issued before it. Slices
//            of one head form a cluster where records are written: every slice has read the old keys and gates
//            before one of them writes the new. No other block waits for a block (F28).
// Hazards    a part of the start state is loaded before anything is stored (V-5). Counts of records are set by a
//            kernel of their own after this one: every head of a row reads the old count.
// Precision  fp32 throughout; the pool's dtype at loads and stores only (N-1, N-2).
// Limits     K, V <= 256. Exact shape: K = V = 128 and 16-byte rows; masked shapes take anything else, and rows of
//            any length in chunks.
#pragma once

#include "cuda/kernels/decode/commit_row.cuh"
#include "cuda/kernels/decode/heads.cuh"
#include "cuda/kernels/decode/launch.h"
#include "cuda/kernels/recurrence/block.cuh"
#include "cuda/kernels/recurrence/source.cuh"
#include "cuda/ptx/cluster.h"

namespace kda::cuda {

template <class Pool_, Shape kShape_, Flow kFlow_>
struct DecodeConfig {
  using Pool = Pool_;
  static constexpr Shape kShape = kShape_;
  static constexpr Flow kFlow = kFlow_;
  static constexpr bool kExact = kShape == Shape::kExact128;
  using Tile = StateTile<Pool, kShape_>;
  // Exact: records. Twice the tokens to prepare, so twice the rows that they are prepared for.
  static constexpr int kWarps = kExact ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocks = 2;  // resident on one multiprocessor, at least: bounds the registers
  using Slot = TokenSlot<Tile::kKeys, kWarps * Tile::kRows, kExact>;
};

// The block's head and row into one warp's shared memory; false behind the active sequences.
__device__ __forceinline__ bool find_place(const DecodeParams& p, RowPlace& s_place) {
  touch_parameters(p);
  const HeadPlace at = place_of_block(p.form, p.split);
  wait_for_previous_grid();
  if (at.n >= p.sequences.count) return false;  // the grid's last z
  const DecodeLoads loads = load_decode_row(p.rule, p.sequences, at.n);
  if (!is_looked_at(loads, p.sequences, at.n)) return false;
  const DecodeRow row = resolve_decode_row(loads, p.rule, p.records, p.sequences, at.n);
  if (lane_id() == 0) {
    s_place.at = at;
    s_place.at.span = row.span;
    s_place.row = row;
  }
  __syncwarp();
  return true;
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
  if (!row.active) return zero_outputs(p, at, at.head);

  const WarpRows<Tile> rows(at, p.split, p.form);
  const bool per_token = p.rule.per_token != 0;
  const DirectSource<DecodeParams, Slot> source{p, at, at.head, at.query_head, per_token};
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
      tile.decay(s[i].decay);
      (void)apply_token(tile, p, at, at.head, rows, s[i]);
      if (per_token) store(s[i].store_slot);
    }
    first += p.split.chunk;
    if (first >= length_of(at)) break;
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
    tile.decay(s[i].decay);
    tile.replay(s[i].k, row_exists<Tile>(rows.mine, at) ? s[i].v[rows.mine] : 0.0f);
  }
}

// Key and raw gate of a row's tokens on their way to its records, in the gate's dtype: that is the io dtype or fp32,
// so that a key fits exactly (P-3). The first kHeld elements of a thread are loaded before the tokens are applied.
struct KeyGateCopy {
  static constexpr int kHeld = 2;
  const DecodeParams& p;
  const HeadPlace& at;
  float k[kHeld], gate[kHeld];

  __device__ __forceinline__ int count() const { return length_of(at) * p.form.keys; }
  __device__ __forceinline__ float key_of(int i) const {
    const int64_t row = at.span.begin + i / p.form.keys;
    return load_element(p.k.data, p.k.offset(at.span.batch, row, at.query_head) + i % p.form.keys, p.form.io);
  }
  __device__ __forceinline__ float gate_of(int i) const {
    const int64_t row = at.span.begin + i / p.form.keys;
    return load_element(p.gate.data, p.gate.offset(at.span.batch, row, at.head) + i % p.form.keys, p.gate.dtype);
  }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int i = static_cast<int>(threadIdx.x + j * blockDim.x);
      k[j] = i < count() ? key_of(i) : 0.0f;
      gate[j] = i < count() ? gate_of(i) : 0.0f;
    }
  }
  __device__ __forceinline__ void store_one(int64_t record, int i, float key, float g) const {
    const int64_t to = record_kg_offset(p.records, record, at.head, i / p.form.keys) + i % p.form.keys;
    store_element(p.records.kg, to, p.gate.dtype, key);
    store_element(p.records.kg, to + p.form.keys, p.gate.dtype, g);
  }
  __device__ __forceinline__ void store(int64_t record) const {
    int i = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int j = 0; j < kHeld; ++j, i += static_cast<int>(blockDim.x)) {
      if (i < count()) store_one(record, i, k[j], gate[j]);
    }
#pragma unroll 1
    for (; i < count(); i += static_cast<int>(blockDim.x)) store_one(record, i, key_of(i), gate_of(i));
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    verify_record_kernel(const __grid_constant__ DecodeParams p) {
  using Tile = typename C::Tile;
  using Slot = typename C::Slot;
  __shared__ RowPlace s_place[C::kWarps];
  Slot* const s = token_slots<Slot>();
  RowPlace& place = s_place[warp_id()];
  // All blocks of a cluster see the same row, so they leave together.
  if (!find_place(p, place)) return;
  const HeadPlace& at = place.at;
  const DecodeRow& row = place.row;
  if (!row.active) return zero_outputs(p, at, at.head);

  const WarpRows<Tile> rows(at, p.split, p.form);
  const auto committed = static_cast<int>(row.commit);
  const RecordSource<Slot> recorded{p.records, p.gate_rule, p.form, p.gate.dtype, at, row.record};
  const DirectSource<DecodeParams, Slot> direct{p, at, at.head, at.query_head, false};
  PartQueue<RecordSource<Slot>> old_parts(recorded);
  PartQueue<DirectSource<DecodeParams, Slot>> new_parts(direct);
  old_parts.start(0, committed);
  new_parts.start(0, length_of(at));
  Tile tile;
  {
    typename Tile::Raw raw;
    if (rows.any) Tile::load(raw, head_state<typename C::Pool>(p, row.start_slot, at.head), rows.first);
    else Tile::zero(raw);
    old_parts.finish(0, committed, s);
    new_parts.finish(0, length_of(at), s + committed);
    tile.widen(raw);
  }
  KeyGateCopy keys_and_gates{p, at};
  keys_and_gates.load();
  __syncthreads();
  if (p.split.clustered) ptx::cluster_arrive_relaxed();  // what was to be read has been used

  if (committed > 0) {
    replay_tokens(tile, at, rows, s, committed);
    if (rows.any) tile.store(head_state<typename C::Pool>(p, row.start_slot, at.head), rows.first);
    tile.round_to_pool();
  }
#pragma unroll 1
  for (int i = 0; i < length_of(at) && rows.any; ++i) {
    tile.decay(s[committed + i].decay);
    const float u = apply_token(tile, p, at, at.head, rows, s[committed + i]);
    if (!Tile::owns_row() || !row_exists<Tile>(rows.mine, at)) continue;
    p.records.u[record_u_offset(p.records, row.record, at.head, i) + at.first_row + rows.mine] = u;
  }
  if (p.split.clustered) ptx::cluster_wait();
  if (at.first_row == 0) keys_and_gates.store(row.record);
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
  return {function, name, C::kThreads, C::Tile::kRows, static_cast<int32_t>(sizeof(typename C::Slot)), C::kBlocks};
}

template <class Pool, Shape kShape>
KernelInfo decode_kernel_of(Flow flow) {
  using Columns = DecodeConfig<Pool, kShape, Flow::kColumns>;
  using Records = DecodeConfig<Pool, kShape, Flow::kRecords>;
  using Commit = DecodeConfig<Pool, kShape, Flow::kCommit>;
  switch (flow) {
    case Flow::kColumns:
      if constexpr (kShape == Shape::kExact128) {
        using Heads = HeadsConfig<Pool>;
        auto heads =
            kernel_info<Heads>(reinterpret_cast<const void*>(decode_heads_kernel<Heads>), "decode_heads_kernel");
        heads.token_bytes *= 2;
        heads.block_bytes = Heads::kStateBytes;
        return heads;
      } else {
        return kernel_info<Columns>(reinterpret_cast<const void*>(decode_kernel<Columns>), "decode_kernel");
      }
    case Flow::kRecords:
      return kernel_info<Records>(reinterpret_cast<const void*>(verify_record_kernel<Records>),
                                  "verify_record_kernel");
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

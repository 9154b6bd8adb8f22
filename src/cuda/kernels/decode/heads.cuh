// Decode and verify with a state per token (V-1..V-9), K = V = 128: the tuned kernel.
//
// Equations  E-1, E-4, E-5, E-7 per token in recurrence/tile.cuh.
// Grid       x = (group of value heads, slice of value rows), y and z = sequence. A block goes through its heads:
//            with 16-bit states as many as let all blocks run at once and end together, with 32-bit ones a single
//            one.
// Block      four warps own 2 * kSlots state rows each of a head, in registers while tokens are applied. All four
//            prepare tokens. With several heads the next one's state and first tokens are on their way while one
//            is worked on.
// Shared     16 KB of states on their way, a place a lane (16-bit states); two buffers of tokens: q, k, e^g [K], v
//            [rows], 1.7 KB each.
// Waiting    one block barrier a head, between preparing tokens and using them; none for the buffers, which
//            alternate. No block waits for a block (F28). The grid before: recurrence/early.cuh.
// Hazards    a part of the start state is loaded before anything is stored (V-5).
// Precision  fp32 throughout; the pool's dtype at loads and stores only (N-1, N-2).
// Limits     16-byte state rows; all tokens of a row prepared at once (<= 16).
#pragma once

#include "cuda/kernels/decode/launch.h"
#include "cuda/kernels/recurrence/early.cuh"
#include "cuda/kernels/recurrence/source.cuh"

namespace kda::cuda {

template <class Pool_>
struct HeadsConfig {
  using Pool = Pool_;
  static constexpr bool kManyHeads = sizeof(Pool) == 2;
  static constexpr int kSlots = sizeof(Pool) == 4 ? 4 : 8;  // as many bytes in flight
  using Tile = StateTile<Pool, Shape::kExact128, kSlots>;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kBlocks = sizeof(Pool) == 4 ? 6 : 4;  // resident on one multiprocessor, at least
  using Slot = TokenSlot<128, kWarps * Tile::kRows, true>;
  static constexpr int kStateBytes = kManyHeads ? kWarps * Tile::kStage : 0;
};

template <class C>
struct HeadWork {
  using Tile = typename C::Tile;
  using Slot = typename C::Slot;
  using Source = DirectSource<DecodeParams, Slot>;
  const DecodeParams& p;
  const RowPlace& place;
  uint32_t s_stage;        // of the warp
  typename Tile::Raw raw;  // or, with one head, straight to registers
  typename Source::Input in;

  __device__ __forceinline__ HeadWork(const DecodeParams& params, const RowPlace& where, const void* s_states)
      : p(params),
        place(where),
        s_stage(static_cast<uint32_t>(__cvta_generic_to_shared(s_states)) + warp_id() * Tile::kStage) {}

  __device__ __forceinline__ Source source(int32_t head) const {
    return {p, place.at, head, query_head_of(p.form, head), p.rule.per_token != 0};
  }
  // Issues the loads of a head.
  __device__ __forceinline__ void start(const WarpRows<Tile>& rows, int32_t head) {
    if (!place.row.active) return;
    const int id = warp_id();
    if (id < 4 * length_of(place.at)) source(head).gather(in, static_cast<Part>(id), 0);
    const bool exists = rows.any && !place.row.fresh;
    const HeadState state = head_state<typename C::Pool>(p, exists ? place.row.start_slot : 0, head);
    if constexpr (C::kManyHeads) {
      if (rows.any) Tile::stage(s_stage, state, rows.first, exists);
    } else if (exists) {
      Tile::load(raw, state, rows.first);
    } else {
      Tile::zero(raw);
    }
  }
  // The state that start() asked for.
  __device__ __forceinline__ void take(const WarpRows<Tile>& rows, Tile& tile) {
    if constexpr (C::kManyHeads) {
      if (!rows.any) return;
      Tile::unstage(raw, s_stage);
    }
    tile.widen(raw);
  }
  // Prepares its tokens. The warp has one kind of part: query, key, value or scalars.
  __device__ __forceinline__ void prepare(int32_t head, Slot* slots) {
    const auto part = static_cast<Part>(warp_id());
    const Source from = source(head);
#pragma unroll 1
    for (int t = 0; t < length_of(place.at); ++t) {
      typename Source::Input next;
      if (t + 1 < length_of(place.at)) from.gather(next, part, t + 1);
      from.finish(in, part, t, slots[t]);
      in = next;
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    decode_heads_kernel(const __grid_constant__ DecodeParams p) {
  using Tile = typename C::Tile;
  using Pool = typename C::Pool;
  __shared__ RowPlace s_place[C::kWarps];
  auto* const s_states = token_slots<unsigned char>();
  auto* s = reinterpret_cast<typename C::Slot*>(s_states + C::kStateBytes);
  auto* s_other = s + p.split.chunk;
  RowPlace& place = s_place[warp_id()];
  EarlyRow early;
  const auto ask = [&](const HeadPlace& where, const DecodeRow& start) {
    if (!start.fresh && threadIdx.x == 0) ask_for_state<Pool>(p, where, start.start_slot, where.head);
  };
  if (!early.find(p, place, ask)) return;

  const HeadPlace& at = place.at;
  const DecodeRow& row = place.row;
  const WarpRows<Tile> rows(at, p.split, p.form);
  HeadWork<C> work(p, place, s_states);
  int32_t head = at.head;
  const int32_t last = min(head + p.split.heads, p.form.value_heads) - 1;
  {
    const DecodeLoads now = early.load_again(p, place);
    work.start(rows, head);
    if (early.changed(now, p, place)) {
      ptx::copy_async_wait<0>();
      work.start(rows, head);
    }
    if (!is_looked_at(now, p.sequences, at.n)) return;
  }
  if (!row.active) {
    for (; head <= last; ++head) zero_outputs(p, at, head);
    return;
  }
  if (!C::kManyHeads && threadIdx.x == C::kThreads - 1) ask_for_later_block<Pool>(p);
  const bool per_token = p.rule.per_token != 0;
#pragma unroll 1
  for (;; ++head) {
    work.prepare(head, s);
    __syncthreads();
    Tile tile;
    work.take(rows, tile);
    if (C::kManyHeads && head < last) work.start(rows, head + 1);
    const auto store = [&](int64_t slot) {
      if (slot >= 0) tile.store(head_state<Pool>(p, slot, head), rows.first);
    };
#pragma unroll 1
    for (int i = 0; i < length_of(at) && rows.any; ++i) {
      tile.decay(s[i].decay);
      (void)apply_token(tile, p, at, head, rows, s[i]);
      if (per_token) store(s[i].store_slot);
    }
    // A fresh row of no tokens becomes zero, another keeps its bits (P-11).
    if (rows.any && (at.span.length == 0 ? row.fresh : !per_token)) store(store_slot(p.rule.slots, at.n, 0));
    if (!C::kManyHeads || head == last) return;
    auto* used = s;
    s = s_other, s_other = used;
  }
}

}  // namespace kda::cuda

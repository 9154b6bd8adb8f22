// Prefill of any shape: decode's recurrence over whole prompts (R-14), for problems that the tensor-core kernel
// declines.
//
// Equations  E-1, E-4, E-5, E-7 per token in recurrence/tile.cuh: cuts of a prompt anywhere, resumes and
//            checkpoints at any offset give the same bits (H-10, K-5).
// Grid       x = (value head, slice of value rows), y and z = sequence.
// Block      four warps own up to 16 state rows each, in registers from the first load to the last store; all four
//            prepare tokens in dynamic shared memory, split.chunk at a time.
// Waiting    two block barriers a chunk of tokens: prepared, used up. No block waits for a block (F28).
// Precision  fp32 throughout, decays in two terms; the pool's dtype at loads and stores only (N-1, N-2).
// Limits     K, V <= 256. Serial in the tokens: made to be right for every problem, not to be fast.
#pragma once

#include "cuda/kernels/decode/kernel.cuh"
#include "cuda/kernels/prefill_portable/params.h"

namespace kda::cuda {

template <class Base>
struct TwoTermSlot : Base {
  float decay_low[Base::kKeys];
};

template <Shape kShape_>
struct PrefillConfig {
  using Tile =
      StateTile<float, kShape_>;  // whatever the pool's dtype: states are loaded and stored element by element
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kBlocks = 2;
  using Slot = TwoTermSlot<TokenSlot<Tile::kKeys, kWarps * Tile::kRows, false>>;
};

// As DirectSource, with the decays' second terms.
template <class Slot_>
struct PrefillSource : DirectSource<PrefillParams, Slot_> {
  using Base = DirectSource<PrefillParams, Slot_>;
  using typename Base::Input;
  __device__ __forceinline__ PrefillSource(const PrefillParams& p, const HeadPlace& at)
      : Base{p, at, at.head, at.query_head, false} {}
  __device__ __forceinline__ void finish(const Input& in, Part part, int t, Slot_& s) const {
    Base::finish(in, part, t, s);
    in.decay.finish_low(this->p.gate_rule, this->p.gate.dtype, this->p.form.keys, part, s.decay, s.decay_low);
  }
};

// The lane's part of a warp's rows, one rounding each (N-2), to states of a dtype known at run time.
template <class Tile>
__device__ __forceinline__ void store_rows(const Tile& tile, void* states, Dtype dtype, int64_t offset, int first,
                                           const AttentionForm& form) {
#pragma unroll
  for (int slot = 0; slot < Tile::kSlots; ++slot) {
    const int row = first + Tile::row_of(slot);
    if (row >= form.values) continue;
#pragma unroll
    for (int e = 0; e < Tile::kElements; ++e) {
      const int key = Tile::key_of(e);
      if (key < form.keys)
        store_element(states, offset + static_cast<int64_t>(row) * form.keys + key, dtype, tile.s[slot][e]);
    }
  }
}

// Rows of a state of a dtype known at run time, widened; those that do not exist are zero.
template <class Tile>
__device__ __forceinline__ void load_rows(Tile& tile, const void* states, Dtype dtype, int64_t offset, int first,
                                          const AttentionForm& form) {
#pragma unroll
  for (int slot = 0; slot < Tile::kSlots; ++slot) {
    const int row = first + Tile::row_of(slot);
#pragma unroll
    for (int e = 0; e < Tile::kElements; ++e) {
      const int key = Tile::key_of(e);
      const bool exists = states != nullptr && row < form.values && key < form.keys;
      tile.s[slot][e] =
          exists ? load_element(states, offset + static_cast<int64_t>(row) * form.keys + key, dtype) : 0.0f;
    }
  }
}

// Elements of one slot before a value head's state.
__device__ __forceinline__ int64_t head_offset(const AttentionForm& form, int32_t head) {
  return static_cast<int64_t>(head) * form.values * form.keys;
}

// Tokens after which the next checkpoint behind `done` tokens is due (K-3).
__device__ __forceinline__ int64_t next_checkpoint(const CheckpointRef& c, int64_t n, int64_t done, int64_t length) {
  int64_t next = length + 1;
  if (!c.offsets.present()) return next;
#pragma unroll 1
  for (int i = 0; i < c.offsets.columns; ++i) {
    const int64_t offset = c.offsets.at(n, i);
    if (offset > done && offset < next) next = offset;
  }
  return next;
}

// The state after `done` tokens to every checkpoint that asks for it.
template <class Tile>
__device__ __forceinline__ void store_checkpoints(const Tile& tile, const PrefillParams& p, const HeadPlace& at,
                                                  int64_t done, int first) {
  const CheckpointRef& c = p.checkpoints;
#pragma unroll 1
  for (int i = 0; i < c.offsets.columns; ++i) {
    if (c.offsets.at(at.n, i) != done) continue;
    int64_t to = at.n * c.row_stride + i * c.stride;
    if (c.slots.present()) {
      const int64_t slot = c.slots.at(at.n, i);
      if (!slot_is_live(slot, c.slot_count, p.rule.slots.null_slot)) continue;
      to = slot * c.stride;
    }
    store_rows(tile, c.data, c.dtype, to + head_offset(p.form, at.head), first, p.form);
  }
}

template <class Tile>
__device__ __forceinline__ void store_final(const Tile& tile, const PrefillParams& p, const HeadPlace& at,
                                            const StateRow& row, int first) {
  if (!p.stores) return;
  if (p.final.data != nullptr) {
    store_rows(tile, p.final.data, p.final_dtype, at.n * p.final.slot_stride + head_offset(p.form, at.head), first,
               p.form);
    return;
  }
  // A sequence of no tokens keeps its state's bits, one that was fresh becomes zero (P-11).
  if (row.write_slot < 0 || (at.span.length == 0 && !row.fresh && row.write_slot == row.read_slot)) return;
  store_rows(tile, p.pool.data, p.pool_dtype, row.write_slot * p.pool.slot_stride + head_offset(p.form, at.head),
             first, p.form);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    prefill_portable_kernel(const __grid_constant__ PrefillParams p) {
  using Tile = typename C::Tile;
  using Slot = typename C::Slot;
  Slot* const s = token_slots<Slot>();
  HeadPlace at = place_of_block(p.form, p.split);
  wait_for_previous_grid();
  if (at.n >= active_sequences(p.sequences)) return;
  at.span = sequence_span(p.sequences, at.n);
  const StateRow row = state_row(p.rule.slots, p.has_pool != 0, at.n);
  if (!row.active) return zero_outputs(p, at, at.head);

  const WarpRows<Tile> rows(at, p.split, p.form);
  Tile tile;
  load_rows(tile, row.fresh ? nullptr : p.pool.data, p.pool_dtype,
            row.read_slot * p.pool.slot_stride + head_offset(p.form, at.head), rows.first, p.form);
  int64_t due = next_checkpoint(p.checkpoints, at.n, 0, at.span.length);
  const PrefillSource<Slot> source(p, at);
  walk_tokens(source, length_of(at), p.split.chunk, s, rows.any, [&](int t, const Slot& slot) {
    tile.decay(slot.decay, slot.decay_low);
    (void)apply_token(tile, p, at, at.head, rows, slot);
    if (t + 1 < due) return;
    store_checkpoints(tile, p, at, due, rows.first);
    due = next_checkpoint(p.checkpoints, at.n, due, at.span.length);
  });
  if (rows.any) store_final(tile, p, at, row, rows.first);
}

}  // namespace kda::cuda

// Decode and verify with a state per token (V-1..V-9), K = V = 128: the kernel of the common call.
//
// Equations  E-1, E-4, E-5, E-7 per token in lean_token.cuh and recurrence/tile.cuh: the bits of heads.cuh.
// Grid       x = slices of the value heads of a sequence, so that neighbours read neighbouring states; y, z =
//            sequence.
// Block      one warp, in the shortest calls eight, each with 2 * kSlots state rows of a head. It prepares its
//            tokens itself: what several warps of a head do twice costs less than telling one another.
// Waiting    none in a block. The grid before: the index values are read and the state is asked for in the L2
//            while it runs; after its end the values are read again beside everything else (recurrence/early.cuh
//            has the why).
// Hazards    a part of the start state is loaded before anything is stored (V-5).
// Precision  fp32 throughout; the pool's dtype at loads and stores only (N-1, N-2).
// Limits     what cuda/host/decode_lean.cc asks of a call; any other goes to heads.cuh or the masked kernel.
#pragma once

#include "cuda/kernels/decode/lean_row.cuh"
#include "cuda/kernels/decode/lean_token.cuh"
#include "cuda/ptx/copy.h"

namespace kda::cuda {

// kMany: rows of several tokens. kStream: states are marked to leave the L2 first. kWarps: of a block; one, but in
// the shortest calls, where fewer blocks start, each warp has half the rows, and the next grid's blocks start only
// when the loads are out.
template <class Pool_, bool kMany_, bool kStream_, int kWarps_ = 1>
struct LeanConfig {
  using Pool = Pool_;
  static constexpr bool kMany = kMany_;
  static constexpr int kWarps = kWarps_;
  static constexpr bool kFew = kWarps > 1;
  static constexpr int kSlots = (sizeof(Pool) == 4 ? 4 : 8) / (kFew ? 2 : 1);  // as many bytes of a state in a lane
  using Tile = StateTile<Pool, Shape::kExact128, kSlots, kStream_>;
  static constexpr int kThreads = 32 * kWarps;
  // Resident on one multiprocessor, at least.
  static constexpr int kBlocks = kFew ? 3 : kSlots == 4 && !kMany ? 24 : 16;
  static constexpr int kSlices = 128 / Tile::kRows;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) decode_lean_kernel(const __grid_constant__ LeanParams p) {
  using Tile = typename C::Tile;
  touch_parameters(p);
  if (!C::kFew) ptx::launch_dependents();
  const uint32_t slice = blockIdx.x * C::kWarps + threadIdx.x / 32;
  const auto head = static_cast<int32_t>(slice / C::kSlices);
  const int32_t query_head = head >> p.query_shift;
  const int first = static_cast<int>(slice % C::kSlices) * Tile::kRows;
  const int mine = first + Tile::row_of(Tile::slot_of_lane());  // row of this lane's results
  const int32_t n = lean_sequence();
  bool early = lean_early(p, n);
  if (!early || n >= p.sequences) ptx::wait_for_prerequisites();
  if (n >= p.sequences) return;  // the grid's last z
  LeanIndex index;
  index.load(p, n);
  LeanRow row(p, index, n);
  LeanToken<Tile> token;
  typename Tile::Raw raw;
  unsigned v_bits;
  const auto gather_token = [&](int32_t t) {
    token.gather(p, t, head, query_head);
    v_bits = load_bits(p.v.at(t, head), mine, p.io);
  };
  const auto state_of = [&](int32_t slot) { return HeadState{p.pool.at(slot, head), 128, 128, true}; };
#pragma unroll 1
  for (;;) {
    LeanIndex now = index;
    const HeadState state = state_of(row.active ? row.slot : 0);
    if (early) {
      if (row.active && p.asks && lane_id() == 0) {
        ptx::prefetch_block_to_l2(static_cast<const typename C::Pool*>(state.data) + first * 128,
                                  static_cast<uint32_t>(Tile::kRows * 128 * sizeof(typename C::Pool)));
      }
      ptx::wait_for_prerequisites();
      now.load(p, n);
    }
    if (row.active && row.length > 0) {
      gather_token(row.begin);
      token.gather_head(p.gate_rule, head);
      Tile::load(raw, state, first);
    }
    if (C::kFew) ptx::launch_dependents();
    if (!early || !__any_sync(kFullMask, now.value != index.value)) break;
    early = false;
    index = now;
    row = LeanRow(p, index, n);
  }
  if (!row.looked_at) return;
  if (!row.active) return lean_zero(p, row, head, first, Tile::kRows, lane_id());
  if (row.length == 0) return;  // it keeps its bits (P-11)
  const int last = C::kMany ? row.length - 1 : 0;
  Tile tile;
  tile.widen(raw);
#pragma unroll 1
  for (int t = 0;; ++t) {
    token.finish(p);
    const float v = float_of_bits(v_bits, p.io);
    const float kq = Tile::dot_lanes(token.k, token.q);
    if (C::kMany && t < last) gather_token(row.begin + t + 1);
    const int32_t slot = C::kMany ? index.get(t) : row.slot;
    char* out = p.out.at(row.begin + t, head);
    tile.decay_lanes(token.decay);
    const auto r = tile.token_lanes(token.k, token.q, kq, token.beta, v, p.scale);
    if (!C::kMany || LeanRow::is_live(p, slot)) tile.store(state_of(slot), first);
    if (Tile::owns_row()) store_element(out, mine, p.out_dtype, r.o);
    if (t == last) return;
  }
}

}  // namespace kda::cuda

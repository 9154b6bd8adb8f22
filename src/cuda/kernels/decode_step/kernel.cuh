// conv + SiLU, gate, recurrence and gated norm of one head in one pass (spec V-15); every rounding is that of the
// chain conv -> decode -> gated norm (L-7, L-8), whose functions it shares.
//
// Grid       x = (value head, slice of value rows), y and z = sequence. All blocks of one query head form a
//            cluster.
// Block      eight warps own 16 state rows each, in registers; all prepare tokens, and at the end a warp takes a
//            token's norm.
// Shared     states on their way, a place a lane (64 KB of fp32, 32 KB of 16 bits); tokens (1.7 KB + z, o, raw k
//            each).
// Waiting    block barrier: tokens prepared. Cluster arrives there and waits after the tokens: by then every block
//            has read the old windows, so the blocks that own channels write the new ones, and every peer runs, so
//            partial sums of squares go straight into its shared memory. A second cluster barrier if a head has
//            slices.
// Hazards    windows: W-5 by the cluster barrier; state: V-5 by row; records: as in decode/kernel.cuh.
// Precision  fp32; roundings to io after conv and after the recurrence, then one at the output.
// Limits     K = V = 128, W = 4, 16-byte state rows, at most eight blocks a query head (HV/H * slices).
#pragma once

#include "cuda/kernels/decode/kernel.cuh"
#include "cuda/kernels/decode_step/source.cuh"
#include "cuda/kernels/gated_norm/norm.cuh"

namespace kda::cuda {

template <class Pool_, Flow kFlow_>
struct StepConfig {
  using Pool = Pool_;
  using Tile = StateTile<Pool, Shape::kExact128, 8>;
  static constexpr Flow kFlow = kFlow_;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kBlocks = 2;
  using Slot = StepSlot<128, 128>;
  static constexpr int kStateBytes = kWarps * Tile::kStage;
};

struct StepPlace {
  RowPlace row;
  ConvRow conv;
};

// Asks the L2 for the windows of a head's channels: a warp a part.
__device__ __forceinline__ void ask_for_windows(const DecodeStepParams& p, const HeadPlace& at, int64_t slot,
                                                int32_t head) {
  const int part = warp_id() % 4, lane = LaneBits<4>::first();
  if (part > 2 || (part == 2 && lane >= at.rows)) return;
  const WindowRef& w = p.conv[part].window;
  const int64_t first = part == 2 ? static_cast<int64_t>(head) * 128 + at.first_row
                                  : static_cast<int64_t>(query_head_of(p.form, head)) * 128;
#pragma unroll
  for (int column = 0; column < 3; ++column) {
    const int64_t byte = window_offset(w, slot, first + lane, column) * (w.dtype == Dtype::kFp32 ? 4 : 2);
    ptx::prefetch_to_l2(static_cast<const char*>(w.data) + byte);
  }
}

// The conv's row where DecodeLoads have decided the recurrence's (recurrence/early.cuh): as conv_row() with
// accepted 1.
__device__ __forceinline__ ConvRow decided_conv_row(const DecodeStepParams& p, const DecodeLoads& loads,
                                                    const Span& span, int64_t n) {
  const SlotRef& t = p.conv_rule.slots;
  const bool packed = !t.slots.present();
  const int64_t slot = packed ? n : loads.slot.value();
  const bool live = slot_is_live(slot, t.count, packed ? -1 : t.null_slot);
  ConvRow row;
  row.span = span;
  row.fresh = t.initial == Initial::kNone || loads.flag == 0;
  row.read_slot = slot;
  row.write_slot = live ? slot : -1;
  row.active = (live || (row.fresh && packed)) && (p.conv_rule.final_window || span.length <= p.conv_rule.width);
  return row;
}

__device__ __forceinline__ void find_conv(const DecodeStepParams& p, const EarlyRow& early, StepPlace& s_place) {
  const HeadPlace& at = s_place.row.at;
  const bool decided =
      early.decided && early.loads.accepted == 1 && p.rule.records == 0 && !p.rule.slots.write_slots.present();
  const ConvRow row = decided ? decided_conv_row(p, early.loads, at.span, at.n)
                              : conv_row(p.conv_rule, p.records, true, p.sequences, at.n);
  if (lane_id() == 0) s_place.conv = row;
  __syncwarp();
}

// Windows of the channels that this block owns: its value rows, and q and k for the first block of a query head.
__device__ __forceinline__ void store_step_windows(const DecodeStepParams& p, const HeadPlace& at,
                                                   const ConvRow& conv) {
  if (!conv.active) return;
  const bool leads =
      at.first_row == 0 && (p.form.heads == p.form.value_heads || at.head % (p.form.value_heads / p.form.heads) == 0);
  const int count = at.rows + (leads ? 256 : 0);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    const int part = i < at.rows ? 2 : (i - at.rows) / 128;
    const int64_t channel = part == 2 ? static_cast<int64_t>(at.head) * 128 + at.first_row + i
                                      : static_cast<int64_t>(at.query_head) * 128 + (i - at.rows) % 128;
    const ConvChannels& c = p.conv[part];
    if (p.conv_rule.mode == ConvMode::kRecords && conv.offset > 0) fold_window(c.window, conv, p.conv_width, channel);
    store_window(c, conv, p.conv_rule, p.form.io, p.conv_width, channel);
  }
}

// The same for a row of one token, whose windows are in shared memory.
__device__ __forceinline__ void store_kept_windows(const DecodeStepParams& p, const HeadPlace& at,
                                                   const ConvRow& conv, const unsigned (*s_window)[3][128]) {
  if (!conv.active || conv.write_slot < 0) return;
  const bool leads =
      at.first_row == 0 && (p.form.heads == p.form.value_heads || at.head % (p.form.value_heads / p.form.heads) == 0);
  const int count = at.rows + (leads ? 256 : 0);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    const int part = i < at.rows ? 2 : (i - at.rows) / 128, c = part == 2 ? i : (i - at.rows) % 128;
    const int64_t channel = part == 2 ? static_cast<int64_t>(at.head) * 128 + at.first_row + c
                                      : static_cast<int64_t>(at.query_head) * 128 + c;
    const WindowRef& w = p.conv[part].window;
#pragma unroll
    for (int column = 0; column < 3; ++column) {
      store_in_window(w, conv.write_slot, channel, column, {s_window[part][column][c], w.dtype});
    }
  }
}

// The gated norm of every token; the sum of squares is gated_norm's tree: lanes own four consecutive elements.
template <class Slot>
__device__ __forceinline__ void norm_rows(const DecodeStepParams& p, const HeadPlace& at, Slot* s) {
  const int first = lane_id() * 4;
  __syncthreads();  // s.o
  for (int i = warp_id(); i < length_of(at); i += static_cast<int>(blockDim.x / 32)) {
    const float4 o = *reinterpret_cast<const float4*>(s[i].o + first);
    const float4 z = *reinterpret_cast<const float4*>(s[i].z + first);
    const float x[4] = {o.x, o.y, o.z, o.w}, gate[4] = {z.x, z.y, z.z, z.w};
    const float factor = norm_factor(tree_of_lanes<32>(tree_of_squares<4>(x)), 128, p.eps);
    if (s[i].out_row < 0) continue;
    const int64_t to = p.out.offset(at.span.batch, s[i].out_row, at.head) + first;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      store_element(p.out.data, to + e, p.out.dtype, gated_value(x[e], factor, p.norm_weight[first + e], gate[e]));
    }
  }
}

// Key (from shared memory) and raw gate of a row's tokens into its records (P-3).
template <class Slot>
__device__ __forceinline__ void record_step_tokens(const DecodeStepParams& p, const HeadPlace& at, int64_t record,
                                                   const Slot* s) {
  for (int i = static_cast<int>(threadIdx.x); i < length_of(at) * 128; i += static_cast<int>(blockDim.x)) {
    const int t = i / 128, c = i % 128;
    const int64_t to = record_kg_offset(p.records, record, at.head, t) + c;
    const float g =
        load_element(p.gate.data, p.gate.offset(at.span.batch, at.span.begin + t, at.head) + c, p.gate.dtype);
    store_element(p.records.kg, to, p.gate.dtype, s[t].raw_k[c]);
    store_element(p.records.kg, to + 128, p.gate.dtype, g);
  }
}

// Takes the state that is on its way, commits recorded tokens (V-10b), applies the row's, stores.
template <class C>
__device__ __forceinline__ void apply_step_tokens(const DecodeStepParams& p, const RowPlace& place,
                                                  const WarpRows<typename C::Tile>& rows, uint32_t s_stage,
                                                  typename C::Slot* s_recorded, int committed) {
  using Tile = typename C::Tile;
  constexpr bool kRecords = C::kFlow == Flow::kRecords;
  const HeadPlace& at = place.at;
  const DecodeRow& row = place.row;
  auto* const s = s_recorded + committed;
  Tile tile;
  if (rows.any) {
    typename Tile::Raw raw;
    Tile::unstage(raw, s_stage);
    tile.widen(raw);
  }
  const auto store = [&](int64_t slot) {
    if (slot >= 0) tile.store(head_state<typename C::Pool>(p, slot, at.head), rows.first);
  };
  if (committed > 0) {
    replay_tokens(tile, at, rows, s_recorded, committed);
    if (rows.any) store(row.start_slot);
    tile.round_to_pool();
  }
#pragma unroll 1
  for (int i = 0; i < length_of(at) && rows.any; ++i) {
    tile.decay(s[i].decay);
    const auto r = tile.token(s[i].k, s[i].q, s[i].beta, s[i].v[rows.mine], p.form.scale);
    if (Tile::owns_row()) {
      if (p.norm) s[i].o[rows.mine] = round_element(r.o, p.form.io);
      else if (s[i].out_row >= 0)
        store_element(p.out.data, p.out.offset(at.span.batch, s[i].out_row, at.head) + at.first_row + rows.mine,
                      p.out.dtype, r.o);
      if (kRecords) p.records.u[record_u_offset(p.records, row.record, at.head, i) + at.first_row + rows.mine] = r.u;
    }
    if (!kRecords && p.rule.per_token) store(s[i].store_slot);
  }
  // A fresh row of no tokens becomes zero, another keeps its bits (P-11).
  if (!kRecords && rows.any && (at.span.length == 0 ? row.fresh : p.rule.per_token == 0))
    store(store_slot(p.rule.slots, at.n, 0));
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    decode_step_kernel(const __grid_constant__ DecodeStepParams p) {
  using Tile = typename C::Tile;
  using Slot = typename C::Slot;
  using Pool = typename C::Pool;
  constexpr bool kRecords = C::kFlow == Flow::kRecords;
  __shared__ StepPlace s_place[C::kWarps];
  __shared__ unsigned s_window[3][3][128];
  touch_parameters(p);
  StepPlace& place = s_place[warp_id()];
  EarlyRow early;
  const auto ask = [&](const HeadPlace& where, const DecodeRow& start) {
    if (start.fresh) return;
    if (threadIdx.x == C::kThreads - 1) ask_for_state<Pool>(p, where, start.start_slot, where.head);
    if (warp_id() < 4) ask_for_windows(p, where, start.start_slot, where.head);
  };
  // All blocks of a cluster see the same rows, so they leave together.
  if (!early.find(p, place.row, ask)) return;
  const HeadPlace& at = place.row.at;
  const DecodeRow& row = place.row.row;
  const ConvRow& conv = place.conv;
  const WarpRows<Tile> rows(at, p.split, p.form);
  auto* const s_states = token_slots<unsigned char>();
  const auto s_stage = static_cast<uint32_t>(__cvta_generic_to_shared(s_states)) + warp_id() * Tile::kStage;
  const DecodeLoads now = early.load_again(p, place.row);
  do {
    ptx::copy_async_wait<0>();  // nothing is on its way into a place twice
    if (row.active && rows.any) {
      Tile::stage(s_stage, head_state<Pool>(p, row.fresh ? 0 : row.start_slot, at.head), rows.first, !row.fresh);
    }
  } while (early.changed(now, p, place.row));
  if (!is_looked_at(now, p.sequences, at.n)) return;
  find_conv(p, early, place);

  const int committed = kRecords ? static_cast<int>(row.commit) : 0;
  const bool one_token = !kRecords && row.active && length_of(at) == 1 && p.conv_rule.final_window == 0;
  Slot* const s_recorded = reinterpret_cast<Slot*>(s_states + C::kStateBytes);
  Slot* const s = s_recorded + committed;
  if (row.active) {
    if (threadIdx.x == C::kThreads - 1) ask_for_later_block<Pool>(p);
    prepare_parts(ConvSource<Slot>{p, at, conv, p.rule.per_token != 0 && !kRecords, one_token ? s_window : nullptr},
                  length_of(at), s);
    if (committed > 0) {
      prepare_parts(RecordSource<Slot>{p.records, p.gate_rule, p.form, p.gate.dtype, at, row.record}, committed,
                    s_recorded);
    }
    __syncthreads();
    if (p.split.clustered) ptx::cluster_arrive_relaxed();  // what was to be read has been used
    apply_step_tokens<C>(p, place.row, rows, s_stage, s_recorded, committed);
    if (p.split.clustered) ptx::cluster_wait();
    if (p.norm) norm_rows(p, at, s);
  } else {
    zero_outputs(p, at, at.head);
  }
  if (one_token) store_kept_windows(p, at, conv, s_window);
  else store_step_windows(p, at, conv);
  if (kRecords && row.active) record_step_tokens(p, at, row.record, s);
}

template <class C>
KernelInfo step_info() {
  KernelInfo info = kernel_info<C>(reinterpret_cast<const void*>(decode_step_kernel<C>), "decode_step_kernel");
  info.block_bytes = C::kStateBytes;
  return info;
}

template <class Pool>
KernelInfo decode_step_kernel_of(bool records) {
  return records ? step_info<StepConfig<Pool, Flow::kRecords>>() : step_info<StepConfig<Pool, Flow::kColumns>>();
}

}  // namespace kda::cuda

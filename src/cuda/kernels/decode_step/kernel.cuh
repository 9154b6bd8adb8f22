// conv + SiLU, gate, recurrence and gated norm of one head in one pass (spec V-15); every rounding is that of the chain
// conv -> decode -> gated norm (L-7, L-8), whose functions it shares.
//
// Grid       x = (value head, slice of value rows), y and z = sequence. All blocks of one query head form a cluster.
// Block      eight warps own 16 state rows each, in registers; all prepare tokens in shared memory (1.7 KB + z, o, raw k
//            each), and at the end a warp takes a token's norm.
// Waiting    block barrier: tokens prepared. Cluster arrives there and waits after the tokens: by then every block has
//            read the old windows, so the blocks that own channels write the new ones, and every peer runs, so partial
//            sums of squares go straight into its shared memory. A second cluster barrier if a head has slices.
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
};

struct StepPlace {
  RowPlace row;
  ConvRow conv;
};

// As find_place, with the conv's row.
__device__ __forceinline__ bool find_step_place(const DecodeStepParams& p, StepPlace& s_place) {
  HeadPlace at = place_of_block(p.form, p.split);
  wait_for_previous_grid();
  if (at.n >= p.sequences.count) return false;
  const DecodeLoads loads = load_decode_row(p.rule, p.sequences, at.n);
  const ConvRow conv = conv_row(p.conv_rule, p.records, true, p.sequences, at.n);
  if (at.n >= active_sequences(p.sequences)) return false;
  const DecodeRow row = resolve_decode_row(loads, p.rule, p.records, p.sequences, at.n);
  at.span = row.span;
  if (lane_id() == 0) {
    s_place.row.at = at;
    s_place.row.row = row;
    s_place.conv = conv;
  }
  __syncwarp();
  return true;
}

// Windows of the channels that this block owns: its value rows, and q and k for the first block of a query head.
__device__ __forceinline__ void store_step_windows(const DecodeStepParams& p, const HeadPlace& at, const ConvRow& conv) {
  if (!conv.active) return;
  const bool leads = at.first_row == 0 && (p.form.heads == p.form.value_heads || at.head % (p.form.value_heads / p.form.heads) == 0);
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

// Writes x into the same shared variable of another block of the cluster.
__device__ __forceinline__ void store_in_peer(float* s_variable, uint32_t rank, float x) {
  const auto local = static_cast<uint32_t>(__cvta_generic_to_shared(s_variable));
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(x) : "memory");
}

// The gated norm of this block's rows of every token; the sum of squares is gated_norm's tree: lanes own four
// consecutive elements of the head, those of other slices count as zero here, and slices are the tree's upper levels.
template <class Slot>
__device__ __forceinline__ void norm_rows(const DecodeStepParams& p, const HeadPlace& at, Slot* s, float (*s_partial)[kMostSlices]) {
  const int first = lane_id() * 4;
  const bool mine = first >= at.first_row && first < at.first_row + at.rows;
  const int slices = p.split.slices, slice = at.first_row / p.split.rows_per_block;
  __syncthreads();  // s.o
  const auto square_sum = [&](int i) {
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = mine ? s[i].o[first - at.first_row + e] : 0.0f;
    return tree_of_lanes<32>(tree_of_squares<4>(x));
  };
  if (slices > 1) {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    for (int i = warp_id(); i < length_of(at); i += static_cast<int>(blockDim.x / 32)) {
      const float sum = square_sum(i);
      if (lane_id() < slices) store_in_peer(&s_partial[i][slice], rank - slice + lane_id(), sum);
    }
    cluster_arrive();
    cluster_wait();
  }
  for (int i = warp_id(); i < length_of(at); i += static_cast<int>(blockDim.x / 32)) {
    float sum = 0.0f;
    if (slices > 1) {
      sum = tree_of_lanes<kMostSlices>(lane_id() % kMostSlices < slices ? s_partial[i][lane_id() % kMostSlices] : 0.0f);
    } else {
      sum = square_sum(i);
    }
    const float factor = norm_factor(sum, 128, p.eps);
    if (!mine || s[i].out_row < 0) continue;
    const int64_t to = p.out.offset(at.span.batch, s[i].out_row, at.head) + first;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = first - at.first_row + e;
      store_element(p.out.data, to + e, p.out.dtype, gated_value(s[i].o[r], factor, p.norm_weight[first + e], s[i].z[r]));
    }
  }
}

// Key (from shared memory) and raw gate of a row's tokens into its records (P-3).
template <class Slot>
__device__ __forceinline__ void record_step_tokens(const DecodeStepParams& p, const HeadPlace& at, int64_t record, const Slot* s) {
  for (int i = static_cast<int>(threadIdx.x); i < length_of(at) * 128; i += static_cast<int>(blockDim.x)) {
    const int t = i / 128, c = i % 128;
    const int64_t to = record_kg_offset(p.records, record, at.head, t) + c;
    const float g = load_element(p.gate.data, p.gate.offset(at.span.batch, at.span.begin + t, at.head) + c, p.gate.dtype);
    store_element(p.records.kg, to, p.gate.dtype, s[t].raw_k[c]);
    store_element(p.records.kg, to + 128, p.gate.dtype, g);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) decode_step_kernel(const __grid_constant__ DecodeStepParams p) {
  using Tile = typename C::Tile;
  using Slot = typename C::Slot;
  constexpr bool kRecords = C::kFlow == Flow::kRecords;
  __shared__ StepPlace s_place[C::kWarps];
  __shared__ float s_partial[16][kMostSlices];  // KDA_MAX_VERIFY tokens
  touch_parameters(p);
  StepPlace& place = s_place[warp_id()];
  // All blocks of a cluster see the same rows, so they leave together.
  if (!find_step_place(p, place)) return;
  const HeadPlace& at = place.row.at;
  const DecodeRow& row = place.row.row;
  const ConvRow& conv = place.conv;
  if (!row.active) {
    zero_outputs(p, at);
    return store_step_windows(p, at, conv);
  }

  const WarpRows<Tile> rows(at, p.split, p.form);
  const int committed = kRecords ? static_cast<int>(row.commit) : 0;
  Slot* const s_recorded = token_slots<Slot>();
  Slot* const s = s_recorded + committed;
  typename Tile::Raw raw;
  const ConvSource<Slot> source{p, at, conv, p.rule.per_token != 0 && !kRecords};
  PartQueue<ConvSource<Slot>> parts(source);
  parts.start(0, length_of(at));
  if (rows.any && !row.fresh) Tile::load(raw, head_state<typename C::Pool>(p, row.start_slot, at.head), rows.first);
  else Tile::zero(raw);
  parts.finish(0, length_of(at), s);
  if (committed > 0) {
    const RecordSource<Slot> recorded{p.records, p.gate_rule, p.form, p.gate.dtype, at, row.record};
    PartQueue<RecordSource<Slot>> old(recorded);
    old.start(0, committed);
    old.finish(0, committed, s_recorded);
  }
  __syncthreads();
  cluster_arrive();

  Tile tile;
  tile.widen(raw);
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
    const auto r = tile.token(s[i].decay, s[i].k, s[i].q, s[i].beta, s[i].v[rows.mine], p.form.scale);
    if (Tile::owns_row()) {
      if (p.norm) s[i].o[rows.mine] = round_element(r.o, p.form.io);
      else if (s[i].out_row >= 0) store_element(p.out.data, p.out.offset(at.span.batch, s[i].out_row, at.head) + at.first_row + rows.mine, p.out.dtype, r.o);
      if (kRecords) p.records.u[record_u_offset(p.records, row.record, at.head, i) + at.first_row + rows.mine] = r.u;
    }
    if (!kRecords && p.rule.per_token) store(s[i].store_slot);
  }
  // A fresh row of no tokens becomes zero, another keeps its bits (P-11).
  if (!kRecords && rows.any && (at.span.length == 0 ? row.fresh : p.rule.per_token == 0)) store(store_slot(p.rule.slots, at.n, 0));
  cluster_wait();
  if (p.norm) norm_rows(p, at, s, s_partial);
  store_step_windows(p, at, conv);
  if (kRecords && at.first_row == 0) record_step_tokens(p, at, row.record, s);
}

template <class Pool>
KernelInfo decode_step_kernel_of(bool records) {
  using Columns = StepConfig<Pool, Flow::kColumns>;
  using Records = StepConfig<Pool, Flow::kRecords>;
  return records ? kernel_info<Records>(reinterpret_cast<const void*>(decode_step_kernel<Records>), "decode_step_kernel")
                 : kernel_info<Columns>(reinterpret_cast<const void*>(decode_step_kernel<Columns>), "decode_step_kernel");
}

}  // namespace kda::cuda

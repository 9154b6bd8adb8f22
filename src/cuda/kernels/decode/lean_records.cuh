// verify_record with and without folded commit (V-10, V-10b), K = V = 128: the kernel of the common call. A commit is
// one of no new tokens.
//
// Equations  E-1, E-4, E-5, E-7 per token, replay of records as V-10; recurrence/tile.cuh. The bits of kernel.cuh.
// Grid       x = value head, y and z = sequence.
// Block      sixteen warps with eight state rows each, two blocks a multiprocessor. A warp prepares whole tokens, new
//            ones first: what a recorded one needs is asked for before it is known whether it counts.
// Shared     the head's state on its way, a place a lane (64 or 32 KB), and the tokens: q, k, e^g, v or u, and what
// is
//            to be recorded, 2.8 KB each.
// Waiting    one block barrier between preparing tokens and using them. The grid before: as in lean.cuh.
// Hazards    all old records of a head are in shared memory before the first new one is written (the barrier).
//            Counts are set by a kernel of their own after this one: every head of a row reads the old count.
// Precision  fp32 throughout; the pool's dtype at loads and stores only (N-1, N-2).
// Limits     what cuda/host/decode_lean.cc asks of a call; any other goes to kernel.cuh.
#pragma once

#include "cuda/kernels/decode/lean_gate.cuh"
#include "cuda/kernels/decode/lean_row.cuh"
#include "cuda/kernels/recurrence/tile.cuh"

namespace kda::cuda {

template <class Pool_>
struct LeanRecordConfig {
  using Pool = Pool_;
  using Tile = StateTile<Pool, Shape::kExact128, 4>;
  static constexpr int kWarps = 128 / Tile::kRows, kThreads = 32 * kWarps;
  static constexpr int kBlocks = 2;  // resident on one multiprocessor, at least
  static constexpr int kStateBytes = kWarps * Tile::kStage;
};

// One prepared token in shared memory.
struct alignas(16) LeanRecordToken {
  float k[128], q[128], decay[128];
  float v[128];         // or u of a recorded token
  uint4 gate_bits[32];  // of a new token, as loaded
  uint2 k_bits[32];
  float beta, kq;
};

// One warp prepares a token, four neighbouring keys and values a lane. Sums as in recurrence/token.cuh and the tile.
template <class Tile>
struct RecordPreparer {
  const LeanRecordParams& p;
  int32_t head, query_head;

  static __device__ __forceinline__ int key() { return lane_id() * 4; }

  __device__ __forceinline__ void prepare_new(int32_t row, LeanRecordToken& s) const {
    const LeanParams& c = p.call;
    const auto q_bits = *reinterpret_cast<const uint2*>(c.q.at(row, query_head) + key() * 2);
    const auto k_bits = *reinterpret_cast<const uint2*>(c.k.at(row, query_head) + key() * 2);
    const auto v_bits = *reinterpret_cast<const uint2*>(c.v.at(row, head) + key() * 2);
    const uint4 gate_bits = load_gates(c.gate.at(row, head), key(), c.gate_dtype);
    const unsigned beta_bits = load_bits(c.beta.at(row, head), 0, c.beta_dtype);
    put_decays(gate_bits, s);
    s.gate_bits[lane_id()] = gate_bits;
    s.k_bits[lane_id()] = k_bits;
    float q[4], k[4], v[4];
    widen_four(q, q_bits, c.io);
    widen_four(k, k_bits, c.io);
    widen_four(v, v_bits, c.io);
    store_lane(v, s.v);
    normalise(q);
    normalise(k);
    store_lane(q, s.q);
    store_lane(k, s.k);
    const float kq = dot(k, q);
    const float beta = beta_value(float_of_bits(beta_bits, c.beta_dtype), c.beta_logits != 0, c.beta_doubled != 0);
    if (lane_id() == 0) s.beta = beta, s.kq = kq;
  }

  // `committed()` is asked for after the loads; nothing is done for a token behind it.
  template <class Committed>
  __device__ __forceinline__ void prepare_old(int32_t record, int t, const Committed& committed,
                                              LeanRecordToken& s) const {
    const bool wide = p.call.gate_dtype == Dtype::kFp32;
    const char* kg = key_gate(record, t);
    const char* u = p.u.at(record, head) + static_cast<uint32_t>(t) * p.u_token_bytes;
    const uint4 k_bits = load_gates(kg, key(), p.call.gate_dtype);
    const uint4 gate_bits = load_gates(kg + (wide ? 512 : 256), key(), p.call.gate_dtype);
    const auto u_bits = *reinterpret_cast<const float4*>(u + key() * 4);
    if (t >= committed()) return;
    put_decays(gate_bits, s);
    float k[4];
    if (wide) {
      k[0] = __uint_as_float(k_bits.x), k[1] = __uint_as_float(k_bits.y);
      k[2] = __uint_as_float(k_bits.z), k[3] = __uint_as_float(k_bits.w);
    } else {
      widen_four(k, make_uint2(k_bits.x, k_bits.y), p.call.gate_dtype);
    }
    normalise(k);
    store_lane(k, s.k);
    *reinterpret_cast<float4*>(s.v + key()) = u_bits;
  }

  // Key and raw gate into the records, in the gate's dtype: the io dtype or fp32, so that a key fits exactly (P-3).
  __device__ __forceinline__ void record(int32_t record, int t, const LeanRecordToken& s) const {
    char* kg = key_gate(record, t);
    const uint2 k_bits = s.k_bits[lane_id()];
    const uint4 gate_bits = s.gate_bits[lane_id()];
    if (p.call.gate_dtype == Dtype::kFp32) {
      float k[4];
      widen_four(k, k_bits, p.call.io);
      *reinterpret_cast<float4*>(kg + key() * 4) = make_float4(k[0], k[1], k[2], k[3]);
      *reinterpret_cast<uint4*>(kg + 512 + key() * 4) = gate_bits;
    } else {
      *reinterpret_cast<uint2*>(kg + key() * 2) = k_bits;
      *reinterpret_cast<uint2*>(kg + 256 + key() * 2) = make_uint2(gate_bits.x, gate_bits.y);
    }
  }

 private:
  __device__ __forceinline__ char* key_gate(int32_t record, int t) const {
    return p.kg.at(record, head) + static_cast<uint32_t>(t) * p.kg_token_bytes;
  }

  __device__ __forceinline__ void put_decays(uint4 bits, LeanRecordToken& s) const {
    const GateRef& rule = p.call.gate_rule;
    float d[4];
    decays_of(rule, bits, p.call.gate_dtype, load_bias(rule, head, key()), load_A_log(rule, head), d);
    store_lane(d, s.decay);
  }

  __device__ __forceinline__ void normalise(float (&x)[4]) const {
    if (!p.call.qk_norm) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = __fmaf_rn(x[i], x[i], sum);
    const float r = inverse_root(__fadd_rn(lane_sum<32>(sum), 1e-6f));
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(x[i], r);
  }

  // Tile::dot_lanes(): a chain over a lane's eight keys, which here are two lanes' own, then the sum over the lanes.
  static __device__ __forceinline__ float dot(const float (&k)[4], const float (&q)[4]) {
    constexpr int kNext = Tile::kVector == 4 ? 16 : 1;  // lanes from the first four keys to the others
    float x = __fmul_rn(k[0], q[0]);
#pragma unroll
    for (int i = 1; i < 4; ++i) x = __fmaf_rn(k[i], q[i], x);
    x = __shfl_xor_sync(kFullMask, x, kNext);
#pragma unroll
    for (int i = 0; i < 4; ++i) x = __fmaf_rn(k[i], q[i], x);
#pragma unroll
    for (int mask = kNext == 16 ? 8 : 16; mask > (kNext == 16 ? 0 : 1); mask /= 2)
      x = __fadd_rn(x, __shfl_xor_sync(kFullMask, x, mask));
    return __shfl_sync(kFullMask, x, 31, 32);
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    verify_record_lean_kernel(const __grid_constant__ LeanRecordParams params) {
  using Tile = typename C::Tile;
  const LeanParams& p = params.call;
  touch_parameters(params);
  ptx::launch_dependents();
  auto* const s_states = token_slots<unsigned char>();
  auto* const s = reinterpret_cast<LeanRecordToken*>(s_states + C::kStateBytes);
  const auto s_stage = static_cast<uint32_t>(__cvta_generic_to_shared(s_states)) + warp_id() * Tile::kStage;
  const auto head = static_cast<int32_t>(blockIdx.x);
  const int first = warp_id() * Tile::kRows;
  const int32_t n = lean_sequence();
  const bool early = lean_early(p, n);
  if (!early || n >= p.sequences) ptx::wait_for_prerequisites();
  if (n >= p.sequences) return;  // the grid's last z
  LeanIndex index;
  index.load(p, n);
  if (early) {
    const int32_t slot = index.get(0);
    if (threadIdx.x == 0 && LeanRow::is_live(p, slot))
      ptx::prefetch_block_to_l2(p.pool.at(slot, head), 128 * 128 * sizeof(typename C::Pool));
    ptx::wait_for_prerequisites();
    index.load(p, n);
  }
  const LeanRow row(p, index, n);
  if (!row.looked_at) return;
  int32_t record = row.first_slot;
  if (params.record_rows != nullptr) record = params.record_rows[static_cast<int64_t>(n) * params.record_rows_stride];
  const bool known = LeanRow::is_live(p, row.first_slot) && row.length <= p.columns &&
                     static_cast<uint32_t>(record) < static_cast<uint32_t>(params.rows);
  if (!known) return lean_zero(p, row, head, 0, 128, static_cast<int>(threadIdx.x));
  const HeadState state{p.pool.at(row.first_slot, head), 128, 128, true};
  Tile::stage(s_stage, state, first, true);
  int32_t count = 0;
  if (params.fold) count = params.count[static_cast<int64_t>(record) * params.count_stride];
  const auto committed_of = [&] { return static_cast<int>(committed_tokens(count, row.accepted, p.columns)); };
  const RecordPreparer<Tile> preparer{params, head, head >> p.query_shift};
  const int places = row.length + (params.fold ? p.columns : 0);
#pragma unroll 1
  for (int j = warp_id(); j < places; j += C::kWarps) {
    if (j < row.length) preparer.prepare_new(row.begin + j, s[j]);
    else preparer.prepare_old(record, j - row.length, committed_of, s[j]);
  }
  const int committed = params.fold ? committed_of() : 0;
  if (committed < 0) return lean_zero(p, row, head, 0, 128, static_cast<int>(threadIdx.x));
  __syncthreads();
#pragma unroll 1
  for (int j = warp_id(); j < row.length; j += C::kWarps) preparer.record(record, j, s[j]);
  Tile tile;
  {
    typename Tile::Raw raw;
    Tile::unstage(raw, s_stage);
    tile.widen(raw);
  }
  const int mine = first + Tile::row_of(Tile::slot_of_lane());
  if (committed > 0) {
    const LeanRecordToken* const old = s + row.length;
#pragma unroll 1
    for (int j = 0; j < committed; ++j) {
      tile.decay(old[j].decay);
      tile.replay(old[j].k, old[j].v[mine]);
    }
    tile.store(state, first);
    tile.round_to_pool();
  }
  char* u = params.u.at(record, head) + mine * 4;
#pragma unroll 1
  for (int t = 0; t < row.length; ++t, u += params.u_token_bytes) {
    const LeanRecordToken& token = s[t];
    tile.decay(token.decay);
    const auto r = tile.token(token.k, token.q, token.kq, token.beta, token.v[mine], p.scale);
    if (!Tile::owns_row()) continue;
    store_element(p.out.at(row.begin + t, head), mine, p.out_dtype, r.o);
    *reinterpret_cast<float*>(u) = r.u;
  }
}

}  // namespace kda::cuda

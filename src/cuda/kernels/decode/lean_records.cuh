// verify_record with and without folded commit (V-10, V-10b), K = V = 128: the kernel of the common call. A commit is
// one of no new tokens.
//
// Equations  E-1, E-4, E-5, E-7 per token, replay of records as V-10; recurrence/tile.cuh. The bits of kernel.cuh.
// Grid       x = value head, y and z = sequence.
// Block      eight warps with sixteen state rows each, two blocks a multiprocessor. A warp prepares whole tokens.
// Shared     the tokens: q, k, e^g, v or u, and what is to be recorded, 2.8 KB each. Vectors over K lie in the
//            order of the tile's lanes, so that eight lanes' pieces are neighbours whatever the pool's dtype.
// Waiting    one block barrier between preparing tokens and using them. State loads are issued before it. The grid
//            before: as in lean.cuh.
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
  using Tile = StateTile<Pool, Shape::kExact128, 8>;
  static constexpr int kWarps = 128 / Tile::kRows, kThreads = 32 * kWarps;
  static constexpr int kBlocks = 2;  // resident on one multiprocessor, at least
};

// One prepared token in shared memory.
struct alignas(16) LeanRecordToken {
  float4 k[32], q[32], decay[32];  // group g of four keys of the tile's lane16 l: [16 * g + l]
  float v[128];                    // or u of a recorded token
  uint4 gate_bits[32];             // of a new token, as loaded
  uint2 k_bits[32];
  float beta, kq;
};

// A lane's part of a vector over K.
template <class Tile>
__device__ __forceinline__ void take_lane(float (&x)[Tile::kElements], const float4 (&s)[32]) {
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const float4 v = s[16 * g + Tile::lane16()];
    x[4 * g] = v.x, x[4 * g + 1] = v.y, x[4 * g + 2] = v.z, x[4 * g + 3] = v.w;
  }
}

// One warp prepares a token, four neighbouring keys and values a lane. Sums as in recurrence/token.cuh and the tile.
template <class Tile>
struct RecordPreparer {
  const LeanRecordParams& p;
  int32_t head, query_head;

  static __device__ __forceinline__ int key() { return lane_id() * 4; }
  // Where a lane's four keys lie in a vector: they are a group of lane16 lane_id() % 16, or half of lane_id() / 2's.
  static __device__ __forceinline__ int place() {
    return Tile::kVector == 4 ? lane_id() : lane_id() % 2 * 16 + lane_id() / 2;
  }
  static __device__ __forceinline__ void put(float4 (&s)[32], const float (&x)[4]) {
    s[place()] = make_float4(x[0], x[1], x[2], x[3]);
  }

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
    put(s.q, q);
    put(s.k, k);
    const float kq = dot(k, q);
    const float beta = beta_value(float_of_bits(beta_bits, c.beta_dtype), c.beta_logits != 0, c.beta_doubled != 0);
    if (lane_id() == 0) s.beta = beta, s.kq = kq;
  }

  __device__ __forceinline__ void prepare_old(int32_t record, int t, LeanRecordToken& s) const {
    const bool wide = p.call.gate_dtype == Dtype::kFp32;
    const char* kg = key_gate(record, t);
    const char* u = p.u.at(record, head) + static_cast<uint32_t>(t) * p.u_token_bytes;
    const uint4 k_bits = load_gates(kg, key(), p.call.gate_dtype);
    const uint4 gate_bits = load_gates(kg + (wide ? 512 : 256), key(), p.call.gate_dtype);
    const auto u_bits = *reinterpret_cast<const float4*>(u + key() * 4);
    put_decays(gate_bits, s);
    float k[4];
    if (wide) {
      k[0] = __uint_as_float(k_bits.x), k[1] = __uint_as_float(k_bits.y);
      k[2] = __uint_as_float(k_bits.z), k[3] = __uint_as_float(k_bits.w);
    } else {
      widen_four(k, make_uint2(k_bits.x, k_bits.y), p.call.gate_dtype);
    }
    normalise(k);
    put(s.k, k);
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
    put(s.decay, d);
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
  auto* const s = token_slots<LeanRecordToken>();
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
    if (threadIdx.x == 0 && p.asks && LeanRow::is_live(p, slot))
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
  typename Tile::Raw raw;
  Tile::load(raw, state, first);
  int committed = 0;
  if (params.fold) {
    committed = static_cast<int>(
        committed_tokens(params.count[static_cast<int64_t>(record) * params.count_stride], row.accepted, p.columns));
  }
  if (committed < 0) return lean_zero(p, row, head, 0, 128, static_cast<int>(threadIdx.x));
  const RecordPreparer<Tile> preparer{params, head, head >> p.query_shift};
#pragma unroll 1
  for (int j = warp_id(); j < committed + row.length; j += C::kWarps) {
    if (j < committed) preparer.prepare_old(record, j, s[j]);
    else preparer.prepare_new(row.begin + j - committed, s[j]);
  }
  __syncthreads();
  const LeanRecordToken* const recent = s + committed;
#pragma unroll 1
  for (int j = warp_id(); j < row.length; j += C::kWarps) preparer.record(record, j, recent[j]);
  Tile tile;
  tile.widen(raw);
  const int mine = first + Tile::row_of(Tile::slot_of_lane());
  float x[Tile::kElements], k[Tile::kElements];
  if (committed > 0) {
#pragma unroll 1
    for (int j = 0; j < committed; ++j) {
      take_lane<Tile>(x, s[j].decay);
      tile.decay_lanes(x);
      take_lane<Tile>(k, s[j].k);
      tile.replay_lanes(k, s[j].v[mine]);
    }
    tile.store(state, first);
    tile.round_to_pool();
  }
  char* u = params.u.at(record, head) + mine * 4;
#pragma unroll 1
  for (int t = 0; t < row.length; ++t, u += params.u_token_bytes) {
    const LeanRecordToken& token = recent[t];
    take_lane<Tile>(x, token.decay);
    tile.decay_lanes(x);
    take_lane<Tile>(x, token.q);
    take_lane<Tile>(k, token.k);
    const auto r = tile.token_lanes(k, x, token.kq, token.beta, token.v[mine], p.scale);
    if (!Tile::owns_row()) continue;
    store_element(p.out.at(row.begin + t, head), mine, p.out_dtype, r.o);
    *reinterpret_cast<float*>(u) = r.u;
  }
}

}  // namespace kda::cuda

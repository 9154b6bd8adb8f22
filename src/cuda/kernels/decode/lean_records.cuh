// verify_record with and without folded commit (V-10, V-10b), K = V = 128: the kernel of the common call. A commit is
// one of no new tokens.
//
// Equations  E-1, E-4, E-5, E-7 per token, replay of records as V-10; recurrence/tile.cuh. The bits of kernel.cuh.
// Grid       x = value head, y and z = sequence.
// Block      eight warps with sixteen state rows each, two blocks a multiprocessor. A warp prepares whole tokens.
// Shared     the tokens: q, k, e^g, v or u, and what is to be recorded, 2.8 KB each. Vectors over K lie in the
//            order of the tile's lanes, so that eight lanes' pieces are neighbours whatever the pool's dtype.
// Waiting    one block barrier between preparing tokens and using them. Memory answers in order, so a warp asks for
//            the count and for its first token before it asks for its state, and looks at neither until then. The
//            grid before: as in lean.cuh.
// Hazards    all old records of a head are in shared memory before the first new one is written (the barrier).
//            Counts are set by a kernel of their own after this one: every head of a row reads the old count.
// Precision  fp32 throughout; the pool's dtype at loads and stores only (N-1, N-2).
// Limits     what cuda/host/decode_lean.cc asks of a call; any other goes to kernel.cuh.
#pragma once

#include <cstddef>

#include "cuda/kernels/common/hold.cuh"
#include "cuda/kernels/decode/lean_gate.cuh"
#include "cuda/kernels/decode/lean_row.cuh"
#include "cuda/kernels/recurrence/tile.cuh"
#include "cuda/ptx/mbarrier.h"

namespace kda::cuda {

// kStream: states are marked to leave the L2 first.
template <class Pool_, bool kStream_>
struct LeanRecordConfig {
  using Pool = Pool_;
  using Tile = StateTile<Pool, Shape::kExact128, 8, kStream_>;
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

// Where a lane finds its parts of the prepared tokens; held, so that a loop over tokens only steps.
template <class Tile>
struct RecordLane {
  static constexpr uint32_t kQuery = sizeof(LeanRecordToken::k);  // from a token's keys to its q
  uint32_t vectors, value, scalars;  // shared addresses in the token at hand: its keys, its row's v, beta
  uint32_t upper;                    // 0 in a half's lower eight lanes, kQuery in the upper

  __device__ __forceinline__ RecordLane(const LeanRecordToken* s, int row) {
    const uint32_t base = hold(ptx::shared_address(s));
    vectors = base + static_cast<uint32_t>(Tile::lane16() * 16);
    value = base + static_cast<uint32_t>(offsetof(LeanRecordToken, v) + row * 4);
    scalars = base + static_cast<uint32_t>(offsetof(LeanRecordToken, beta));
    upper = Tile::lane16() < 8 ? 0 : kQuery;
  }
  __device__ __forceinline__ void step(int tokens) {
    const auto bytes = static_cast<uint32_t>(tokens) * static_cast<uint32_t>(sizeof(LeanRecordToken));
    vectors += bytes, value += bytes, scalars += bytes;
  }

  __device__ __forceinline__ void decay(float (&x)[Tile::kElements]) const {
    take(x, vectors + static_cast<uint32_t>(offsetof(LeanRecordToken, decay)));
  }
  __device__ __forceinline__ void k(float (&x)[Tile::kElements]) const { take(x, vectors); }
  // k and q in a half's lower eight lanes, q and k in the upper: see StateTile::results().
  __device__ __forceinline__ void kept(float (&x)[Tile::kElements]) const { take(x, vectors + upper); }
  __device__ __forceinline__ void sent(float (&x)[Tile::kElements]) const { take(x, vectors + kQuery - upper); }
  __device__ __forceinline__ float v() const { return ptx::load_shared_f1(value); }
  __device__ __forceinline__ float2 beta_kq() const { return ptx::load_shared_f2(scalars); }

 private:
  static __device__ __forceinline__ void take(float (&x)[Tile::kElements], uint32_t at) {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const float4 v = ptx::load_shared_f4(at + 256 * g);
      x[4 * g] = v.x, x[4 * g + 1] = v.y, x[4 * g + 2] = v.z, x[4 * g + 3] = v.w;
    }
  }
};

// One warp prepares a token, four neighbouring keys and values a lane. Sums as in recurrence/token.cuh and the tile.
template <class Tile>
struct RecordPreparer {
  const LeanRecordParams& p;
  int32_t head, query_head;
  // Of the head.
  float4 bias;
  float A_log;
  // Of a token, as loaded: nothing waits for them before finish().
  uint4 key_bits;  // recorded: k; new: k and q
  uint4 gate_bits;
  uint4 value_bits;  // recorded: u; new: v and beta

  __device__ __forceinline__ RecordPreparer(const LeanRecordParams& params, int32_t h)
      : p(params), head(h), query_head(h >> params.call.query_shift) {
    bias = load_bias(p.call.gate_rule, head, key());
    A_log = load_A_log(p.call.gate_rule, head);
  }

  __device__ __forceinline__ void gather_new(int32_t row) {
    const LeanParams& c = p.call;
    const auto q = *reinterpret_cast<const uint2*>(c.q.at(row, query_head) + key() * 2);
    const auto k = *reinterpret_cast<const uint2*>(c.k.at(row, query_head) + key() * 2);
    const auto v = *reinterpret_cast<const uint2*>(c.v.at(row, head) + key() * 2);
    gate_bits = load_gates(c.gate.at(row, head), key(), c.gate_dtype);
    key_bits = make_uint4(k.x, k.y, q.x, q.y);
    value_bits = make_uint4(v.x, v.y, load_bits(c.beta.at(row, head), 0, c.beta_dtype), 0);
  }

  __device__ __forceinline__ void gather_old(int32_t record, int t) {
    const char* kg = key_gate(record, t);
    const char* u = p.u.at(record, head) + static_cast<uint32_t>(t) * p.u_token_bytes;
    key_bits = load_gates(kg, key(), p.call.gate_dtype);
    gate_bits = load_gates(kg + (p.call.gate_dtype == Dtype::kFp32 ? 512 : 256), key(), p.call.gate_dtype);
    value_bits = *reinterpret_cast<const uint4*>(u + key() * 4);
  }

  // What was gathered, `fresh` if of a new token.
  __device__ __forceinline__ void finish(bool fresh, LeanRecordToken& s) const {
    const LeanParams& c = p.call;
    float q[4] = {0.0f, 0.0f, 0.0f, 0.0f}, k[4], d[4];
    if (fresh) {
      float v[4];
      widen_four(k, make_uint2(key_bits.x, key_bits.y), c.io);
      widen_four(q, make_uint2(key_bits.z, key_bits.w), c.io);
      widen_four(v, make_uint2(value_bits.x, value_bits.y), c.io);
      store_lane(v, s.v);
      s.gate_bits[lane_id()] = gate_bits;
      s.k_bits[lane_id()] = make_uint2(key_bits.x, key_bits.y);
    } else {
      if (c.gate_dtype == Dtype::kFp32) {
        k[0] = __uint_as_float(key_bits.x), k[1] = __uint_as_float(key_bits.y);
        k[2] = __uint_as_float(key_bits.z), k[3] = __uint_as_float(key_bits.w);
      } else {
        widen_four(k, make_uint2(key_bits.x, key_bits.y), c.gate_dtype);
      }
      *reinterpret_cast<uint4*>(s.v + key()) = value_bits;
    }
    decays_of(c.gate_rule, gate_bits, c.gate_dtype, bias, A_log, d);
    put(s.decay, d);
    if (c.qk_norm) normalise(k, q);
    put(s.k, k);
    if (!fresh) return;
    put(s.q, q);
    const float kq = dot(k, q);
    const float beta = beta_value(float_of_bits(value_bits.z, c.beta_dtype), c.beta_logits != 0, c.beta_doubled != 0);
    if (lane_id() == 0) s.beta = beta, s.kq = kq;
  }

  // Key and raw gate into the records, in the gate's dtype: the io dtype or fp32, so that a key fits exactly (P-3).
  __device__ __forceinline__ void record(int32_t record, int t, const LeanRecordToken& s) const {
    char* kg = key_gate(record, t);
    const uint2 k = s.k_bits[lane_id()];
    const uint4 gates = s.gate_bits[lane_id()];
    if (p.call.gate_dtype == Dtype::kFp32) {
      float x[4];
      widen_four(x, k, p.call.io);
      *reinterpret_cast<float4*>(kg + key() * 4) = make_float4(x[0], x[1], x[2], x[3]);
      *reinterpret_cast<uint4*>(kg + 512 + key() * 4) = gates;
    } else {
      *reinterpret_cast<uint2*>(kg + key() * 2) = k;
      *reinterpret_cast<uint2*>(kg + 256 + key() * 2) = make_uint2(gates.x, gates.y);
    }
  }

 private:
  static __device__ __forceinline__ int key() { return lane_id() * 4; }
  // Where a lane's four keys lie in a vector: they are a group of lane16 lane_id() % 16, or half of lane_id() / 2's.
  static __device__ __forceinline__ int place() {
    return Tile::kVector == 4 ? lane_id() : lane_id() % 2 * 16 + lane_id() / 2;
  }
  static __device__ __forceinline__ void put(float4 (&s)[32], const float (&x)[4]) {
    s[place()] = make_float4(x[0], x[1], x[2], x[3]);
  }

  __device__ __forceinline__ char* key_gate(int32_t record, int t) const {
    return p.kg.at(record, head) + static_cast<uint32_t>(t) * p.kg_token_bytes;
  }

  // E-4 of both, side by side.
  static __device__ __forceinline__ void normalise(float (&k)[4], float (&q)[4]) {
    float sum_k = 0.0f, sum_q = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum_k = __fmaf_rn(k[i], k[i], sum_k);
      sum_q = __fmaf_rn(q[i], q[i], sum_q);
    }
    const float rk = inverse_root(__fadd_rn(lane_sum<32>(sum_k), 1e-6f));
    const float rq = inverse_root(__fadd_rn(lane_sum<32>(sum_q), 1e-6f));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      k[i] = __fmul_rn(k[i], rk);
      q[i] = __fmul_rn(q[i], rq);
    }
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

// V-10: `committed` recorded tokens again; `at` moves behind them.
template <class Tile>
__device__ __forceinline__ void replay_tokens(Tile& tile, RecordLane<Tile>& at, int committed) {
#pragma unroll 1
  for (int t = 0; t < committed; ++t) {
    float decay[Tile::kElements], k[Tile::kElements];
    at.decay(decay);
    at.k(k);
    const float u = at.v();
    tile.decay_lanes(decay);
    tile.replay_lanes(k, u);
    at.step(1);
  }
}

// The row's tokens from `at` on: outputs, and u into the record. `mine`: the state row of this lane's results.
template <class Tile>
__device__ __forceinline__ void verify_tokens(const LeanRecordParams& params, const LeanRow& row, int32_t record,
                                              int32_t head, int mine, Tile& tile, RecordLane<Tile>& at) {
  const LeanParams& p = params.call;
  char* u = params.u.at(record, head) + mine * 4;
  char* out = p.out.at(row.begin, head) + mine * (p.out_dtype == Dtype::kFp32 ? 4 : 2);
#pragma unroll 1
  for (int t = 0; t < row.length; ++t) {
    float x[Tile::kElements], k[Tile::kElements];
    at.decay(x);
    at.kept(k);
    tile.decay_lanes(x);
    at.sent(x);
    const float2 beta_kq = at.beta_kq();
    const float v = at.v();
    const auto r = tile.results(k, x, beta_kq.y, beta_kq.x, v, p.scale);
    at.k(k);
    tile.replay_lanes(k, r.u);
    at.step(1);
    if (Tile::owns_row()) {
      store_element(out, 0, p.out_dtype, r.o);
      *reinterpret_cast<float*>(u) = r.u;
    }
    out += p.out.row_bytes;
    u += params.u_token_bytes;
  }
}

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
  int32_t record = -1;
  const auto load_index_values = [&] {
    index.load(p, n);
    if (params.record_rows != nullptr)
      record = load_index(params.record_rows + static_cast<int64_t>(n) * params.record_rows_stride, true);
  };
  load_index_values();
  if (early) {
    const int32_t slot = index.get(0);
    if (threadIdx.x == 0 && p.asks && LeanRow::is_live(p, slot))
      ptx::prefetch_block_to_l2(p.pool.at(slot, head), 128 * 128 * sizeof(typename C::Pool));
    ptx::wait_for_prerequisites();
    load_index_values();
  }
  const LeanRow row(p, index, n);
  if (!row.looked_at) return;
  if (params.record_rows == nullptr) record = row.first_slot;
  const bool known = LeanRow::is_live(p, row.first_slot) && row.length <= p.columns &&
                     static_cast<uint32_t>(record) < static_cast<uint32_t>(params.rows);
  if (!known) return lean_zero(p, row, head, 0, 128, static_cast<int>(threadIdx.x));
  const HeadState state{p.pool.at(row.first_slot, head), 128, 128, true};
  const int columns = params.fold ? p.columns : 0;
  int32_t count = 0;
  if (params.fold) count = params.count[static_cast<int64_t>(record) * params.count_stride];
  RecordPreparer<Tile> preparer(params, head);
  // New tokens, then recorded ones: how many of these there are is not known yet.
  const int items = row.length + columns;
  const auto gather = [&](int i) {
    if (i < row.length) preparer.gather_new(row.begin + i);
    else preparer.gather_old(record, i - row.length);
  };
  int item = warp_id();
  if (item < items) gather(item);
  typename Tile::Raw raw;
  Tile::load(raw, state, first);
  const int committed = lean_committed(count, row.accepted, p.columns);
  if (committed < 0) return lean_zero(p, row, head, 0, 128, static_cast<int>(threadIdx.x));
  LeanRecordToken* const recent = s + columns;
#pragma unroll 1
  while (item < items) {
    const bool fresh = item < row.length;
    const int t = fresh ? item : item - row.length;
    if (fresh || t < committed) preparer.finish(fresh, fresh ? recent[t] : s[t]);
    item += C::kWarps;
    if (item < items) gather(item);
  }
  __syncthreads();
#pragma unroll 1
  for (int t = warp_id(); t < row.length; t += C::kWarps) preparer.record(record, t, recent[t]);
  Tile tile;
  tile.widen(raw);
  const int mine = first + Tile::row_of(Tile::slot_of_lane());
  RecordLane<Tile> at(s, mine);
  if (committed > 0) {
    replay_tokens(tile, at, committed);
    tile.store(state, first);
    tile.round_to_pool();
  }
  at.step(columns - committed);
  verify_tokens(params, row, record, head, mine, tile, at);
}

}  // namespace kda::cuda

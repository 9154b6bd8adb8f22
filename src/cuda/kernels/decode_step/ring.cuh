// decode_step's common call where there are heads for every multiprocessor: persistent blocks whose memory traffic
// never waits for their arithmetic.
//
// Grid       one or two blocks a multiprocessor, each with a list of heads: block b of the first `lists` has b,
//            b + lists, ...; those behind, which the hardware hands out as others end, `run` neighbours (RingWork).
// Warps      one finds rows' rules, 32 heads at a time, and asks for states by bulk copies, as many heads ahead as
//            its ring holds: nothing else is on a state's way. Four load what the next head's token is made of (q; k;
//            v; beta and z; a quarter of the decays each) a head ahead into registers, prepare it and store the new
//            window. Eight hold the head's 128 state rows in registers, half of them at a time where two blocks share
//            the registers, apply the token and store the state. One takes the norm.
// Shared     rings of states (128 KB a multiprocessor) and of prepared tokens with o (3 KB each); rules.
// Waiting    mbarriers between these warps. The block's only barrier follows their initialisation, while index values
//            are on their way. No waiting between blocks (F28).
// Hazards    W-5: a head's channels belong to one warp, which has read their window before it stores the new one.
//            V-5: a state is in shared memory whole before any of it is stored.
// Precision  fp32; roundings to io after conv and after the recurrence, then one at the output (L-7).
#pragma once

#include "cuda/kernels/decode_step/lean.cuh"
#include "cuda/ptx/copy.h"

namespace kda::cuda {

// One head of a row.
struct alignas(16) RingUnit : StepRow {
  int32_t head = 0;
};

struct alignas(16) RingToken {
  float k[128], q[128], decay[128], v[128], z[128], o[128];
  float beta;
};

// kBlocks: on one multiprocessor, 1 or 2.
template <class Pool_, class Io_, int kBlocks_>
struct RingConfig {
  using Pool = Pool_;
  using Io = Io_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kPasses = kBlocks;  // in which a head's rows go through the registers
  // Stores without a hint to leave the L2 first, as loads.
  using Tile = StateTile<Pool, Shape::kExact128, 8 / kPasses, false>;
  static constexpr int kHolders = 128 / Tile::kRows / kPasses;  // warps with state rows
  static constexpr int kParts = 4;
  static constexpr int kThreads = 32 * (kHolders + kParts + 2);
  static constexpr uint32_t kStateBytes = 128 * 128 * sizeof(Pool);
  static constexpr int kStates = 128 * 1024 / kStateBytes / kBlocks;
  static constexpr int kTokens = 2;
  struct Shared {
    alignas(128) unsigned char state[kStates][kStateBytes];
    RingToken token[kTokens];
    RingUnit unit[2][32];
    uint64_t state_full[kStates], state_empty[kStates];
    uint64_t token_full[kTokens], token_empty[kTokens], o_full[kTokens], rules_full[2], rules_empty[2];
  };
};

// A place of a ring, and the parity with which it is waited for.
template <int kCount>
struct RingPlace {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++index == kCount) index = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void wait_full(const uint64_t& barrier, uint32_t parity) {
  ptx::mbarrier_wait(ptx::shared_address(&barrier), parity);
}
__device__ __forceinline__ void wait_empty(const uint64_t& barrier, uint32_t parity) {
  ptx::mbarrier_wait(ptx::shared_address(&barrier), parity ^ 1);
}
// What the warp has read or written is told with one arrival.
__device__ __forceinline__ void arrive_warp(const uint64_t& barrier) {
  __syncwarp();
  if (lane_id() == 0) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
}

// The heads of this block, in order: first + i * stride of all rows' heads, i < mine.
struct RingWork {
  uint32_t heads, first, stride, mine;
  __device__ __forceinline__ explicit RingWork(const LeanStepParams& p)
      : heads(static_cast<uint32_t>(p.form.heads)), first(blockIdx.x), stride(p.lists), mine(p.list) {
    const uint32_t all = heads * static_cast<uint32_t>(p.sequences.count);
    if (first >= p.lists) first = p.lists * p.list + (first - p.lists) * p.run, stride = 1, mine = p.run;
    mine = first < all ? min((all - first + stride - 1) / stride, mine) : 0;
  }
};

// Reads the rules as the producer publishes them.
template <class C>
struct RingReader {
  typename C::Shared& s;
  uint32_t i = 0;
  __device__ __forceinline__ const RingUnit& at(uint32_t k) const {
    if (k % 32 == 0) wait_full(s.rules_full[k / 32 % 2], k / 64 & 1);
    return s.unit[k / 32 % 2][k % 32];
  }
  __device__ __forceinline__ const RingUnit& take() const { return at(i); }
  __device__ __forceinline__ void done() {
    if (i % 32 == 31) arrive_warp(s.rules_empty[i / 32 % 2]);
    ++i;
  }
};

template <class C>
struct RingProducer {
  using Shared = typename C::Shared;
  using Pool = typename C::Pool;
  const LeanStepParams& p;
  Shared& s;
  const RingWork work;

  // The lane's head of a batch of 32.
  __device__ __forceinline__ uint32_t id_of(uint32_t batch) const {
    const uint32_t i = min(batch * 32 + static_cast<uint32_t>(lane_id()), work.mine - 1);
    return work.first + i * work.stride;
  }
  // Index values are read past the L1, which could keep old ones.
  __device__ __forceinline__ DecodeLoads load(uint32_t batch) const {
    return load_decode_row(p.rule, p.sequences, id_of(batch) / work.heads, true);
  }
  __device__ __forceinline__ RingUnit resolve(const DecodeLoads& l, uint32_t batch) const {
    const uint32_t id = id_of(batch), n = id / work.heads;
    RingUnit u;
    static_cast<StepRow&>(u) = resolve_step_row(p, l, n);
    u.head = static_cast<int32_t>(id - n * work.heads);
    return u;
  }
  __device__ __forceinline__ const Pool* state_of(const RingUnit& u) const {
    return static_cast<const Pool*>(p.pool.data) + state_offset(p, u.slot, u.head);
  }

  // While the grid before still runs, by blocks of the first wave: brings to the L2 what the first head will want, if
  // it stays what it is. Asking for a second state takes longer than not (decode_step.md).
  __device__ __forceinline__ void ask(const RingUnit& mine) const {
    const int lane = lane_id();
    if (lane == 0) s.unit[0][0] = mine;
    __syncwarp();
    const RingUnit& u = s.unit[0][0];
    if (u.is(StepRow::kRuns)) {
      if (lane == 0 && !u.is(StepRow::kFresh)) ptx::prefetch_block_to_l2(state_of(u), C::kStateBytes);
      if (lane < 3) ptx::prefetch_block_to_l2(p.conv[lane].weight + u.head * 512, 2048);
      if (lane < 18 && !u.is(StepRow::kFresh)) {  // halves of the windows' rows
        const WindowRef& w = p.conv[lane / 6].window;
        ptx::prefetch_to_l2(window_of_lane(w, u.slot, u.head * 128 + lane % 2 * 64) +
                            2 * (lane % 6 / 2) * w.column_stride);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void publish(const DecodeLoads& l, uint32_t batch) const {
    wait_empty(s.rules_empty[batch % 2], batch / 2 & 1);
    if (batch * 32 + static_cast<uint32_t>(lane_id()) < work.mine) s.unit[batch % 2][lane_id()] = resolve(l, batch);
    arrive_warp(s.rules_full[batch % 2]);
  }

  // `first`: load(0) from before the grid before has ended, where the block is `early`.
  __device__ __forceinline__ void run(DecodeLoads first, bool early) const {
    if (work.mine == 0) return ptx::wait_for_prerequisites();
    if (early) {
      ask(resolve(first, 0));
      ptx::wait_for_prerequisites();
      first = load(0);
    }
    publish(first, 0);
    RingPlace<C::kStates> state;
#pragma unroll 1
    for (uint32_t i = 0; i < work.mine; ++i, state.next()) {
      if (i % 32 == 16 && i - i % 32 + 32 < work.mine) publish(load(i / 32 + 1), i / 32 + 1);
      const RingUnit& u = s.unit[i / 32 % 2][i % 32];
      const uint32_t full = ptx::shared_address(&s.state_full[state.index]);
      wait_empty(s.state_empty[state.index], state.parity);
      if (lane_id() == 0) {
        if (u.is(StepRow::kRuns) && !u.is(StepRow::kFresh)) {
          ptx::mbarrier_arrive_expect(full, C::kStateBytes);
          ptx::bulk_load(ptx::shared_address(s.state[state.index]), state_of(u), C::kStateBytes, full);
        } else {
          ptx::mbarrier_arrive(full);
        }
      }
      __syncwarp();
    }
  }
};

// What a part of a head's token is made of, as loaded: nothing waits for it before it is used.
struct RingPart {
  ConvLane conv;  // part 3: z in the place of the first entry
  DecayQuarter<128, true> decay;
  unsigned beta;

  __device__ __forceinline__ void load(const LeanStepParams& p, const RingUnit& u, int part) {
    const int lane = lane_id(), channel = u.head * 128 + 4 * lane, c = 32 * part + lane;
    conv.clear_history(), conv.entry[3] = {0, 0};
    if (!u.is(StepRow::kRuns)) return;
    if (part < 3) {
      const ConvChannels& from = p.conv[part];
      conv.entry[3] = *reinterpret_cast<const uint2*>(row_of_part(from, u, channel));
      if (!u.is(StepRow::kFresh)) {
        const char* const window = window_of_lane(from.window, u.slot, channel);
#pragma unroll
        for (int j = 0; j < 3; ++j)
          conv.entry[j] = *reinterpret_cast<const uint2*>(window + 2 * j * from.window.column_stride);
      }
      const auto* const taps = reinterpret_cast<const float4*>(from.weight + channel * 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) conv.taps[j] = taps[j];
    } else {
      const int64_t at = p.z.offset(u.batch, u.begin, u.head) + 4 * lane;
      conv.entry[0] = *reinterpret_cast<const uint2*>(static_cast<const char*>(p.z.data) + 2 * at);
      beta = load_bits(p.beta.data, p.beta.offset(u.batch, u.begin, u.head), p.beta.dtype);
    }
    decay.raw[0] = load_bits(p.gate.data, p.gate.offset(u.batch, u.begin, u.head) + c, p.gate.dtype);
    decay.bias[0] = p.gate_rule.dt_bias != nullptr ? p.gate_rule.dt_bias[u.head * 128 + c] : 0.0f;
    decay.A_log = p.gate_rule.A_log != nullptr ? p.gate_rule.A_log[u.head] : 0.0f;
  }
};

// One part of every head's token, and its channels' windows.
template <class C>
__device__ __forceinline__ void prepare_ring(const LeanStepParams& p, typename C::Shared& s, int part) {
  const RingWork work(p);
  RingReader<C> reader{s};
  RingPlace<C::kTokens> token;
  const int lane = lane_id();
  RingPart next;
  if (work.mine != 0) next.load(p, reader.at(0), part);
#pragma unroll 1
  for (uint32_t i = 0; i < work.mine; ++i, token.next(), reader.done()) {
    const RingUnit& u = reader.take();
    const bool runs = u.is(StepRow::kRuns);
    ConvLane conv = next.conv;
    float y[4], decay, beta;
    if (runs) {
      if (part < 3) conv.convolve<typename C::Io>(y);
      else finish_gate<typename C::Io>(conv.entry[0], y), beta = lean_beta(p, next.beta);
      decay = next.decay.factor(p.gate_rule, p.gate.dtype, 0);
    }
    if (i + 1 < work.mine) next.load(p, reader.at(i + 1), part);
    wait_empty(s.token_empty[token.index], token.parity);
    RingToken& t = s.token[token.index];
    if (runs) {
      t.decay[32 * part + lane] = decay;
      if (part == 2) store_lane(y, t.v);
      else if (part < 2) finish_normalised(y, p.form.qk_norm != 0, part == 0 ? t.q : t.k);
      else store_lane(y, t.z);
      if (part == 3 && lane == 0) t.beta = beta;
    }
    arrive_warp(s.token_full[token.index]);
    if (part < 3 && (runs || u.is(StepRow::kClears)))
      conv.store_window(p.conv[part].window, u.slot, u.head * 128 + 4 * lane);
  }
}

// The warp's rows of every head's state.
template <class C>
__device__ __forceinline__ void hold_ring(const LeanStepParams& p, typename C::Shared& s) {
  using Tile = typename C::Tile;
  const RingWork work(p);
  RingReader<C> reader{s};
  RingPlace<C::kStates> state;
  RingPlace<C::kTokens> token;
  const int first = warp_id() * Tile::kRows;
  const uint32_t place = static_cast<uint32_t>((first + lane_id() / 16) * 128 + Tile::lane16() * Tile::kVector) *
                         static_cast<uint32_t>(sizeof(typename C::Pool));
#pragma unroll 1
  for (uint32_t i = 0; i < work.mine; ++i, state.next(), token.next(), reader.done()) {
    const RingUnit& u = reader.take();
    wait_full(s.token_full[token.index], token.parity);
    wait_full(s.state_full[state.index], state.parity);
#pragma unroll 1
    for (int pass = 0; pass < C::kPasses; ++pass) {
      const int rows = first + pass * C::kHolders * Tile::kRows;
      const bool last = pass == C::kPasses - 1;
      typename Tile::Raw raw;
      if (u.is(StepRow::kRuns) && !u.is(StepRow::kFresh)) {
        Tile::load_shared(raw,
                          ptx::shared_address(s.state[state.index]) + place + pass * (C::kStateBytes / C::kPasses));
      } else {
        Tile::zero(raw);
      }
      Tile tile;
      tile.widen(raw);
      if (last) arrive_warp(s.state_empty[state.index]);
      if (u.is(StepRow::kRuns)) {
        RingToken& t = s.token[token.index];
        const int mine = rows + Tile::row_of(Tile::slot_of_lane());
        tile.decay(t.decay);
        const auto r = tile.token(t.k, t.q, t.beta, t.v[mine], p.form.scale);
        if (Tile::owns_row()) t.o[mine] = round_element(r.o, p.form.io);
      }
      if (last) arrive_warp(s.o_full[token.index]);
      if (u.is(StepRow::kRuns | StepRow::kClears)) {
        auto* const to = static_cast<typename C::Pool*>(p.pool.data) + state_offset(p, u.slot, u.head);
        tile.store({to, 128, 128, true}, rows);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void norm_ring(const LeanStepParams& p, typename C::Shared& s) {
  const RingWork work(p);
  RingReader<C> reader{s};
  RingPlace<C::kTokens> token;
  const int first = 4 * lane_id();
  const float4 weight = *reinterpret_cast<const float4*>(p.norm_weight + first);
#pragma unroll 1
  for (uint32_t i = 0; i < work.mine; ++i, token.next(), reader.done()) {
    const RingUnit& u = reader.take();
    wait_full(s.o_full[token.index], token.parity);
    const RingToken& t = s.token[token.index];
    const float4 o4 = *reinterpret_cast<const float4*>(t.o + first),
                 z = *reinterpret_cast<const float4*>(t.z + first);
    arrive_warp(s.token_empty[token.index]);
    char* to = static_cast<char*>(p.out.data) + 2 * (p.out.offset(u.batch, u.begin, u.head) + first);
    if (u.is(StepRow::kRuns)) {
      const float o[4] = {o4.x, o4.y, o4.z, o4.w};
      const float factor = norm_factor_of<128>(tree_of_lanes<32>(tree_of_squares<4>(o)), p.eps);
      store_normed<typename C::Io>(to, o, factor, weight, z);
    } else if (u.is(StepRow::kZeroes)) {
#pragma unroll 1
      for (int32_t n = 0; n < u.length; ++n, to += 2 * p.out.row_stride) *reinterpret_cast<uint2*>(to) = {0, 0};
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    step_ring_kernel(const __grid_constant__ LeanStepParams p) {
  auto& s = *reinterpret_cast<typename C::Shared*>(token_slots<unsigned char>());
  touch_parameters(p);
  ptx::launch_dependents();
  const int warp = warp_id();
  const RingProducer<C> producer{p, s, RingWork(p)};
  const bool early = blockIdx.x < p.wave;
  DecodeLoads first;
  if (warp == C::kHolders + C::kParts) {
    if (!early) ptx::wait_for_prerequisites();
    if (producer.work.mine != 0) first = producer.load(0);
    if (lane_id() == 0) {
      const auto init = [](const uint64_t& barrier, uint32_t arrivals) {
        ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
      };
      for (int i = 0; i < C::kStates; ++i) init(s.state_full[i], 1), init(s.state_empty[i], C::kHolders);
      for (int i = 0; i < C::kTokens; ++i)
        init(s.token_full[i], C::kParts), init(s.token_empty[i], 1), init(s.o_full[i], C::kHolders);
      for (int i = 0; i < 2; ++i) init(s.rules_full[i], 1), init(s.rules_empty[i], C::kHolders + C::kParts + 1);
      ptx::fence_mbarrier_init();
    }
  }
  __syncthreads();
  if (warp == C::kHolders + C::kParts) return producer.run(first, early);
  ptx::wait_for_prerequisites();
  if (warp < C::kHolders) hold_ring<C>(p, s);
  else if (warp < C::kHolders + C::kParts) prepare_ring<C>(p, s, warp - C::kHolders);
  else norm_ring<C>(p, s);
}

}  // namespace kda::cuda

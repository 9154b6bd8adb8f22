// decode_step's common call where there are heads for every multiprocessor: persistent blocks whose memory traffic
// never waits for their arithmetic.
//
// Grid       one or two blocks a multiprocessor, each with a list of heads: block b of the first `lists` has b,
//            b + lists, ...; those behind, which the hardware hands out as others end, `run` neighbours (RingWork).
// Warps      one asks for what comes next: rows' rules 32 heads at a time, then states, inputs, windows and taps by
//            bulk copies, as many heads ahead as the rings hold. Four prepare the token of the next head (q; k; v;
//            beta and z; a quarter of the decays each) and store the new window. Eight hold the head's 128 state
//            rows in registers, half of them at a time where two blocks share the registers, apply the token and
//            store the state. One takes the norm.
// Shared     rings of states (128 KB a multiprocessor), inputs (10.5 KB each), prepared tokens with o (3 KB each),
//            rules.
// Waiting    mbarriers between these warps; no barrier of the block, no waiting between blocks (F28).
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

struct alignas(16) RingInput {
  uint2 x[3][32];          // [part][lane]: four channels
  uint2 window[3][3][32];  // [part][column][lane]
  uint2 z[32];
  unsigned char gate[512];
  float bias[128];
  float4 taps[3][128];
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
  static constexpr int kInputs = 2;
  static constexpr int kTokens = 2;
  struct Shared {
    alignas(128) unsigned char state[kStates][kStateBytes];
    RingInput input[kInputs];
    RingToken token[kTokens];
    RingUnit unit[2][32];
    uint64_t state_full[kStates], state_empty[kStates], input_full[kInputs], input_empty[kInputs];
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
  const LeanStepParams& p;
  Shared& s;
  const RingWork work;

  // The lane's head of a batch of 32.
  __device__ __forceinline__ RingUnit resolve(uint32_t i) const {
    const uint32_t id = work.first + i * work.stride, n = id / work.heads;
    RingUnit u;
    static_cast<StepRow&>(u) = step_row(p, n);
    u.head = static_cast<int32_t>(id - n * work.heads);
    return u;
  }

  // While the grid before still runs, by blocks of the first wave: brings to the L2 what the first heads will want,
  // if they stay what they are.
  __device__ __forceinline__ void ask() const {
    const auto i = static_cast<uint32_t>(lane_id());
    if (i >= work.mine || i >= C::kStates) return;
    const RingUnit u = resolve(i);
    if (!u.is(StepRow::kRuns)) return;
#pragma unroll 1
    for (int part = 0; part < 3; ++part) {
      const ConvChannels& c = p.conv[part];
      ptx::prefetch_block_to_l2(c.weight + u.head * 512, 2048);
      if (u.is(StepRow::kFresh)) continue;
      for (int column = 0; column < 3; ++column)
        ptx::prefetch_block_to_l2(
            window_of_lane(c.window, u.slot, u.head * 128) + 2 * column * c.window.column_stride, 256);
    }
    if (!u.is(StepRow::kFresh))
      ptx::prefetch_block_to_l2(static_cast<const typename C::Pool*>(p.pool.data) + state_offset(p, u.slot, u.head),
                                C::kStateBytes);
  }

  __device__ __forceinline__ void publish(uint32_t batch) {
    const uint32_t i = batch * 32 + static_cast<uint32_t>(lane_id());
    wait_empty(s.rules_empty[batch % 2], batch / 2 & 1);
    if (i < work.mine) s.unit[batch % 2][lane_id()] = resolve(i);
    arrive_warp(s.rules_full[batch % 2]);
  }

  // One copy a lane.
  __device__ __forceinline__ void copy_inputs(const RingUnit& u, RingInput& to, uint32_t barrier,
                                              uint32_t gate_bytes) const {
    const int lane = lane_id(), channel = u.head * 128;
    const void* from = nullptr;
    const void* target = nullptr;
    uint32_t bytes = 256;
    if (lane < 3) {
      from = row_of_part(p.conv[lane], u, channel), target = to.x[lane];
    } else if (lane < 12) {
      const int part = (lane - 3) / 3, column = (lane - 3) % 3;
      const WindowRef& w = p.conv[part].window;
      if (!u.is(StepRow::kFresh)) from = window_of_lane(w, u.slot, channel) + 2 * column * w.column_stride;
      target = to.window[part][column];
    } else if (lane == 12) {
      from = static_cast<const char*>(p.gate.data) + p.gate.offset(u.batch, u.begin, u.head) * (gate_bytes / 128);
      target = to.gate, bytes = gate_bytes;
    } else if (lane == 13) {
      from = static_cast<const char*>(p.z.data) + 2 * p.z.offset(u.batch, u.begin, u.head), target = to.z;
    } else if (lane < 17) {
      from = p.conv[lane - 14].weight + channel * 4, target = to.taps[lane - 14], bytes = 2048;
    } else if (lane == 17 && p.gate_rule.dt_bias != nullptr) {
      from = p.gate_rule.dt_bias + channel, target = to.bias, bytes = 512;
    }
    if (from != nullptr) ptx::bulk_load(ptx::shared_address(target), from, bytes, barrier);
  }

  __device__ __forceinline__ void run() {
    if (blockIdx.x < p.wave) ask();
    ptx::wait_for_prerequisites();
    RingPlace<C::kStates> state;
    RingPlace<C::kInputs> input;
    const uint32_t gate_bytes = p.gate.dtype == Dtype::kFp32 ? 512 : 256;
    if (work.mine != 0) publish(0);
#pragma unroll 1
    for (uint32_t i = 0; i < work.mine; ++i, state.next(), input.next()) {
      if (i % 32 == 16 && i - i % 32 + 32 < work.mine) publish(i / 32 + 1);
      const RingUnit& u = s.unit[i / 32 % 2][i % 32];
      const bool runs = u.is(StepRow::kRuns), reads = runs && !u.is(StepRow::kFresh);
      const uint32_t input_full = ptx::shared_address(&s.input_full[input.index]);
      const uint32_t state_full = ptx::shared_address(&s.state_full[state.index]);
      wait_empty(s.input_empty[input.index], input.parity);
      if (lane_id() == 0) {
        if (runs)
          ptx::mbarrier_arrive_expect(input_full, (reads ? 13 : 4) * 256 + gate_bytes + 3 * 2048 +
                                                      (p.gate_rule.dt_bias != nullptr ? 512 : 0));
        else ptx::mbarrier_arrive(input_full);
      }
      __syncwarp();
      if (runs) copy_inputs(u, s.input[input.index], input_full, gate_bytes);
      wait_empty(s.state_empty[state.index], state.parity);
      if (lane_id() == 0) {
        if (reads) {
          ptx::mbarrier_arrive_expect(state_full, C::kStateBytes);
          ptx::bulk_load(ptx::shared_address(s.state[state.index]),
                         static_cast<const typename C::Pool*>(p.pool.data) + state_offset(p, u.slot, u.head),
                         C::kStateBytes, state_full);
        } else {
          ptx::mbarrier_arrive(state_full);
        }
      }
      __syncwarp();
    }
  }
};

// One part of every head's token, and its channels' windows.
template <class C>
__device__ __forceinline__ void prepare_ring(const LeanStepParams& p, typename C::Shared& s, int part) {
  const RingWork work(p);
  RingReader<C> reader{s};
  RingPlace<C::kInputs> input;
  RingPlace<C::kTokens> token;
  const int lane = lane_id();
  // What the copies do not bring, a head ahead.
  float next_A_log = 0.0f;
  unsigned next_beta = 0;
  const auto fetch = [&](uint32_t k) {
    const RingUnit& u = reader.at(k);
    if (!u.is(StepRow::kRuns)) return;
    if (p.gate_rule.A_log != nullptr) next_A_log = p.gate_rule.A_log[u.head];
    if (part == 3) next_beta = load_bits(p.beta.data, p.beta.offset(u.batch, u.begin, u.head), p.beta.dtype);
  };
  if (work.mine != 0) fetch(0);
#pragma unroll 1
  for (uint32_t i = 0; i < work.mine; ++i, input.next(), token.next(), reader.done()) {
    const RingUnit& u = reader.take();
    const float A_log = next_A_log;
    const unsigned beta = next_beta;
    if (i + 1 < work.mine) fetch(i + 1);
    const bool runs = u.is(StepRow::kRuns);
    const RingInput& from = s.input[input.index];
    wait_full(s.input_full[input.index], input.parity);
    DecayQuarter<128, true> decay;
    ConvLane conv;
#pragma unroll
    for (int j = 0; j < 4; ++j) conv.entry[j] = {0, 0};
    if (runs) {
      const int c = 32 * part + lane;
      decay.raw[0] = load_bits(from.gate, c, p.gate.dtype);
      decay.bias[0] = p.gate_rule.dt_bias != nullptr ? from.bias[c] : 0.0f;
      decay.A_log = A_log;
      if (part < 3) {
        conv.entry[3] = from.x[part][lane];
        if (!u.is(StepRow::kFresh)) {
#pragma unroll
          for (int j = 0; j < 3; ++j) conv.entry[j] = from.window[part][j][lane];
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) conv.taps[j] = from.taps[part][4 * lane + j];
      } else {
        conv.entry[0] = from.z[lane];
      }
    }
    arrive_warp(s.input_empty[input.index]);
    wait_empty(s.token_empty[token.index], token.parity);
    RingToken& t = s.token[token.index];
    if (runs) {
      decay.finish(p.gate_rule, p.gate.dtype, 128, static_cast<Part>(part), t.decay);
      float y[4];
      if (part < 3) {
        conv.convolve<typename C::Io>(y);
        if (part == 2) store_lane(y, t.v);
        else finish_normalised(y, p.form.qk_norm != 0, part == 0 ? t.q : t.k);
      } else {
        finish_gate<typename C::Io>(conv.entry[0], y);
        store_lane(y, t.z);
        if (lane == 0) t.beta = lean_beta(p, beta);
      }
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
  if (threadIdx.x == 0) {
    const auto init = [](const uint64_t& barrier, uint32_t arrivals) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
    };
    for (int i = 0; i < C::kStates; ++i) init(s.state_full[i], 1), init(s.state_empty[i], C::kHolders);
    for (int i = 0; i < C::kInputs; ++i) init(s.input_full[i], 1), init(s.input_empty[i], C::kParts);
    for (int i = 0; i < C::kTokens; ++i)
      init(s.token_full[i], C::kParts), init(s.token_empty[i], 1), init(s.o_full[i], C::kHolders);
    for (int i = 0; i < 2; ++i) init(s.rules_full[i], 1), init(s.rules_empty[i], C::kHolders + C::kParts + 1);
    ptx::fence_mbarrier_init();
  }
  ptx::launch_dependents();
  __syncthreads();
  const int warp = warp_id();
  if (warp == C::kHolders + C::kParts) {
    RingProducer<C>{p, s, RingWork(p)}.run();
    return;
  }
  ptx::wait_for_prerequisites();
  if (warp < C::kHolders) hold_ring<C>(p, s);
  else if (warp < C::kHolders + C::kParts) prepare_ring<C>(p, s, warp - C::kHolders);
  else norm_ring<C>(p, s);
}

}  // namespace kda::cuda

// decode_step's common call where heads are few: what counts is the chain from launch to the last store, not bytes.
//
// Grid       x = (head, slice of its value rows), a cluster a head; y, z = sequence.
// Block      all warps hold the slice's state rows in registers from the first load to the last store. Eight of them
//            prepare the token, a part each (0..2 q, k, v; 3 beta and z; 4..7 a quarter of the decays). The last one
//            finds the row.
// Waiting    the row is found while the grid before runs, its state is asked of the L2 and all addresses are ready;
//            after that grid's end the loads go out at once, and the last warp looks whether the index values are
//            still the same, which the others hear behind the token (only a difference costs time). One block barrier
//            before the token. Each warp sends its rows' sum of squares to all slices, and each takes the norm.
// Hazards    W-5: a warp sends its sum behind the barrier that follows the reading of the windows, and the first
//            slice stores those of q and k when it has all sums. V-5 by row.
// Precision  fp32; roundings to io after conv and after the recurrence, then one at the output (L-7).
#pragma once

#include "cuda/kernels/decode_step/lean.cuh"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/copy.h"

namespace kda::cuda {

template <class Pool_, class Io_, int kSlots_, int kWarps_>
struct SliceConfig {
  using Pool = Pool_;
  using Io = Io_;
  using Tile = StateTile<Pool, Shape::kExact128, kSlots_>;
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kParts = 8;            // of a token
  static constexpr int kFinder = kWarps - 1;  // warp
  static constexpr int kRows = kWarps * Tile::kRows, kSlices = 128 / kRows, kLanes = kRows / 4;
  static constexpr int kGroups = 128 / Tile::kRows;  // warps of a head
  static constexpr int kBlocks = 32 / kWarps;
  static constexpr bool kStaged = Tile::kSlots == 4;  // registers are short: new windows wait in shared memory
  struct alignas(16) Shared {
    float k[128], q[128], decay[128], v[kRows], z[kRows], weight[kRows];
    float sums[kGroups];                   // of squares, from each warp of the head
    uint2 window[kStaged ? 3 : 1][3][32];  // [part][column][lane]
    StepRow row[2];                        // as first found, and as it is where it has changed since
    float beta;
    uint32_t changed;
    uint64_t all_sums;
  };
};

template <class C>
struct SliceBlock {
  using Tile = typename C::Tile;
  using Pool = typename C::Pool;
  const LeanStepParams& p;
  typename C::Shared& s;
  const int32_t head, slice, part;  // the warp's part
  uint32_t now;                     // which of the rows
  uint32_t flags;                   // the row's
  // The lane's addresses, from place() to load(): of its warp's state rows, and of what its part loads.
  Pool* state;
  char* window;       // part 3: beta
  const char* input;  // z; a gate
  const float* taps;  // a bias
  ConvLane in;  // as loaded; z, beta and the norm's weights, or a decay's terms, in the place of entries and taps
  typename Tile::Raw raw;

  __device__ __forceinline__ SliceBlock(const LeanStepParams& params, typename C::Shared& shared, int32_t x, int warp)
      : p(params), s(shared), head(x / C::kSlices), slice(x % C::kSlices), part(warp), now(0) {}

  __device__ __forceinline__ bool is(uint32_t flag) const { return (flags & flag) != 0; }
  __device__ __forceinline__ int first_row() const { return slice * C::kRows; }
  // Of the slice's rows, the one whose results the lane has.
  __device__ __forceinline__ int mine() const { return part * Tile::kRows + Tile::row_of(Tile::slot_of_lane()); }
  // The lane's first channel, of the head's 128; of v and z only the slice's first lanes have any, and others do the
  // same again.
  __device__ __forceinline__ int lane_channel() const {
    return part < 2 ? 4 * lane_id() : first_row() + 4 * (lane_id() % C::kLanes);
  }
  __device__ __forceinline__ bool has_lane() const { return part < 2 || lane_id() < C::kLanes; }

  __device__ __forceinline__ Pool* state_of(const StepRow& row) const {
    return static_cast<Pool*>(p.pool.data) + state_offset(p, row.slot, head) +
           (first_row() + part * Tile::kRows) * 128;
  }
  __device__ __forceinline__ char* window_of(const StepRow& row) const {
    return window_of_lane(p.conv[part].window, row.slot, head * 128 + lane_channel());
  }
  static __device__ __forceinline__ char* element_of(const TokenRef& t, int64_t i) {
    return static_cast<char*>(const_cast<void*>(t.data)) + i * (t.dtype == Dtype::kFp32 ? 4 : 2);
  }

  // Reads the row and works the addresses out; a row that does not run needs none of them.
  __device__ __forceinline__ void place() {
    const StepRow row = s.row[now];
    flags = row.flags;
    state = state_of(row);
    window = nullptr, input = nullptr, taps = nullptr;
    if (part < 3) {
      const ConvChannels& c = p.conv[part];
      const int channel = head * 128 + lane_channel();
      window = window_of(row);
      input = row_of_part(c, row, channel);
      taps = c.weight + channel * 4;
    } else if (part == 3) {
      window = element_of(p.beta, p.beta.offset(row.batch, row.begin, head));
      input = element_of(p.z, p.z.offset(row.batch, row.begin, head) + lane_channel());
    } else if (part < C::kParts) {
      const int c = (part - 4) * 32 + lane_id();
      input = element_of(p.gate, p.gate.offset(row.batch, row.begin, head) + c);
      if (p.gate_rule.dt_bias != nullptr) taps = p.gate_rule.dt_bias + head * 128 + c;
    }
    ptx::have(state), ptx::have(window), ptx::have(input), ptx::have(taps);
  }

  // Asks the L2 for what load() will read, if the row stays what it is.
  __device__ __forceinline__ void ask() const {
    if (!is(StepRow::kRuns)) return;
    const int lane = lane_id();
    if (part < 3) {
      if (!has_lane()) return;
      if (lane % 2 == 0) ptx::prefetch_to_l2(taps);
      if (lane % 16 != 0 || is(StepRow::kFresh)) return;
#pragma unroll
      for (int j = 0; j < 3; ++j) ptx::prefetch_to_l2(window + 2 * j * p.conv[part].window.column_stride);
    } else if (part == 3) {
      if (lane == 0 && !is(StepRow::kFresh))
        ptx::prefetch_block_to_l2(state - 3 * Tile::kRows * 128, C::kRows * 128 * sizeof(Pool));
    } else if (part < C::kParts && lane == 0 && taps != nullptr) {
      ptx::prefetch_to_l2(taps);
    }
  }

  // Loads only; nothing waits for them here. The token's come first, as more is to be done with it.
  __device__ __forceinline__ void load() {
    if (!is(StepRow::kRuns)) return;
    if (part < 3) {
      in.entry[3] = *reinterpret_cast<const uint2*>(input);
      if (is(StepRow::kFresh)) {
        in.clear_history();
      } else {
#pragma unroll
        for (int j = 0; j < 3; ++j)
          in.entry[j] = *reinterpret_cast<const uint2*>(window + 2 * j * p.conv[part].window.column_stride);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) in.taps[j] = reinterpret_cast<const float4*>(taps)[j];
    } else if (part == 3) {
      in.entry[1].x = load_bits(window, 0, p.beta.dtype);
      in.entry[0] = *reinterpret_cast<const uint2*>(input);
      in.taps[0] = *reinterpret_cast<const float4*>(p.norm_weight + lane_channel());
    } else if (part < C::kParts) {
      in.entry[0].x = load_bits(input, 0, p.gate.dtype);
      in.taps[0].x = taps != nullptr ? *taps : 0.0f;
      in.taps[0].y = p.gate_rule.A_log != nullptr ? p.gate_rule.A_log[head] : 0.0f;
    }
    if (is(StepRow::kFresh)) Tile::zero(raw);
    else Tile::load(raw, {state, 128, 128, true}, 0);
  }

  __device__ __forceinline__ void keep_window() const {
    if constexpr (C::kStaged) {
#pragma unroll
      for (int j = 0; j < 3; ++j) s.window[part][j][lane_id()] = in.entry[j + 1];
    }
  }

  __device__ __forceinline__ void prepare() const {
    float y[4];
    if (part >= C::kParts) return;
    if (part >= 4) {
      DecayQuarter<128, true> decay;
      decay.raw[0] = in.entry[0].x, decay.bias[0] = in.taps[0].x, decay.A_log = in.taps[0].y;
      decay.finish(p.gate_rule, p.gate.dtype, 128, static_cast<Part>(part - 4), s.decay);
    } else if (part == 3) {
      finish_gate<typename C::Io>(in.entry[0], y);
      if (has_lane()) store_lane(y, s.z), reinterpret_cast<float4*>(s.weight)[lane_id()] = in.taps[0];
      if (lane_id() == 0) s.beta = lean_beta(p, in.entry[1].x);
    } else {
      keep_window();
      in.template convolve<typename C::Io>(y);
      if (part < 2) finish_normalised(y, p.form.qk_norm != 0, part == 0 ? s.q : s.k);
      else if (has_lane()) store_lane(y, s.v);
    }
  }

  static __device__ __forceinline__ typename C::Io io_of(float x) {
    typename C::Io y;
    from_fp32(x, y);
    return y;
  }

  // The sum of the warp's squares to every slice: the lower levels of the norm's tree.
  __device__ __forceinline__ void send_sum(float o) const {
    float sum = __fmul_rn(o, o);
    sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 16));
#pragma unroll
    for (int mask = 8 / Tile::kSlots; mask < 8; mask *= 2)
      sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, mask));
    if (lane_id() >= C::kSlices) return;
    const auto rank = static_cast<uint32_t>(lane_id());
    const float* to = s.sums + slice * C::kWarps + part;
    ptx::store_cluster_counted(ptx::map_shared_rank(ptx::shared_address(to), rank), sum,
                               ptx::map_shared_rank(ptx::shared_address(&s.all_sums), rank));
  }
  // The upper levels.
  __device__ __forceinline__ float sum_of_head() const {
    if constexpr (C::kGroups == 64) {
      const float2 x = reinterpret_cast<const float2*>(s.sums)[lane_id()];
      return tree_of_lanes<32>(__fadd_rn(x.x, x.y));
    } else {
      return tree_of_lanes<C::kGroups>(s.sums[lane_id() % C::kGroups]);
    }
  }

  __device__ __forceinline__ void store_window(const StepRow& row) {
    if constexpr (C::kStaged) {
#pragma unroll
      for (int j = 0; j < 3; ++j) in.entry[j + 1] = s.window[part][j][lane_id()];
    }
    if (has_lane()) in.store_window(p.conv[part].window, row.slot, head * 128 + lane_channel());
  }
  __device__ __forceinline__ char* output(const StepRow& row) const {
    return static_cast<char*>(p.out.data) + 2 * (p.out.offset(row.batch, row.begin, head) + first_row() + mine());
  }

  // Addresses are worked out again, as registers are short in between; nothing waits for that.
  __device__ __forceinline__ void run() {
    Tile tile;
    tile.widen(raw);
    tile.decay(s.decay);
    const float o = to_fp32(io_of(tile.token(s.k, s.q, s.beta, s.v[mine()], p.form.scale).o));
    send_sum(o);
    const StepRow row = s.row[now];
    const float z = s.z[mine()], weight = s.weight[mine()];
    tile.store({state_of(row), 128, 128, true}, 0);
    if (part == 2) store_window(row);
    char* const out = output(row);
    ptx::mbarrier_wait(ptx::shared_address(&s.all_sums), 0);
    const float factor = norm_factor_of<128>(sum_of_head(), p.eps);
    if (Tile::owns_row()) *reinterpret_cast<typename C::Io*>(out) = io_of(gated_by(o, factor, weight, z));
    if (slice == 0 && part < 2) store_window(row);
  }

  // A row that has no token to apply.
  __device__ __forceinline__ void leave() {
    const StepRow row = s.row[now];
    if (is(StepRow::kClears)) {
      Tile tile;
      Tile::zero(raw);
      in.clear_history(), in.entry[3] = {0, 0};
      tile.widen(raw);
      tile.store({state_of(row), 128, 128, true}, 0);
      if (part == 2 || (part < 2 && slice == 0)) keep_window(), store_window(row);
    } else if (is(StepRow::kZeroes) && Tile::owns_row()) {
      char* to = output(row);
#pragma unroll 1
      for (int32_t t = 0; t < row.length; ++t, to += 2 * p.out.row_stride)
        *reinterpret_cast<typename C::Io*>(to) = io_of(0.0f);
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    step_slices_kernel(const __grid_constant__ LeanStepParams p) {
  auto& s = *reinterpret_cast<typename C::Shared*>(token_slots<unsigned char>());
  touch_parameters(p);
  if (threadIdx.x == 0) {
    const uint32_t barrier = ptx::shared_address(&s.all_sums);
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect(barrier, 4 * C::kGroups);
  }
  ptx::cluster_arrive_relaxed();
  const int64_t n = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const auto x = static_cast<int32_t>(blockIdx.x);
  const int warp = __shfl_sync(kFullMask, warp_id(), 0);  // in a register: reading the thread's number again is slow
  if (n >= p.sequences.count) {  // the grid's last z
    ptx::wait_for_prerequisites();
    ptx::cluster_wait();
    return;
  }
  const bool early = n * gridDim.x + blockIdx.x < p.wave;
  if (!early) ptx::wait_for_prerequisites();
  ptx::cluster_wait();  // every slice's barrier is there
  StepIndex index;
  SliceBlock<C> block(p, s, x, warp);
#pragma unroll 1
  for (;; block.now = 1) {
    if (warp == C::kFinder) {
      if (block.now == 0) index.load(p, n);
      const StepRow row = index.row(p, n);
      if (lane_id() == 0) s.row[block.now] = row, s.changed = block.now;
    }
    __syncthreads();
    block.place();
    const bool looks = early && block.now == 0;
    if (looks) {
      block.ask();
      ptx::wait_for_prerequisites();
    }
    block.load();
    ptx::launch_dependents();
    if (looks && warp == C::kFinder && index.changes(p, n) && lane_id() == 0) s.changed = 1;
    if (block.is(StepRow::kRuns)) block.prepare();
    __syncthreads();
    if (s.changed == block.now) break;
  }
  if (block.is(StepRow::kRuns)) block.run();
  else block.leave();
}

}  // namespace kda::cuda

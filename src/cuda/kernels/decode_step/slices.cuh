// decode_step's common call where heads are few: what counts is the chain from launch to the last store, not bytes.
//
// Grid       x = (head, slice of its value rows), a cluster a head; y, z = sequence.
// Block      sixteen warps hold the slice's state rows in registers from the first load to the last store. Eight of
//            them prepare the token, a part each (0..2 q, k, v; 3 beta and z; 4..7 a quarter of the decays).
// Waiting    the row is found while the grid before runs and its state asked of the L2 (as recurrence/early.cuh; here
//            in registers). One block barrier before the token, one after; slices send each other their sum of
//            squares.
// Hazards    W-5: a slice sends its sum after it has read the windows, and the first slice stores those of q and k
//            when it has all sums. V-5 by row.
// Precision  fp32; roundings to io after conv and after the recurrence, then one at the output (L-7).
#pragma once

#include "cuda/kernels/decode_step/lean.cuh"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/copy.h"

namespace kda::cuda {

template <class Pool_, class Io_, int kSlots_>
struct SliceConfig {
  using Pool = Pool_;
  using Io = Io_;
  using Tile = StateTile<Pool, Shape::kExact128, kSlots_>;
  static constexpr int kWarps = 16, kThreads = 32 * kWarps;
  static constexpr int kParts = 8;  // of a token
  static constexpr int kRows = kWarps * Tile::kRows, kSlices = 128 / kRows, kLanes = kRows / 4;
  static constexpr int kBlocks = 2;
  struct alignas(16) Shared {
    float k[128], q[128], decay[128], v[kRows], z[kRows], o[kRows];
    float sums[kSlices];  // of squares, from each slice
    float beta;
    uint64_t all_sums;
  };
};

template <class C>
struct SliceBlock {
  using Tile = typename C::Tile;
  using Pool = typename C::Pool;
  const LeanStepParams& p;
  typename C::Shared& s;
  const int64_t n;
  const int32_t head, slice;
  StepRow row;
  ConvLane in;  // what the warp's part loads; z and beta, or a decay's terms, in the place of entries and taps
  typename Tile::Raw raw;

  __device__ __forceinline__ int first_row() const { return slice * C::kRows; }
  // The lane's first channel, of the head's 128; lanes behind the slice's rows have none of v and z.
  __device__ __forceinline__ int lane_channel(int part) const {
    return (part >= 2 ? first_row() : 0) + 4 * lane_id();
  }
  __device__ __forceinline__ bool has_lane(int part) const { return part < 2 || lane_id() < C::kLanes; }
  __device__ __forceinline__ Pool* state() const {
    return static_cast<Pool*>(p.pool.data) + state_offset(p, row.slot, head) + first_row() * 128;
  }

  // Asks the L2 for what load() will read, if the row stays what it is.
  __device__ __forceinline__ void ask() const {
    if (!row.is(StepRow::kRuns)) return;
    const int part = warp_id(), lane = lane_id();
    if (part < 3) {
      const ConvChannels& c = p.conv[part];
      const int channel = head * 128;
      if (lane < 16) ptx::prefetch_to_l2(c.weight + channel * 4 + lane * 32);
      else if (lane < 22 && !row.is(StepRow::kFresh))
        ptx::prefetch_to_l2(window_of_lane(c.window, row.slot, channel) + 128 * (lane & 1) +
                            (lane - 16) / 2 * 2 * c.window.column_stride);
    } else if (part == 3) {
      if (lane == 0 && !row.is(StepRow::kFresh)) ptx::prefetch_block_to_l2(state(), C::kRows * 128 * sizeof(Pool));
    } else if (part < C::kParts && lane == 0 && p.gate_rule.dt_bias != nullptr) {
      ptx::prefetch_to_l2(p.gate_rule.dt_bias + head * 128 + (part - 4) * 32);
    }
  }

  // Loads only; nothing waits for them here.
  __device__ __forceinline__ void load() {
    if ((row.flags & (StepRow::kRuns | StepRow::kFresh)) == StepRow::kRuns)
      Tile::load(raw, {state(), 128, 128, true}, warp_id() * Tile::kRows);
    else Tile::zero(raw);
    const int part = warp_id();
#pragma unroll
    for (int j = 0; j < 4; ++j) in.entry[j] = {0, 0};
    if (!row.is(StepRow::kRuns)) return;
    if (part < 3) {
      if (!has_lane(part)) return;
      const ConvChannels& c = p.conv[part];
      const int channel = head * 128 + lane_channel(part);
      if (!row.is(StepRow::kFresh)) {
        const char* window = window_of_lane(c.window, row.slot, channel);
#pragma unroll
        for (int j = 0; j < 3; ++j)
          in.entry[j] = *reinterpret_cast<const uint2*>(window + 2 * j * c.window.column_stride);
      }
      in.entry[3] = *reinterpret_cast<const uint2*>(row_of_part(c, row, channel));
#pragma unroll
      for (int j = 0; j < 4; ++j) in.taps[j] = reinterpret_cast<const float4*>(c.weight + channel * 4)[j];
    } else if (part == 3) {
      in.entry[1].x = load_bits(p.beta.data, p.beta.offset(row.batch, row.begin, head), p.beta.dtype);
      if (has_lane(part))
        in.entry[0] = *reinterpret_cast<const uint2*>(
            static_cast<const char*>(p.z.data) + 2 * (p.z.offset(row.batch, row.begin, head) + lane_channel(part)));
    } else if (part < C::kParts) {
      const int c = (part - 4) * 32 + lane_id();
      in.entry[0].x = load_bits(p.gate.data, p.gate.offset(row.batch, row.begin, head) + c, p.gate.dtype);
      in.taps[0].x = p.gate_rule.dt_bias != nullptr ? p.gate_rule.dt_bias[head * 128 + c] : 0.0f;
      in.taps[0].y = p.gate_rule.A_log != nullptr ? p.gate_rule.A_log[head] : 0.0f;
    }
  }

  __device__ __forceinline__ void prepare() const {
    const int part = warp_id();
    float y[4];
    if (part >= C::kParts) return;
    if (part >= 4) {
      DecayQuarter<128, true> decay;
      decay.raw[0] = in.entry[0].x, decay.bias[0] = in.taps[0].x, decay.A_log = in.taps[0].y;
      decay.finish(p.gate_rule, p.gate.dtype, 128, static_cast<Part>(part - 4), s.decay);
    } else if (part == 3) {
      finish_gate<typename C::Io>(in.entry[0], y);
      if (has_lane(part)) store_lane(y, s.z);
      if (lane_id() == 0) s.beta = lean_beta(p, in.entry[1].x);
    } else {
      in.template convolve<typename C::Io>(y);
      if (part < 2) finish_normalised(y, p.form.qk_norm != 0, part == 0 ? s.q : s.k);
      else if (has_lane(part)) store_lane(y, s.v);
    }
  }

  __device__ __forceinline__ void store_window(int part) const {
    if (has_lane(part)) in.store_window(p.conv[part].window, row.slot, head * 128 + lane_channel(part));
  }

  // A row that has no token to apply.
  __device__ __forceinline__ void leave() const {
    if (row.is(StepRow::kClears)) {
      Tile tile;
      tile.widen(raw);
      tile.store({state(), 128, 128, true}, warp_id() * Tile::kRows);
      if (warp_id() == 2 || (warp_id() < 2 && slice == 0)) store_window(warp_id());
    } else if (row.is(StepRow::kZeroes) && warp_id() == 0 && lane_id() < C::kLanes) {
      char* to = out_of_lane();
      for (int32_t t = 0; t < row.length; ++t, to += 2 * p.out.row_stride) *reinterpret_cast<uint2*>(to) = {0, 0};
    }
  }

  __device__ __forceinline__ char* out_of_lane() const {
    return static_cast<char*>(p.out.data) +
           2 * (p.out.offset(row.batch, row.begin, head) + first_row() + 4 * lane_id());
  }

  // The sum of the slice's squares to every slice: the lower levels of the norm's tree.
  __device__ __forceinline__ void send_sum(const float (&o)[4]) const {
    const float sum = __shfl_sync(kFullMask, tree_of_lanes<C::kLanes>(tree_of_squares<4>(o)), 0);
    if (lane_id() < C::kSlices) {
      const auto rank = static_cast<uint32_t>(lane_id());
      ptx::store_cluster_counted(ptx::map_shared_rank(ptx::shared_address(&s.sums[slice]), rank), sum,
                                 ptx::map_shared_rank(ptx::shared_address(&s.all_sums), rank));
    }
  }

  __device__ __forceinline__ void run(float4 weight) {
    prepare();
    __syncthreads();
    const int first = warp_id() * Tile::kRows, mine = first + Tile::row_of(Tile::slot_of_lane());
    Tile tile;
    tile.widen(raw);
    tile.decay(s.decay);
    const auto r = tile.token(s.k, s.q, s.beta, s.v[mine], p.form.scale);
    if (Tile::owns_row()) s.o[mine] = round_element(r.o, p.form.io);
    ptx::cluster_wait();  // every slice runs
    __syncthreads();
    float o[4] = {};
    if (warp_id() == 0) {
      if (lane_id() < C::kLanes) {
        const float4 x = *reinterpret_cast<const float4*>(s.o + 4 * lane_id());
        o[0] = x.x, o[1] = x.y, o[2] = x.z, o[3] = x.w;
      }
      send_sum(o);
    }
    tile.store({state(), 128, 128, true}, first);
    if (warp_id() == 2) store_window(2);
    if (warp_id() > 1) return;
    if (warp_id() == 1 && slice != 0) return;
    ptx::mbarrier_wait(ptx::shared_address(&s.all_sums), 0);
    if (warp_id() == 0) {
      const float sum = tree_of_lanes<C::kSlices>(s.sums[lane_id() % C::kSlices]);
      const float factor = norm_factor(sum, 128, p.eps);
      if (lane_id() < C::kLanes)
        store_normed<typename C::Io>(out_of_lane(), o, factor, weight,
                                     *reinterpret_cast<const float4*>(s.z + 4 * lane_id()));
    }
    if (slice == 0) store_window(warp_id());
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
    ptx::mbarrier_arrive_expect(barrier, 4 * C::kSlices);
  }
  ptx::cluster_arrive();
  const int64_t n = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const auto x = static_cast<int32_t>(blockIdx.x);
  SliceBlock<C> block{p, s, n, x / C::kSlices, x % C::kSlices, {}, {}, {}};
  ptx::launch_dependents();
  if (n >= p.sequences.count) {  // the grid's last z
    ptx::wait_for_prerequisites();
    ptx::cluster_wait();
    return;
  }
  const bool early = n * gridDim.x + blockIdx.x < p.wave;
  if (!early) ptx::wait_for_prerequisites();
  // Early, the row is found once more when all has been asked for: until the grid before has ended it may change.
  for (bool again = false;; again = true) {
    const StepRow row = step_row(p, n);
    if (again && row == block.row) break;
    block.row = row;
    if (early && !again) {
      block.ask();
      ptx::wait_for_prerequisites();
    }
    block.load();
    if (!early) break;
  }
  if (!block.row.is(StepRow::kRuns)) {
    block.leave();
    ptx::cluster_wait();
    return;
  }
  float4 weight = make_float4(0, 0, 0, 0);
  if (warp_id() == 0 && lane_id() < C::kLanes)
    weight = *reinterpret_cast<const float4*>(p.norm_weight + block.first_row() + 4 * lane_id());
  block.run(weight);
}

}  // namespace kda::cuda

// What the kernels of decode_step's common call share: the row's rule and the parts of its token (L-7.2, E-1, E-4).
// Sums and roundings are those of the general kernel, by the same functions.
#pragma once

#include "cuda/kernels/conv/stream.cuh"
#include "cuda/kernels/decode_step/lean_params.h"
#include "cuda/kernels/gated_norm/norm.cuh"
#include "cuda/kernels/recurrence/token.cuh"
#include "cuda/ptx/mbarrier.h"

namespace kda::cuda {

// A row as resolve_decode_row() and conv_row() decide it where width is 1 and states go back to their slot.
struct StepRow {
  static constexpr uint32_t kRuns = 1, kFresh = 2, kClears = 4, kZeroes = 8;
  int64_t slot = -1;
  int32_t batch = 0, begin = 0, length = 0;  // plans bound T and N below 2^31
  uint32_t flags =
      0;  // kClears: a fresh row of no tokens, state and window become zero (P-11); kZeroes: its output does

  __device__ __forceinline__ bool is(uint32_t flag) const { return (flags & flag) != 0; }
};

__device__ __forceinline__ StepRow resolve_step_row(const LeanStepParams& p, const DecodeLoads& l, int64_t n) {
  const SlotRef& t = p.rule.slots;
  const bool packed = !t.slots.present();
  const Span span = resolve_span(l.span, p.sequences, n);
  StepRow row;
  row.slot = packed ? n : l.slot.value();
  row.batch = static_cast<int32_t>(span.batch);
  row.begin = static_cast<int32_t>(span.begin);
  row.length = static_cast<int32_t>(span.length);
  if (!is_looked_at(l, p.sequences, n)) return row;
  const bool fresh = t.initial == Initial::kNone || l.flag == 0;
  const bool active =
      row.length <= 1 && l.accepted == 1 && slot_is_live(row.slot, t.count, packed ? -1 : t.null_slot);
  if (!active) row.flags = StepRow::kZeroes;
  else if (row.length == 1) row.flags = StepRow::kRuns | (fresh ? StepRow::kFresh : 0);
  else if (fresh) row.flags = StepRow::kClears;
  return row;
}

// A row's index values by one load of the warp, half an index a lane: uniform loads are waited for one after the other.
struct StepIndex {
  static constexpr int kSlot = 0, kFirst = 2, kSecond = 4, kAccepted = 6, kActive = 7, kFlag = 8;
  int32_t value = 0;

  __device__ __forceinline__ void load(const LeanStepParams& p, int64_t n) {
    const SequenceRef& s = p.sequences;
    const SlotRef& t = p.rule.slots;
    const bool offsets = s.cu.present();
    const int lane = lane_id();
    IndexRef from = t.slots;
    int64_t row = n;
    if (lane >= kFirst) from = offsets ? s.cu : s.begin;
    if (lane >= kSecond && offsets) row = n + 1;
    if (lane >= kSecond && !offsets) from = s.length;
    const auto* at = static_cast<const int32_t*>(from.data) + (row * from.row_stride << from.wide) + (lane & 1);
    bool any = lane < kAccepted && from.present() && ((lane & 1) == 0 || from.wide != 0);
    value = lane < kAccepted ? 0 : 1;
    if (lane == kAccepted) at = p.rule.accepted + n * p.rule.accepted_stride, any = p.rule.accepted != nullptr;
    if (lane == kActive) value = s.count, at = s.num_active, any = at != nullptr;
    if (any) value = load_index(at, true);
    if (lane == kFlag && t.initial == Initial::kFlags) value = load_flag(t.flags + n * t.flags_stride, true);
  }
  // Loads again; whether anything is another value now.
  __device__ __forceinline__ bool changes(const LeanStepParams& p, int64_t n) {
    const int32_t before = value;
    load(p, n);
    return __any_sync(kFullMask, value != before);
  }
  __device__ __forceinline__ int32_t get(int lane) const { return __shfl_sync(kFullMask, value, lane); }
  __device__ __forceinline__ StepRow row(const LeanStepParams& p, int64_t n) const {
    const SequenceRef& s = p.sequences;
    DecodeLoads l;
    l.slot = {get(kSlot), get(kSlot + 1), p.rule.slots.slots.wide};
    l.span.first = {get(kFirst), get(kFirst + 1), s.cu.present() ? s.cu.wide : s.begin.wide};
    l.span.second = {get(kSecond), get(kSecond + 1), s.cu.present() ? s.cu.wide : s.length.wide};
    l.accepted = get(kAccepted), l.active = get(kActive), l.flag = get(kFlag);
    return resolve_step_row(p, l, n);
  }
};

__device__ __forceinline__ int64_t state_offset(const LeanStepParams& p, int64_t slot, int32_t head) {
  return slot * p.pool.slot_stride + static_cast<int64_t>(head) * (128 * 128);
}

// First of a lane's four channels in column 0 of a window; and of a row of the inputs. In bytes: elements have two.
__device__ __forceinline__ char* window_of_lane(const WindowRef& w, int64_t slot, int32_t channel) {
  return static_cast<char*>(w.data) + 2 * (slot * w.slot_stride + channel);
}
__device__ __forceinline__ const char* row_of_part(const ConvChannels& c, const StepRow& row, int32_t channel) {
  return static_cast<const char*>(c.x) + 2 * (row.batch * c.x_batch + row.begin * c.x_row + channel);
}

// A lane's four neighbouring channels of q, k or v: entries of their stream, the last one the input, and their taps.
struct ConvLane {
  uint2 entry[4];
  float4 taps[4];

  __device__ __forceinline__ void clear_history() {
#pragma unroll
    for (int j = 0; j < 3; ++j) entry[j] = {0, 0};
  }

  // W-1, rounded to io.
  template <class Io>
  __device__ __forceinline__ void convolve(float (&y)[4]) const {
    float x[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 low = widen_pair(entry[j].x, Io{}), high = widen_pair(entry[j].y, Io{});
      x[0][j] = low.x, x[1][j] = low.y, x[2][j] = high.x, x[3][j] = high.y;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float w[4] = {taps[i].x, taps[i].y, taps[i].z, taps[i].w};
      y[i] = conv_value<4>(w, x[i], false, 0.0f, true);
    }
    const float2 low = widen_pair(round_pair(y[0], y[1], Io{}), Io{}),
                 high = widen_pair(round_pair(y[2], y[3], Io{}), Io{});
    y[0] = low.x, y[1] = low.y, y[2] = high.x, y[3] = high.y;
  }

  // W-3: the window after the token.
  __device__ __forceinline__ void store_window(const WindowRef& w, int64_t slot, int32_t channel) const {
    char* const to = window_of_lane(w, slot, channel);
#pragma unroll
    for (int j = 0; j < 3; ++j) *reinterpret_cast<uint2*>(to + 2 * j * w.column_stride) = entry[j + 1];
  }
};

// Four neighbouring values of z in a lane, through the logistic function.
template <class Io>
__device__ __forceinline__ void finish_gate(uint2 bits, float (&z)[4]) {
  const float2 low = widen_pair(bits.x, Io{}), high = widen_pair(bits.y, Io{});
  z[0] = sigmoid_fast(low.x), z[1] = sigmoid_fast(low.y), z[2] = sigmoid_fast(high.x), z[3] = sigmoid_fast(high.y);
}

__device__ __forceinline__ float lean_beta(const LeanStepParams& p, unsigned bits) {
  return beta_value(float_of_bits(bits, p.beta.dtype), p.form.beta_logits != 0, p.form.beta_doubled != 0);
}

// A lane's four outputs: o as rounded to io, z from finish_gate().
template <class Io>
__device__ __forceinline__ void store_normed(void* to, const float (&o)[4], float factor, const float4& weight,
                                             const float4& z) {
  uint2 bits;
  bits.x = round_pair(gated_by(o[0], factor, weight.x, z.x), gated_by(o[1], factor, weight.y, z.y), Io{});
  bits.y = round_pair(gated_by(o[2], factor, weight.z, z.z), gated_by(o[3], factor, weight.w, z.w), Io{});
  *static_cast<uint2*>(to) = bits;
}

}  // namespace kda::cuda

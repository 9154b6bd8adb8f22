// Tokens of a decode_step: q, k and v come out of the convolution of raw projections, rounded to the io dtype (L-7.2).
#pragma once

#include "cuda/kernels/conv/stream.cuh"
#include "cuda/kernels/decode_step/params.h"
#include "cuda/kernels/recurrence/source.cuh"

namespace kda::cuda {

template <int kKeys, int kValues>
struct alignas(16) StepSlot : TokenSlot<kKeys, kValues, true> {
  float raw_k[kKeys];  // for the records (V-10)
  float z[kValues];
  float o[kValues];
};

struct StepInput {
  static constexpr int kLanes = 4, kWidth = 4;
  unsigned stream[kLanes][kWidth];
  float4 taps[kLanes];
  unsigned beta;
  DecayQuarter<128, true> decay;
};

template <class Slot_>
struct ConvSource {
  using Slot = Slot_;
  using Input = StepInput;
  const DecodeStepParams& p;
  const HeadPlace& at;
  const ConvRow& conv;
  bool stores = false;

  // First channel of a part among those of its tensor, and how many there are.
  __device__ __forceinline__ int64_t first_channel(Part part) const {
    if (part == Part::kValue) return static_cast<int64_t>(at.head) * 128 + at.first_row;
    return static_cast<int64_t>(at.query_head) * 128;
  }

  __device__ __forceinline__ VectorRef row_of(const TokenRef& x, int t) const {
    return {x.data, x.offset(at.span.batch, at.span.begin + t, at.head), 128, x.dtype};
  }

  __device__ __forceinline__ void gather(Input& in, Part part, int t) const {
    in.decay.gather(p.gate_rule, row_of(p.gate, t), part, at.head);
    if (part == Part::kScalar) {
      in.beta = load_bits(p.beta.data, p.beta.offset(at.span.batch, at.span.begin + t, at.head), p.beta.dtype);
      if (!p.norm) return;
      VectorRef z = row_of(p.z, t);
      z.offset += at.first_row;
      unsigned bits[Input::kLanes];
      z.n = at.rows;
      gather_vector<false>(bits, z);
#pragma unroll
      for (int i = 0; i < Input::kLanes; ++i) in.stream[i][0] = bits[i];
      return;
    }
    const ConvChannels& c = p.conv[static_cast<int>(part)];
    const int64_t first = first_channel(part);
    const int32_t n = part == Part::kValue ? at.rows : 128;
#pragma unroll
    for (int i = 0; i < Input::kLanes; ++i) {
      const int lane = lane_id() + 32 * i;
      const bool exists = lane < n && conv.active;
      in.taps[i] = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < Input::kWidth; ++j) in.stream[i][j] = 0;
      if (!exists) continue;
      const float* w = c.weight + (first + lane) * Input::kWidth;
      in.taps[i] = p.taps_aligned ? *reinterpret_cast<const float4*>(w) : make_float4(w[0], w[1], w[2], w[3]);
#pragma unroll
      for (int j = 0; j < Input::kWidth; ++j) in.stream[i][j] = stream_bits(c, first + lane, t + j);
    }
  }

  // stream[i] with history at conv.offset: in records mode that is the window as it was before a fold (W-4).
  __device__ __forceinline__ unsigned stream_bits(const ConvChannels& c, int64_t channel, int i) const {
    constexpr int kHistory = Input::kWidth - 1;
    if (i >= kHistory) {
      const int64_t row = conv.span.begin + i - kHistory;
      return element_bits(c.x, conv.span.batch * c.x_batch + row * c.x_row + channel, p.form.io);
    }
    if (conv.fresh) return 0;
    return element_bits(c.window.data, window_offset(c.window, conv.read_slot, channel, conv.offset + i), c.window.dtype);
  }

  __device__ __forceinline__ void finish(const Input& in, Part part, int t, Slot& s) const {
    in.decay.finish(p.gate_rule, p.gate.dtype, 128, part, s.decay);
    if (part == Part::kScalar) {
      finish_scalars(p, at, in.beta, t, stores, s);
#pragma unroll
      for (int i = 0; i < Input::kLanes; ++i) {
        if (p.norm && lane_id() + 32 * i < at.rows) s.z[lane_id() + 32 * i] = element_value(in.stream[i][0], p.z.dtype);
      }
      return;
    }
    const ConvChannels& c = p.conv[static_cast<int>(part)];
    float y[Input::kLanes];
#pragma unroll
    for (int i = 0; i < Input::kLanes; ++i) {
      const float w[4] = {in.taps[i].x, in.taps[i].y, in.taps[i].z, in.taps[i].w};
      float x[Input::kWidth];
#pragma unroll
      for (int j = 0; j < Input::kWidth; ++j) {
        x[j] = element_value(in.stream[i][j], t + j >= Input::kWidth - 1 ? p.form.io : c.window.dtype);
      }
      y[i] = conv.active ? round_element(conv_value<Input::kWidth>(w, x, false, 0.0f, true), p.form.io) : 0.0f;
    }
    if (part == Part::kValue) {
      finish_values<4>(y, at.rows, s.v);
    } else {
      finish_normalised<4>(y, p.form.qk_norm != 0, part == Part::kQuery ? s.q : s.k);
      if (part == Part::kKey) finish_values<4>(y, 128, s.raw_k);
    }
  }
};

}  // namespace kda::cuda

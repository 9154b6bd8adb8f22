// Tokens of a decode_step: q, k and v come out of the convolution of raw projections, rounded to the io dtype
// (L-7.2).
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

// Four neighbouring channels of one entry of the stream, or four values of z, as loaded. Three parts of a step's
// token are convolved, so the fourth's z and beta take the place of a stream.
struct StepInput {
  static constexpr int kLanes = 4, kWidth = 4;
  LaneBits<kLanes> stream[kWidth];
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
  unsigned (*s_window)[3][128] = nullptr;  // [part][column][channel] of a row of one token: its window after it (W-3)

  // First channel of a part among those of its tensor, and how many there are.
  __device__ __forceinline__ int64_t first_channel(Part part) const {
    if (part == Part::kValue) return static_cast<int64_t>(at.head) * 128 + at.first_row;
    return static_cast<int64_t>(at.query_head) * 128;
  }

  __device__ __forceinline__ VectorRef row_of(const TokenRef& x, int t) const {
    return {x.data, x.offset(at.span.batch, at.span.begin + t, at.head), 128, x.dtype, x.vectors != 0};
  }

  __device__ __forceinline__ void gather(Input& in, Part part, int t) const {
    in.decay.gather(p.gate_rule, row_of(p.gate, t), part, at.head);
    if (part == Part::kScalar) {
      in.beta = load_bits(p.beta.data, p.beta.offset(at.span.batch, at.span.begin + t, at.head), p.beta.dtype);
      if (!p.norm) return;
      VectorRef z = row_of(p.z, t);
      z.offset += at.first_row;
      z.n = at.rows;
      in.stream[0].gather(z);
      return;
    }
    const ConvChannels& c = p.conv[static_cast<int>(part)];
    const int64_t first = first_channel(part);
    const int32_t n = conv.active ? (part == Part::kValue ? at.rows : 128) : 0;
    const auto* taps = reinterpret_cast<const float4*>(c.weight + (first + LaneBits<4>::first()) * Input::kWidth);
#pragma unroll
    for (int i = 0; i < Input::kLanes; ++i) {
      in.taps[i] = LaneBits<4>::first() < n ? load_taps(taps + i) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < Input::kWidth; ++j) gather_stream(in.stream[j], c, first, n, t + j);
  }

  __device__ __forceinline__ float4 load_taps(const float4* p4) const {
    if (p.taps_aligned) return *p4;
    const auto* w = reinterpret_cast<const float*>(p4);
    return make_float4(w[0], w[1], w[2], w[3]);
  }

  // stream[i] with history at conv.offset: in records mode that is the window as it was before a fold (W-4).
  __device__ __forceinline__ void gather_stream(LaneBits<4>& bits, const ConvChannels& c, int64_t first, int32_t n,
                                                int i) const {
    constexpr int kHistory = Input::kWidth - 1;
    const WindowRef& w = c.window;
    VectorRef from;
    int64_t stride = 1;
    if (i >= kHistory) {
      const int64_t row = conv.span.begin + i - kHistory;
      from = {c.x, conv.span.batch * c.x_batch + row * c.x_row + first, n, p.form.io, c.x_vectors != 0};
    } else {
      from = {w.data, 0, 0, w.dtype, w.vectors != 0};
      stride = w.channel_stride;
      if (!conv.fresh) from.offset = window_offset(w, conv.read_slot, first, conv.offset + i), from.n = n;
    }
    bits.gather(from, stride);
  }

  // Entries 1..3 of the stream, as the window's bits.
  __device__ __forceinline__ void keep_window(const Input& in, Part part, Dtype dtype) const {
    const int32_t n = part == Part::kValue ? at.rows : 128;
    if (LaneBits<4>::first() >= n) return;
#pragma unroll
    for (int j = 1; j < Input::kWidth; ++j) {
      const bool input = j == Input::kWidth - 1;
      const Dtype from = input ? p.form.io : dtype;
      const bool vectors =
          (input ? p.conv[static_cast<int>(part)].x_vectors : p.conv[static_cast<int>(part)].window.vectors) != 0;
#pragma unroll
      for (int i = 0; i < Input::kLanes; ++i) {
        unsigned bits = in.stream[j].element(i, from, vectors);
        if (from != dtype) bits = __float_as_uint(element_value(bits, from));  // a pool of fp32
        s_window[static_cast<int>(part)][j - 1][LaneBits<4>::first() + i] = bits;
      }
    }
  }

  __device__ __forceinline__ void finish(const Input& in, Part part, int t, Slot& s) const {
    in.decay.finish(p.gate_rule, p.gate.dtype, 128, part, s.decay);
    float y[Input::kLanes];
    if (part == Part::kScalar) {
      finish_scalars(p, at, in.beta, t, stores, s);
      if (!p.norm) return;
      in.stream[0].convert(y, p.z.dtype, p.z.vectors != 0);
      return finish_values(y, at.rows, s.z);
    }
    const ConvChannels& c = p.conv[static_cast<int>(part)];
    float x[Input::kWidth][Input::kLanes];
#pragma unroll
    for (int j = 0; j < Input::kWidth; ++j) {
      const bool input = t + j >= Input::kWidth - 1;
      in.stream[j].convert(x[j], input ? p.form.io : c.window.dtype, (input ? c.x_vectors : c.window.vectors) != 0);
    }
#pragma unroll
    for (int i = 0; i < Input::kLanes; ++i) {
      const float w[4] = {in.taps[i].x, in.taps[i].y, in.taps[i].z, in.taps[i].w};
      const float entries[Input::kWidth] = {x[0][i], x[1][i], x[2][i], x[3][i]};
      y[i] = conv.active ? round_element(conv_value<Input::kWidth>(w, entries, false, 0.0f, true), p.form.io) : 0.0f;
    }
    if (s_window != nullptr) keep_window(in, part, c.window.dtype);
    if (part == Part::kValue) return finish_values(y, at.rows, s.v);
    finish_normalised(y, p.form.qk_norm != 0, part == Part::kQuery ? s.q : s.k);
    if (part == Part::kKey) store_lane(y, s.raw_k);
  }
};

}  // namespace kda::cuda

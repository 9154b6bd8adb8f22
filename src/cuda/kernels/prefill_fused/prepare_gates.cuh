// Producer warps: an item's raw gates to prefix sums of log decays.
//
// Gate layout: lane = channel pair (lane % 16) of token block (lane / 16), so that sums run inside a lane. Raw gates
// come in the fragment layout of prepare_rows.cuh and change over in the warp's scratch, or wait in RowsAhead.
#pragma once

#include <type_traits>

#include "cuda/kernels/prefill_fused/prepare_rows.cuh"

namespace kda::cuda::prefill_fused {

// Where a lane finds its channel pair of token 0 or 16 among the raw gates of its warp, the next token kPitch behind.
// RawT float2: fp32; uint32_t: bf16. In both some bit changes every four tokens.
template <class RawT, uint32_t kPitch>
struct RawPlace {
  uint32_t at;
};
using WideInPlace = RawPlace<float2, 128>;      // fp32 in the places of their sums
using NarrowInPlace = RawPlace<uint32_t, 128>;  // bf16 in halves of the rows of their sums
using NarrowAhead = RawPlace<uint32_t, 256>;    // RowsAhead

// Bounded bf16 gates are staged as they are: half the traffic. The other gates' loops are better off with fp32.
template <Gate kGate, class GateT>
using InPlace = std::conditional_t<kGate == Gate::kBounded && sizeof(GateT) == 4, NarrowInPlace, WideInPlace>;

__device__ __forceinline__ void raw_place(WideInPlace& place, uint32_t scratch, const ProducerLane& me) {
  place.at = scratch + (me.lane >> 4) * 2048 + (me.lane & 15) * 8;
}
__device__ __forceinline__ void raw_place(NarrowInPlace& place, uint32_t scratch, const ProducerLane& me) {
  place.at = scratch + (me.lane >> 4) * (2048 + 64) + (me.lane & 15) * 4;
}
__device__ __forceinline__ void raw_place(NarrowAhead& place, const RowsAhead& ahead, const ProducerLane& me) {
  const uint32_t block = me.lane >> 4;
  place.at = ahead.rows + RowsAhead::kGate + block * 4096 + ((me.warp * 64) ^ (block * 64)) + (me.lane & 15) * 4;
}

// The raw gates to the rows where their prefix sums will stand.
template <Gate kGate, class GateT>
__device__ __forceinline__ void stage_gates(RawGates<GateT>& raw, int first, int count, uint32_t scratch,
                                            const ProducerLane& me) {
  pad_tokens(raw.x, first, count, padding_gate<kGate, GateT>(), me);
#pragma unroll
  for (int block = 0; block < RawGates<GateT>::kBlocks; ++block) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const uint32_t token = side == 0 ? me.token_a : me.token_b;
      const uint32_t at = scratch + prefix_offset(token, 2 * me.c) + (first + block) * 2048;
      const uint4& x = raw.x[block][side][0];
      if constexpr (std::is_same_v<InPlace<kGate, GateT>, NarrowInPlace>) {
        const uint32_t half = (((token >> 2) & 1) * 64) ^ (block * 64);
        ptx::store_shared(scratch + block * 2048 + token * 128 + half + me.c * 16, x);
      } else if constexpr (sizeof(GateT) == 4) {
        ptx::store_shared(at,
                          float4{ptx::bf16_low(x.x), ptx::bf16_high(x.x), ptx::bf16_low(x.y), ptx::bf16_high(x.y)});
        ptx::store_shared(at ^ 16,
                          float4{ptx::bf16_low(x.z), ptx::bf16_high(x.z), ptx::bf16_low(x.w), ptx::bf16_high(x.w)});
      } else {
        ptx::store_shared(at, x);
        ptx::store_shared(at ^ 16, raw.x[block][side][1]);
      }
    }
  }
}

// kCount tokens of a channel pair, from `at` on, log decays added up in place. The swizzle changes every four tokens.
template <Gate kGate, class GateT, int kCount>
__device__ __forceinline__ void add_gates(float2& sum, const GateT (&raw)[kCount], uint32_t at, const float2& bias,
                                          const float2& factors) {
#pragma unroll
  for (int t = 0; t < kCount; ++t) {
    const float2 x = widen_pair(raw[t]);
    sum.x = add_log_decay<kGate>(sum.x, x.x, bias.x, factors.x, factors.y);
    sum.y = add_log_decay<kGate>(sum.y, x.y, bias.y, factors.x, factors.y);
    ptx::store_shared((t < 4 ? at : at ^ 16) + t * 128, sum);
  }
}
template <class RawT, uint32_t kPitch, int kCount>
__device__ __forceinline__ void load_pairs(RawT (&raw)[kCount], const RawPlace<RawT, kPitch>& place) {
#pragma unroll
  for (int t = 0; t < kCount; ++t) {
    const uint32_t at = t < 4 ? place.at : place.at ^ (sizeof(RawT) == 8 ? 16 : 64);
    if constexpr (sizeof(RawT) == 8) raw[t] = ptx::load_shared_f2(at + t * kPitch);
    else raw[t] = ptx::load_shared_u32(at + t * kPitch);
  }
}

// Of the open work's gate, for this lane's channel pair.
struct GateTerms {
  float2 bias, factors;
};
__device__ __forceinline__ GateTerms load_gate_terms(uint32_t area, const ProducerLane& me) {
  return {ptx::load_shared_f2(area + GroupArea::kBias + (32 * me.warp + 2 * (me.lane & 15)) * 4),
          ptx::load_shared_f2(area + GroupArea::kSource + Source::kFactors)};
}

// Raw gates to block-local inclusive prefix sums of log2-decays in this warp's scratch (H-3c): a lane owns a channel
// pair of 16 tokens. `meanwhile` is done while the first raw gates are on their way.
template <Gate kGate, class RawT, uint32_t kPitch, class Meanwhile>
__device__ __forceinline__ void write_prefix_sums(const GateTerms& terms, const ProducerLane& me, uint32_t scratch,
                                                  RawPlace<RawT, kPitch> place, Meanwhile&& meanwhile) {
  const float2 bias = terms.bias, factors = terms.factors;
  uint32_t at = scratch + (me.lane >> 4) * 2048 + (me.lane & 15) * 8;
  float2 sum = {0.0f, 0.0f};
  if constexpr (kGate == Gate::kBounded) {
    // Ahead of use: shared memory answers late here. Narrow ones before other lanes' sums take their place.
    constexpr bool kAtOnce = sizeof(RawT) == 4;
    RawT raw[8], next[8];
    load_pairs(raw, place);
    place.at += 8 * kPitch;
    if constexpr (kAtOnce) {
      load_pairs(next, place);
      __syncwarp();
    }
    meanwhile();
#pragma unroll 1
    for (int batch = 0; batch < 2; ++batch) {
      if (!kAtOnce && batch == 0) load_pairs(next, place);
      add_gates<kGate>(sum, raw, at, bias, factors);
      at += 1024;
#pragma unroll
      for (int t = 0; t < 8; ++t) raw[t] = next[t];
    }
  } else {  // a longer body: fewer copies of it
    static_assert(sizeof(RawT) == 8);
    meanwhile();
#pragma unroll 1
    for (int batch = 0; batch < 4; ++batch) {
      RawT raw[4];
      load_pairs(raw, place);
      add_gates<kGate>(sum, raw, at, bias, factors);
      at = (at + 512) ^ 16;
      place.at = at;
    }
  }
}

}  // namespace kda::cuda::prefill_fused

// One token of a head, prepared by one warp in the lane layout of its state tile: no shared memory, no barrier.
//
// Every lane holds the eight keys of key_of(), so both halves of a warp hold all of q and k. Each half works out the
// decays of one of a lane's two groups of four keys and the norm of one of the two vectors, and they exchange. Same
// sums and same bits as recurrence/token.cuh: a norm pairs groups of four, then the groups whose numbers differ in
// 16, 8, 4, 2, 1.
#pragma once

#include "cuda/kernels/decode/lean_gate.cuh"
#include "cuda/kernels/decode/lean_params.h"

namespace kda::cuda {

template <class Tile>
struct LeanToken {
  static_assert(Tile::kExact && Tile::kElements == 8);
  static constexpr int kElements = Tile::kElements;

  // As loaded: nothing waits for it before finish(). Two 16-bit elements a word.
  uint2 q_bits[2], k_bits[2];
  uint4 gate_bits;  // 16-bit: x and y
  float4 bias;
  float A_log;
  unsigned beta_bits;

  float k[kElements], q[kElements], decay[kElements];
  float beta;

  static __device__ __forceinline__ bool upper() { return (Tile::lane() & 16) != 0; }
  // First key of the group whose decays this lane works out.
  static __device__ __forceinline__ int decay_key() { return upper() ? Tile::key_of(4) : Tile::key_of(0); }

  __device__ __forceinline__ void gather(const LeanParams& p, int32_t row, int32_t head, int32_t query_head) {
    load_groups(q_bits, p.q.at(row, query_head));
    load_groups(k_bits, p.k.at(row, query_head));
    gate_bits = load_gates(p.gate.at(row, head), decay_key(), p.gate_dtype);
    beta_bits = load_bits(p.beta.at(row, head), 0, p.beta_dtype);
  }

  // What belongs to the head, not to a token.
  __device__ __forceinline__ void gather_head(const GateRef& rule, int32_t head) {
    bias = load_bias(rule, head, decay_key());
    A_log = load_A_log(rule, head);
  }

  // The forms that serving has most are straight code, whose chains run side by side.
  __device__ __forceinline__ void finish(const LeanParams& p) {
    if (p.form == LeanForm::kBounded) {
      finish_usual<GateFamily::kBounded>(p);
    } else if (p.form == LeanForm::kSoftplus) {
      finish_usual<GateFamily::kSoftplus>(p);
    } else {
      float d[4];
      decays_of(p.gate_rule, gate_bits, p.gate_dtype, bias, A_log, d);
      exchange_decays(d);
      if (p.io == Dtype::kBf16) convert<__nv_bfloat16>();
      else convert<__half>();
      if (p.qk_norm) normalise();
      beta = beta_value(float_of_bits(beta_bits, p.beta_dtype), p.beta_logits != 0, p.beta_doubled != 0);
    }
  }

 private:
  template <GateFamily kFamily>
  __device__ __forceinline__ void finish_usual(const LeanParams& p) {
    convert<__nv_bfloat16>();
    normalise();
    float d[4];
    widen_four<__nv_bfloat16>(d, make_uint2(gate_bits.x, gate_bits.y));
    decays_of_family<kFamily>(p.gate_rule, d, bias, A_log);
    exchange_decays(d);
    beta = beta_value(__uint_as_float(beta_bits << 16), true, p.beta_doubled != 0);
  }

  __device__ __forceinline__ void exchange_decays(const float (&d)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(kFullMask, d[i], 16);
      decay[i] = upper() ? other : d[i];
      decay[4 + i] = upper() ? d[i] : other;
    }
  }

  static __device__ __forceinline__ void load_groups(uint2 (&bits)[2], const char* row) {
    bits[0] = *reinterpret_cast<const uint2*>(row + Tile::key_of(0) * 2);
    bits[1] = *reinterpret_cast<const uint2*>(row + Tile::key_of(4) * 2);
  }

  template <class T>
  __device__ __forceinline__ void convert() {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      widen_four<T>(q + 4 * g, q_bits[g]);
      widen_four<T>(k + 4 * g, k_bits[g]);
    }
  }

  // Sum of squares of a group of four.
  static __device__ __forceinline__ float squares(const float (&x)[kElements], int g) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = __fmaf_rn(x[4 * g + i], x[4 * g + i], sum);
    return sum;
  }

  // E-4 for both vectors: the lower half of the warp sums q, the upper k.
  __device__ __forceinline__ void normalise() {
    const float q0 = squares(q, 0), q1 = squares(q, 1), k0 = squares(k, 0), k1 = squares(k, 1);
    const float first = upper() ? k0 : q0, second = upper() ? k1 : q1;
    float sum;
    if constexpr (Tile::kVector == 4) {  // a lane has groups l and l + 16
      sum = lane_sum<16>(__fadd_rn(first, second));
    } else {  // it has 2l and 2l + 1: lanes without bit 8 sum the even groups, those with it the odd ones
      const bool odd = (Tile::lane() & 8) != 0;
      const float send = odd ? first : second, keep = odd ? second : first;
      sum = lane_sum<8>(__fadd_rn(keep, __shfl_xor_sync(kFullMask, send, 8)));
      sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 8));
    }
    const float mine = inverse_root(__fadd_rn(sum, 1e-6f));
    const float other = __shfl_xor_sync(kFullMask, mine, 16);
    const float rq = upper() ? other : mine, rk = upper() ? mine : other;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      q[e] = __fmul_rn(q[e], rq);
      k[e] = __fmul_rn(k[e], rk);
    }
  }
};

}  // namespace kda::cuda

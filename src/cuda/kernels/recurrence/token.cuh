// Prepares the tokens of one head for the state tile: q and k normalised (E-4), decays (E-1), beta (E-5), values, where
// results go. A token is four parts of about equal work, and a part belongs to one warp, so that the sum of a norm does
// not depend on how many warps a block has:
//
//   part     vector                           and of the decays e^g
//   query    q [K] -> n(q)                    first quarter
//   key      k [K] -> n(k)                    second
//   value    v [rows]                         third
//   scalar   beta, slot and row to write to   fourth
//
// gather() only issues loads, so that a warp's first part can be in flight before its state is asked for; finish()
// computes. A Source says where tokens come from.
#pragma once

#include "cuda/kernels/recurrence/params.h"
#include "cuda/kernels/recurrence/tile.cuh"

namespace kda::cuda {

// One prepared token. kWhole: K is kKeys, no channel is missing. kValues: most rows of a block.
template <int kKeys_, int kValues_, bool kWhole_>
struct alignas(16) TokenSlot {
  static constexpr int kKeys = kKeys_, kValues = kValues_;
  static constexpr bool kWhole = kWhole_;
  float k[kKeys];
  float q[kKeys];
  float decay[kKeys];
  float v[kValues];  // or u of a recorded token
  float beta;
  int64_t store_slot;  // V-3; -1: none
  int64_t out_row;     // R-41; -1: none
};

// The block's token slots in dynamic shared memory.
template <class Slot>
__device__ __forceinline__ Slot* token_slots() {
  extern __shared__ __align__(16) unsigned char s_dynamic[];
  return reinterpret_cast<Slot*>(s_dynamic);
}

// Which head and rows a block works on.
struct HeadPlace {
  int64_t n = 0;           // sequence
  int32_t head = 0;        // value head
  int32_t query_head = 0;  // E-8
  int32_t first_row = 0;   // of the block
  int32_t rows = 0;        // of the block that exist
  Span span;
};

enum class Part : int32_t { kQuery = 0, kKey = 1, kValue = 2, kScalar = 3 };

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x / 32); }

// An element's own bits: converting would wait for the load.
__device__ __forceinline__ unsigned load_bits(const void* p, int64_t i, Dtype dtype) {
  return dtype == Dtype::kFp32 ? static_cast<const unsigned*>(p)[i] : static_cast<const unsigned short*>(p)[i];
}
__device__ __forceinline__ float float_of_bits(unsigned bits, Dtype dtype) {
  if (dtype == Dtype::kBf16) return __uint_as_float(bits << 16);
  if (dtype == Dtype::kFp16) return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  return __uint_as_float(bits);
}

// A vector of n elements; element c >= n reads as zero.
struct VectorRef {
  const void* data = nullptr;
  int64_t offset = 0;
  int32_t n = 0;
  Dtype dtype = Dtype::kFp32;
};

// Elements lane, lane + 32, ... kWhole: all of them exist.
template <bool kWhole, int kLanes>
__device__ __forceinline__ void gather_vector(unsigned (&bits)[kLanes], const VectorRef& v) {
  const int lane = lane_id();
  if (v.dtype == Dtype::kFp32) {
    const auto* p = static_cast<const unsigned*>(v.data) + v.offset;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) bits[i] = kWhole || lane + 32 * i < v.n ? p[lane + 32 * i] : 0;
  } else {
    const auto* p = static_cast<const unsigned short*>(v.data) + v.offset;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) bits[i] = kWhole || lane + 32 * i < v.n ? p[lane + 32 * i] : 0;
  }
}

template <int kLanes>
__device__ __forceinline__ void convert(const unsigned (&bits)[kLanes], float (&x)[kLanes], Dtype dtype) {
#pragma unroll
  for (int e = 0; e < kLanes; ++e) x[e] = float_of_bits(bits[e], dtype);
}

// x := n(x) (E-4), or x itself in the plain form, into shared memory.
template <int kPerLane, int kLanes>
__device__ __forceinline__ void finish_normalised(const float (&x)[kLanes], bool normalise, float* s_out) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum = __fmaf_rn(x[i], x[i], sum);
  sum = lane_sum<32>(sum);
  const float r = __frsqrt_rn(__fadd_rn(sum, 1e-6f));
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) s_out[lane_id() + 32 * i] = normalise ? __fmul_rn(x[i], r) : x[i];
}

template <int kPerLane, int kLanes>
__device__ __forceinline__ void finish_values(const float (&x)[kLanes], int rows, float* s_out) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (lane_id() + 32 * i < rows) s_out[lane_id() + 32 * i] = x[i];
  }
}

// A quarter of a head's decays; part p has channels [p * kKeys / 4, ...).
template <int kKeys, bool kWhole>
struct DecayQuarter {
  static constexpr int kWidth = kKeys / 4, kLanes = kWidth / 32;
  unsigned raw[kLanes];
  float bias[kLanes];
  float A_log;

  // `gate`: the head's raw gates.
  __device__ __forceinline__ void gather(const GateRef& rule, VectorRef gate, Part part, int32_t head) {
    const int32_t first = static_cast<int32_t>(part) * kWidth;
    const float* dt_bias =
        rule.dt_bias != nullptr ? rule.dt_bias + static_cast<int64_t>(head) * (kWhole ? kKeys : gate.n) : nullptr;
    gate.offset += first;
    gate.n -= first;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const int c = lane_id() + 32 * i;
      bias[i] = dt_bias != nullptr && (kWhole || c < gate.n) ? dt_bias[first + c] : 0.0f;
    }
    A_log = rule.A_log != nullptr ? rule.A_log[head] : 0.0f;
    gather_vector<kWhole>(raw, gate);
  }

  // Channels that do not exist decay to nothing, and hold nothing.
  __device__ __forceinline__ void finish(const GateRef& rule, Dtype dtype, int32_t keys, Part part, float* s_decay) const {
    const int32_t first = static_cast<int32_t>(part) * kWidth;
    const float a = expf(A_log);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const int c = first + lane_id() + 32 * i;
      s_decay[c] = kWhole || c < keys ? expf(log_decay(rule, float_of_bits(raw[i], dtype), bias[i], a)) : 0.0f;
    }
  }
};

// Registers of one gathered part.
template <class Slot>
struct PartInput {
  static constexpr int kKeyLanes = Slot::kKeys / 32, kValueLanes = Slot::kValues / 32;
  static constexpr int kLanes = kKeyLanes > kValueLanes ? kKeyLanes : kValueLanes;
  unsigned bits[kLanes];
  unsigned beta;
  DecayQuarter<Slot::kKeys, Slot::kWhole> decay;
};

// The parts of tokens [first, first + count), dealt to the block's warps in turn.
template <class Source>
struct PartQueue {
  using Slot = typename Source::Slot;
  const Source& source;
  typename Source::Input in;

  __device__ __forceinline__ PartQueue(const Source& from) : source(from) {}
  static __device__ __forceinline__ int warps() { return static_cast<int>(blockDim.x / 32); }

  // Issues the loads of this warp's first part.
  __device__ __forceinline__ void start(int first, int count) {
    const int id = warp_id();
    if (id < 4 * count) source.gather(in, static_cast<Part>(id % 4), first + id / 4);
  }
  // Completes it and does the rest, into slots[0, count). The block's barrier is the caller's.
  __device__ __forceinline__ void finish(int first, int count, Slot* slots) {
    for (int id = warp_id(); id < 4 * count; id += warps()) {
      const auto part = static_cast<Part>(id % 4);
      if (id != warp_id()) source.gather(in, part, first + id / 4);
      source.finish(in, part, first + id / 4, slots[id / 4]);
    }
  }
};

}  // namespace kda::cuda

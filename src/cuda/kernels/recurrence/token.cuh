// Prepares the tokens of one head for the state tile: q and k normalised (E-4), decays (E-1), beta (E-5), values,
// where results go. A token is four parts of about equal work, and a part belongs to one warp, so that the sum of a
// norm does not depend on how many warps a block has:
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
  bool vectors = false;  // as TokenRef
};

// A lane's kLanes neighbouring elements of a vector, as loaded: nothing waits for them before convert().
template <int kLanes>
struct LaneBits {
  unsigned word[kLanes];  // with `vectors`, two 16-bit elements each

  static __device__ __forceinline__ int first() { return lane_id() * kLanes; }

  // Whole vectors of loads where the row allows for it. `stride`: from element to element.
  __device__ __forceinline__ void gather(const VectorRef& v, int64_t stride = 1) {
    static_assert(kLanes % 4 == 0);
    const int c = first();
    const bool fp32 = v.dtype == Dtype::kFp32;
    const char* p = static_cast<const char*>(v.data) + (v.offset + c * stride) * (fp32 ? 4 : 2);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) word[i] = 0;
    if (c >= v.n) return;
    if (v.vectors && !fp32) {
#pragma unroll
      for (int i = 0; i < kLanes; i += 4) {
        const uint2 x = *reinterpret_cast<const uint2*>(p + 2 * i);
        word[i / 2] = x.x, word[i / 2 + 1] = x.y;
      }
    } else if (v.vectors) {
#pragma unroll
      for (int i = 0; i < kLanes; i += 4) {
        const uint4 x = *reinterpret_cast<const uint4*>(p + 4 * i);
        word[i] = x.x, word[i + 1] = x.y, word[i + 2] = x.z, word[i + 3] = x.w;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kLanes && c + i < v.n; ++i, p += stride * (fp32 ? 4 : 2)) {
        set(i, fp32 ? *reinterpret_cast<const unsigned*>(p) : *reinterpret_cast<const unsigned short*>(p));
      }
    }
  }

  // The bits of element i.
  __device__ __forceinline__ unsigned element(int i, Dtype dtype, bool vectors) const {
    if (!vectors || dtype == Dtype::kFp32) return word[i];
    return i % 2 == 0 ? word[i / 2] & 0xffffu : word[i / 2] >> 16;
  }

  __device__ __forceinline__ void convert(float (&x)[kLanes], Dtype dtype, bool vectors) const {
    if (!vectors || dtype == Dtype::kFp32) {
#pragma unroll
      for (int e = 0; e < kLanes; ++e) x[e] = float_of_bits(word[e], dtype);
    } else if (dtype == Dtype::kBf16) {
#pragma unroll
      for (int e = 0; e < kLanes; e += 2) {
        const float2 pair = widen_pair(word[e / 2], __nv_bfloat16());
        x[e] = pair.x, x[e + 1] = pair.y;
      }
    } else {
#pragma unroll
      for (int e = 0; e < kLanes; e += 2) {
        const float2 pair = widen_pair(word[e / 2], __half());
        x[e] = pair.x, x[e + 1] = pair.y;
      }
    }
  }

 private:
  // word[i] with i known at run time, without an array in memory.
  __device__ __forceinline__ void set(int i, unsigned x) {
#pragma unroll
    for (int e = 0; e < kLanes; ++e) word[e] = e == i ? x : word[e];
  }
};

// A lane's elements into a vector in shared memory.
template <int kLanes>
__device__ __forceinline__ void store_lane(const float (&x)[kLanes], float* s_out) {
  auto* to = reinterpret_cast<float4*>(s_out + LaneBits<kLanes>::first());
#pragma unroll
  for (int i = 0; i < kLanes; i += 4) to[i / 4] = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}

// x := n(x) (E-4), or x itself in the plain form, into shared memory.
template <int kLanes>
__device__ __forceinline__ void finish_normalised(const float (&x)[kLanes], bool normalise, float* s_out) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) sum = __fmaf_rn(x[i], x[i], sum);
  sum = lane_sum<32>(sum);
  const float r = normalise ? inverse_root(__fadd_rn(sum, 1e-6f)) : 1.0f;
  float y[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) y[i] = __fmul_rn(x[i], r);
  store_lane(y, s_out);
}

// `room`: of the vector in shared memory, a multiple of kLanes.
template <int kLanes>
__device__ __forceinline__ void finish_values(const float (&x)[kLanes], int room, float* s_out) {
  if (LaneBits<kLanes>::first() < room) store_lane(x, s_out);
}

// A quarter of a head's decays; part p has channels [p * kKeys / 4, ...).
template <int kKeys, bool kWhole>
struct DecayQuarter {
  static constexpr int kWidth = kKeys / 4, kLanes = kWidth / 32;
  unsigned raw[kLanes];
  float bias[kLanes];
  float A_log;

  // Channel of a quarter that is element i of the lane.
  static __device__ __forceinline__ int channel(int i) { return lane_id() + 32 * i; }

  // `gate`: the head's raw gates.
  __device__ __forceinline__ void gather(const GateRef& rule, VectorRef gate, Part part, int32_t head) {
    const int32_t first = static_cast<int32_t>(part) * kWidth;
    const float* dt_bias =
        rule.dt_bias != nullptr ? rule.dt_bias + static_cast<int64_t>(head) * (kWhole ? kKeys : gate.n) : nullptr;
    gate.offset += first;
    gate.n -= first;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const int c = channel(i);
      bias[i] = dt_bias != nullptr && (kWhole || c < gate.n) ? dt_bias[first + c] : 0.0f;
    }
    A_log = rule.A_log != nullptr ? rule.A_log[head] : 0.0f;
    if (gate.dtype == Dtype::kFp32) {
      const auto* p = static_cast<const unsigned*>(gate.data) + gate.offset;
#pragma unroll
      for (int i = 0; i < kLanes; ++i) raw[i] = kWhole || channel(i) < gate.n ? p[channel(i)] : 0;
    } else {
      const auto* p = static_cast<const unsigned short*>(gate.data) + gate.offset;
#pragma unroll
      for (int i = 0; i < kLanes; ++i) raw[i] = kWhole || channel(i) < gate.n ? p[channel(i)] : 0;
    }
  }

  // Channels that do not exist decay to nothing, and hold nothing.
  __device__ __forceinline__ void finish(const GateRef& rule, Dtype dtype, int32_t keys, Part part,
                                         float* s_decay) const {
    const int32_t first = static_cast<int32_t>(part) * kWidth;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const int c = first + channel(i);
      s_decay[c] = kWhole || c < keys ? factor(rule, dtype, i) : 0.0f;
    }
  }
  // Of element i.
  __device__ __forceinline__ float factor(const GateRef& rule, Dtype dtype, int i) const {
    return expf(log_decay(rule, float_of_bits(raw[i], dtype), bias[i], gate_scale(A_log)));
  }

  // What finish()'s factors lack to e^g of the fp32 g.
  __device__ __forceinline__ void finish_low(const GateRef& rule, Dtype dtype, int32_t keys, Part part,
                                             const float* s_decay, float* s_low) const {
    const int32_t first = static_cast<int32_t>(part) * kWidth;
    const float a = gate_scale(A_log);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const int c = first + channel(i);
      const double exact = exp(static_cast<double>(log_decay(rule, float_of_bits(raw[i], dtype), bias[i], a)));
      s_low[c] = kWhole || c < keys ? static_cast<float>(exact - static_cast<double>(s_decay[c])) : 0.0f;
    }
  }
};

// Registers of one gathered part.
template <class Slot>
struct PartInput {
  static constexpr int kLanes = Slot::kKeys / 32;  // of a key; values are no more than keys
  static_assert(Slot::kValues <= Slot::kKeys && Slot::kValues % kLanes == 0);
  LaneBits<kLanes> bits;
  unsigned beta;
  DecayQuarter<Slot::kKeys, Slot::kWhole> decay;
};

// All parts of tokens [0, count), dealt to the block's warps in turn: one copy of the loads' code, each part's loads
// after the one before is done.
template <class Source, class Slot>
__device__ __forceinline__ void prepare_parts(const Source& source, int count, Slot* slots) {
  const auto part = static_cast<Part>(warp_id() % 4);
#pragma unroll 1
  for (int id = warp_id(); id < 4 * count; id += static_cast<int>(blockDim.x / 32)) {
    typename Source::Input in;
    source.gather(in, part, id / 4);
    source.finish(in, part, id / 4, slots[id / 4]);
  }
}

// The parts of tokens [first, first + count), dealt to the block's warps in turn. A block has a multiple of four
// warps, so that a warp meets one kind of part. The next part's loads are on their way while one is completed.
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
    const auto part = static_cast<Part>(warp_id() % 4);
#pragma unroll 1
    for (int id = warp_id(); id < 4 * count; id += warps()) {
      typename Source::Input next;
      if (id + warps() < 4 * count) source.gather(next, part, first + (id + warps()) / 4);
      source.finish(in, part, first + id / 4, slots[id / 4]);
      in = next;
    }
  }
};

// A block's walk over `length` tokens: all warps prepare a piece of `chunk` of them in `slots`, then each warp that has
// rows takes them in order: token(t, slot of t).
template <class Source, class Token>
__device__ __forceinline__ void walk_tokens(const Source& source, int length, int chunk,
                                            typename Source::Slot* slots, bool has_rows, const Token& token) {
  PartQueue<Source> parts(source);
#pragma unroll 1
  for (int first = 0; first < length; first += chunk) {
    const int count = min(chunk, length - first);
    parts.start(first, count);
    __syncthreads();  // nobody reads the piece before any more
    parts.finish(first, count, slots);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < count && has_rows; ++i) token(first + i, slots[i]);
  }
}

}  // namespace kda::cuda

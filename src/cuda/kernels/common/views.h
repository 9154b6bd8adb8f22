// Tensors as kernels see them: plain structs, filled in by cuda/host/views.cc. Strides count elements. Host and
// device code; no CUDA header.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KDA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KDA_HOST_DEVICE inline
#endif

namespace kda::cuda {

enum class Dtype : int32_t { kFp32 = 1, kBf16 = 2, kFp16 = 3 };
enum class GateFamily : int32_t { kSoftplus = 1, kBounded = 2, kPlain = 3 };
enum class Initial : int32_t { kNone = 1, kAll = 2, kFlags = 3 };

KDA_HOST_DEVICE int32_t load_index(const int32_t* p, bool now) {
#ifdef __CUDA_ARCH__
  if (now) return __ldcg(p);
#endif
  (void)now;
  return *p;
}

// An index as loaded: nothing waits for it before value().
struct RawIndex {
  int32_t low = 0, high = 0, wide = 0;
  KDA_HOST_DEVICE int64_t value() const {
    const auto bits = static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low);
    return wide ? static_cast<int64_t>(bits) : low;
  }
  KDA_HOST_DEVICE bool operator==(const RawIndex& o) const { return low == o.low && high == o.high; }
};

// int32 or int64 vector [rows] or table [rows, columns]; data null: absent.
struct IndexRef {
  const void* data = nullptr;
  int64_t row_stride = 0, column_stride = 0;
  int32_t columns = 1;
  int32_t wide = 0;  // int64

  KDA_HOST_DEVICE bool present() const { return data != nullptr; }
  // Loads without branching on the width. `now`: past the L1, which could keep a value from before the grid before
  // ended.
  KDA_HOST_DEVICE RawIndex raw(int64_t row, int64_t column = 0, bool now = false) const {
    RawIndex r;
    const auto* p = static_cast<const int32_t*>(data) + ((row * row_stride + column * column_stride) << wide);
    r.wide = wide;
    r.low = load_index(p, now);
    r.high = wide ? load_index(p + 1, now) : 0;
    return r;
  }
  KDA_HOST_DEVICE int64_t at(int64_t row, int64_t column = 0) const { return raw(row, column).value(); }
};

// Per-token rows [T, heads, dim] or [B, T, heads, dim]; dim is dense. beta has dim = 1.
struct TokenRef {
  const void* data = nullptr;
  int64_t batch_stride = 0, row_stride = 0, head_stride = 0;
  Dtype dtype = Dtype::kFp32;
  int32_t vectors = 0;  // every [dim] is whole groups of eight elements, each half aligned

  KDA_HOST_DEVICE int64_t offset(int64_t batch, int64_t row, int64_t head) const {
    return batch * batch_stride + row * row_stride + head * head_stride;
  }
};

// Outputs: as TokenRef; row r goes to rows.at(r) where given, and is skipped if that is outside [0, count).
struct OutRef {
  void* data = nullptr;
  int64_t batch_stride = 0, row_stride = 0, head_stride = 0;
  Dtype dtype = Dtype::kFp32;
  IndexRef rows;
  int64_t count = 0;

  KDA_HOST_DEVICE int64_t row(int64_t r) const {
    if (!rows.present()) return r;
    const int64_t to = rows.at(r);
    return to >= 0 && to < count ? to : -1;
  }
  KDA_HOST_DEVICE int64_t offset(int64_t batch, int64_t row, int64_t head) const {
    return batch * batch_stride + row * row_stride + head * head_stride;
  }
};

// Sequences of a call (P-12): offsets, ranges, or `tokens` rows in each of `count` samples.
struct SequenceRef {
  IndexRef cu, begin, length;
  const int32_t* num_active = nullptr;
  int64_t tokens = 0;  // T; of one sample if batched
  int32_t count = 0;   // N
  int32_t batched = 0;

  KDA_HOST_DEVICE int64_t rows() const { return batched ? tokens * count : tokens; }  // of all samples
};

// A gate's parameters (E-1). A_log null: a = 1; dt_bias null: 0.
struct GateRef {
  const float* A_log = nullptr;    // [HV]
  const float* dt_bias = nullptr;  // [HV, K]
  float lower_bound = 0;
  GateFamily family = GateFamily::kSoftplus;
};

// A pool of states [slots, HV, V, K] or packed states; inner dimensions dense.
struct PoolRef {
  void* data = nullptr;
  int64_t slot_stride = 0;
  int64_t slots = 0;
};

// Conv windows of one part (P-2) with both layouts as strides.
struct WindowRef {
  void* data = nullptr;
  int64_t slot_stride = 0, channel_stride = 0, column_stride = 0;
  Dtype dtype = Dtype::kFp32;
  int32_t vectors = 0;  // four channels from a multiple of four on lie together, aligned to their size
};

// Records of recover mode (P-3).
struct RecordRef {
  float* u = nullptr;  // [rows, HV, width, V]
  void* kg = nullptr;  // [rows, HV, width, 2K], gate dtype
  int64_t u_row = 0, u_head = 0, u_token = 0;
  int64_t kg_row = 0, kg_head = 0, kg_token = 0;
  int32_t* count = nullptr;  // [rows]
  int64_t count_stride = 0;
  int64_t rows = 0;
  IndexRef record_rows;
  int32_t u_vectors = 0, kg_vectors = 0;  // as TokenRef
};

}  // namespace kda::cuda

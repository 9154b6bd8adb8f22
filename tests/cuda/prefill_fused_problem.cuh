// Inputs, oracle and comparison for the development program of the fused prefill (prefill_fused_dev.cu).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cuda/kernels/prefill_fused/params.h"

namespace kda::cuda::prefill_fused::dev {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error in %s: %s\n", what, cudaGetErrorString(error));
  std::fflush(stdout);
  std::exit(1);
}

// R(s, i) of field-cases: uniform in [-1, 1).
inline double uniform(uint64_t stream, uint64_t i) {
  uint64_t z = stream * (uint64_t{1} << 32) + i + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return static_cast<double>(z >> 40) * 0x1p-23 - 1.0;
}

inline uint16_t bf16(double x) {
  const __nv_bfloat16 y = __float2bfloat16_rn(static_cast<float>(x));
  uint16_t bits;
  std::memcpy(&bits, &y, 2);
  return bits;
}
inline double from_bf16(uint16_t bits) {
  const uint32_t u = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// A device buffer with guard words behind it.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes) { allocate(bytes); }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void allocate(size_t bytes) {
    cudaFree(data_);
    bytes_ = bytes;
    check(cudaMalloc(&data_, bytes + 256), "malloc");
    check(cudaMemset(data_, 0xAB, bytes + 256), "memset");
  }
  template <class T>
  void upload(const std::vector<T>& x) {
    if (bytes_ != x.size() * sizeof(T) || data_ == nullptr) allocate(x.size() * sizeof(T));
    check(cudaMemcpy(data_, x.data(), bytes_, cudaMemcpyHostToDevice), "upload");
  }
  template <class T>
  std::vector<T> download() const {
    std::vector<T> x(bytes_ / sizeof(T));
    check(cudaMemcpy(x.data(), data_, bytes_, cudaMemcpyDeviceToHost), "download");
    return x;
  }
  void fill(int byte) { check(cudaMemset(data_, byte, bytes_), "fill"); }
  bool guard_intact() const {
    uint8_t g[256];
    check(cudaMemcpy(g, static_cast<char*>(data_) + bytes_, 256, cudaMemcpyDeviceToHost), "guard");
    for (uint8_t b : g)
      if (b != 0xAB) return false;
    return true;
  }
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Token by token in fp64 (E-11). One block per (sequence, value head), thread v owns value row v.
static __global__ void oracle_kernel(Params p, Gate family, Real gate_type, const int64_t* begins,
                                     const int64_t* lengths, const double* initial, double* out,
                                     double* final_state) {
  extern __shared__ double s_state[];  // [128 k][128 v]
  __shared__ double s_k[128], s_q[128], s_decay[128], s_sum[2];
  const int n = blockIdx.x / p.value_heads, head = blockIdx.x % p.value_heads, v = threadIdx.x;
  const int query_head = head / (p.value_heads / p.heads);
  const int64_t state_at = (static_cast<int64_t>(n) * p.value_heads + head) * 128 * 128;
  for (int k = 0; k < 128; ++k) s_state[k * 128 + v] = initial ? initial[state_at + v * 128 + k] : 0.0;
  auto real = [](const void* base, bool wide, int64_t at) -> double {
    return wide ? static_cast<const float*>(base)[at]
                : __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(base)[at]) << 16);
  };
  for (int64_t t = begins[n]; t < begins[n] + lengths[n]; ++t) {
    __syncthreads();
    s_q[v] = real(p.q, false, t * p.q_rows.token + query_head * p.q_rows.head + v);
    s_k[v] = real(p.k, false, t * p.k_rows.token + query_head * p.k_rows.head + v);
    const double raw = real(p.gate, gate_type == Real::kF32, t * p.gate_rows.token + head * p.gate_rows.head + v);
    const double x = raw + (family != Gate::kPlain && p.dt_bias ? p.dt_bias[head * 128 + v] : 0.0f);
    const double a = p.a_log ? exp(static_cast<double>(p.a_log[head])) : 1.0;
    double g = raw;
    if (family == Gate::kBounded) g = static_cast<double>(p.lower_bound) / (1.0 + exp(-a * x));
    if (family == Gate::kSoftplus) g = -a * (x > 20 ? x : log1p(exp(x)));
    s_decay[v] = exp(g);
    __syncthreads();
    if (v < 2) {
      const double* x2 = v ? s_k : s_q;
      double sum = 0;
      for (int i = 0; i < 128; ++i) sum += x2[i] * x2[i];
      s_sum[v] = p.normalize ? 1.0 / sqrt(sum + 1e-6) : 1.0;
    }
    __syncthreads();
    double dot = 0;
    for (int k = 0; k < 128; ++k) {
      const double s = s_state[k * 128 + v] * s_decay[k];
      s_state[k * 128 + v] = s;
      dot += s * s_k[k];
    }
    const double logit = real(p.beta, p.beta_type == Real::kF32, t * p.beta_rows.token + head * p.beta_rows.head);
    const double beta = p.beta_is_logit ? p.beta_factor / (1.0 + exp(-logit)) : logit;
    const double u = beta * (real(p.v, false, t * p.v_rows.token + head * p.v_rows.head + v) - dot * s_sum[1]);
    double o = 0;
    for (int k = 0; k < 128; ++k) {
      const double s = s_state[k * 128 + v] + u * s_k[k] * s_sum[1];
      s_state[k * 128 + v] = s;
      o += s * s_q[k];
    }
    out[(t * p.value_heads + head) * 128 + v] = o * s_sum[0] * p.scale;
  }
  __syncthreads();
  for (int k = 0; k < 128; ++k) final_state[state_at + v * 128 + k] = s_state[k * 128 + v];
}

struct Error {
  double total = 0, worst_head = 0;
  int64_t worst_sequence = -1, worst_head_index = -1, nan_mismatch = 0, finite_inf_mismatch = 0;
};

// How sequences are cut in the problems made from now on.
inline Cut default_cut;
// Whether they take the staged form.
inline bool default_staged = false;
// The preparation beside its chains: works at once, SMs of the preparation.
inline int default_wave = 0, default_prepare_ctas = 0;
// Whether works are shared out by time; SMs that the launcher is told of, 0: all.
inline bool default_balanced = false;
inline int default_sm_count = 0;

// One test problem: host inputs in the dtypes of the call, expected results, device buffers.
struct Problem {
  Cut cut = default_cut;
  bool is_staged = default_staged;
  int wave = default_wave, prepare_ctas = default_prepare_ctas;
  bool is_balanced = default_balanced;
  int sm_count = default_sm_count;
  std::string name;
  Gate family = Gate::kBounded;
  Real gate_type = Real::kBf16, beta_type = Real::kBf16, pool_type = Real::kF32;
  int heads = 2, value_heads = 2;
  std::vector<int64_t> lengths;
  int pad_rows = 0;   // rows behind the last offset (NaN)
  int token_pad = 0;  // elements added to every token stride (poisoned)
  bool use_ranges = false;
  double lower_bound = -5;
  double scale = 1.0 / std::sqrt(128.0);
  int normalize = 1;
  Initial initial = Initial::kAll;
  std::vector<int> flags;      // with kFlags
  std::vector<int64_t> slots;  // empty: packed
  int64_t pool_slots = 0, null_slot = -1;
  std::vector<float> a_log, dt_bias;
  std::vector<uint16_t> q, k, v;  // [T, heads, 128]
  std::vector<float> gate, beta;  // rounded on upload if bf16
  std::vector<float> state;       // [slots or N, HV, 128, 128]

  int64_t tokens() const {
    int64_t t = 0;
    for (int64_t x : lengths) t += x;
    return t;
  }
  int64_t rows() const { return tokens() + pad_rows; }
  int64_t sequences() const { return static_cast<int64_t>(lengths.size()); }
  int64_t state_count() const { return slots.empty() ? sequences() : pool_slots; }

  // Default inputs of N-10 for the current sizes.
  void fill_default(double raw_scale = 4.0) {
    const int64_t n = rows();
    q.resize(n * heads * 128), k.resize(q.size()), v.resize(n * value_heads * 128);
    gate.resize(v.size()), beta.resize(n * value_heads);
    for (size_t i = 0; i < q.size(); ++i) q[i] = bf16(uniform(1, i)), k[i] = bf16(uniform(2, i));
    for (size_t i = 0; i < v.size(); ++i)
      v[i] = bf16(uniform(3, i)), gate[i] = static_cast<float>(from_bf16(bf16(raw_scale * uniform(4, i))));
    for (size_t i = 0; i < beta.size(); ++i) beta[i] = static_cast<float>(from_bf16(bf16(3 * uniform(5, i))));
    state.resize(state_count() * value_heads * 128 * 128);
    for (size_t i = 0; i < state.size(); ++i) state[i] = static_cast<float>(0.1 * uniform(6, i));
  }
};

}  // namespace kda::cuda::prefill_fused::dev

// Runs a Problem on the device and compares it with the oracle.
#pragma once

#include <algorithm>

#include "prefill_fused_problem.cuh"

namespace kda::cuda::prefill_fused::dev {

struct Device {
  Buffer q, k, v, gate, beta, out, pool, cu, begin, length, slots, flags, a_log, dt_bias;
  Buffer begins64, lengths64, initial64, out64, final64, segment_space, stages, balance_space;
  Params p;
  std::vector<int64_t> begins;
};

template <class T>
std::vector<T> pitched(const std::vector<T>& x, int64_t row, int64_t pitch, T poison) {
  if (row == pitch) return x;
  const int64_t rows = static_cast<int64_t>(x.size()) / row;
  std::vector<T> y(rows * pitch, poison);
  for (int64_t r = 0; r < rows; ++r) std::copy(x.begin() + r * row, x.begin() + (r + 1) * row, y.begin() + r * pitch);
  return y;
}

inline double pool_value(const void* pool, Real type, size_t i) {
  if (type == Real::kF32) return static_cast<const float*>(pool)[i];
  const uint16_t bits = static_cast<const uint16_t*>(pool)[i];
  if (type == Real::kBf16) return from_bf16(bits);
  __half h;
  std::memcpy(static_cast<void*>(&h), &bits, 2);
  return __half2float(h);
}

inline std::vector<uint8_t> pool_bytes(const Problem& c) {
  const size_t size = c.pool_type == Real::kF32 ? 4 : 2;
  std::vector<uint8_t> bytes(c.state.size() * size);
  for (size_t i = 0; i < c.state.size(); ++i) {
    if (size == 4) std::memcpy(&bytes[4 * i], &c.state[i], 4);
    else if (c.pool_type == Real::kBf16) {
      const uint16_t b = bf16(c.state[i]);
      std::memcpy(&bytes[2 * i], &b, 2);
    } else {
      const __half h = __float2half_rn(c.state[i]);
      std::memcpy(&bytes[2 * i], &h, 2);
    }
  }
  return bytes;
}

inline void upload(const Problem& c, Device& d) {
  const int64_t qk = c.heads * 128, vv = c.value_heads * 128, pad = c.token_pad;
  d.q.upload(pitched<uint16_t>(c.q, qk, qk + pad, 0x7fc0));
  d.k.upload(pitched<uint16_t>(c.k, qk, qk + pad, 0x7fc0));
  d.v.upload(pitched<uint16_t>(c.v, vv, vv + pad, 0x7fc0));
  auto put = [&](Buffer& b, const std::vector<float>& x, Real type, int64_t row) {
    if (type == Real::kF32) return b.upload(pitched<float>(x, row, row + pad, NAN));
    std::vector<uint16_t> y(x.size());
    for (size_t i = 0; i < x.size(); ++i) y[i] = bf16(x[i]);
    b.upload(pitched<uint16_t>(y, row, row + pad, 0x7fc0));
  };
  put(d.gate, c.gate, c.gate_type, vv);
  put(d.beta, c.beta, c.beta_type, c.value_heads);
  d.out.allocate(c.rows() * vv * 2);
  d.pool.upload(pool_bytes(c));
  Params p;
  p.q = d.q.data(), p.k = d.k.data(), p.v = d.v.data(), p.gate = d.gate.data(), p.beta = d.beta.data();
  p.out = d.out.data();
  p.q_rows = p.k_rows = Rows{0, qk + pad, 128};
  p.v_rows = p.gate_rows = Rows{0, vv + pad, 128};
  p.beta_rows = Rows{0, c.value_heads + pad, 1};
  p.out_rows = Rows{0, vv, 128};
  p.beta_type = c.beta_type;
  p.lower_bound = static_cast<float>(c.lower_bound);
  p.scale = static_cast<float>(c.scale);
  p.normalize = c.normalize;
  if (!c.a_log.empty()) d.a_log.upload(c.a_log), p.a_log = static_cast<const float*>(d.a_log.data());
  if (!c.dt_bias.empty()) d.dt_bias.upload(c.dt_bias), p.dt_bias = static_cast<const float*>(d.dt_bias.data());
  std::vector<int32_t> cu(1, 0);
  d.begins.clear();
  for (int64_t x : c.lengths) d.begins.push_back(cu.back()), cu.push_back(cu.back() + static_cast<int32_t>(x));
  if (c.use_ranges) {
    d.begin.upload(d.begins);
    std::vector<int32_t> l(c.lengths.begin(), c.lengths.end());
    d.length.upload(l);
    p.begin = Indices{d.begin.data(), 1, 1}, p.length = Indices{d.length.data(), 1, 0};
  } else {
    d.cu.upload(cu);
    p.cu_seqlens = Indices{d.cu.data(), 1, 0};
  }
  p.sequences = c.sequences(), p.tokens = c.rows();
  p.heads = c.heads, p.value_heads = c.value_heads;
  p.initial = c.initial;
  p.state_in = p.state_out = d.pool.data();
  p.state_in_type = p.state_out_type = c.pool_type;
  p.state_in_stride = p.state_out_stride = static_cast<int64_t>(c.value_heads) * 128 * 128;
  p.state_in_slots = p.state_out_slots = c.state_count();
  p.null_slot = c.null_slot;
  if (!c.slots.empty()) d.slots.upload(c.slots), p.slots = Indices{d.slots.data(), 1, 1};
  if (c.initial == Initial::kFlags) {
    std::vector<uint8_t> f(c.flags.begin(), c.flags.end());
    d.flags.upload(f);
    p.has_initial = static_cast<const uint8_t*>(d.flags.data());
  }
  d.p = p;
}

inline bool is_active(const Problem& c, int64_t n) {
  if (c.slots.empty()) return true;
  return c.slots[n] >= 0 && c.slots[n] < c.pool_slots && c.slots[n] != c.null_slot;
}
inline bool is_fresh(const Problem& c, int64_t n) {
  return c.initial == Initial::kNone || (c.initial == Initial::kFlags && !c.flags[n]);
}
inline int64_t slot_of(const Problem& c, int64_t n) { return c.slots.empty() ? n : c.slots[n]; }

struct Result {
  std::vector<uint16_t> out;
  std::vector<uint8_t> pool;
};

inline int multiprocessors() {
  static int sm_count = 0;
  if (sm_count == 0) check(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0), "attribute");
  return sm_count;
}

inline Result run(const Problem& c, Device& d) {
  d.out.fill(0x7f);
  d.pool.upload(pool_bytes(c));
  const int sm_count = c.sm_count > 0 ? c.sm_count : multiprocessors();
  d.p.balance_space = nullptr;
  if (c.is_balanced) {
    d.balance_space.allocate(balance_workspace(sm_count));
    d.balance_space.fill(0xFF);
    d.p.balance_space = static_cast<float*>(d.balance_space.data());
  }
  d.p.cut = c.cut;
  if (c.cut.segments > 1) {
    d.segment_space.allocate(prefill_fused_workspace(d.p.sequences, d.p.value_heads, c.cut));
    d.segment_space.fill(0xFF);
    d.p.segment_space = static_cast<float*>(d.segment_space.data());
  }
  if (c.is_staged) {
    d.stages.allocate(staged_workspace(staged_positions(d.p), d.p.value_heads));
    d.stages.fill(0xFF);
    d.p.stages = d.stages.data();
    d.p.wave = c.wave, d.p.prepare_ctas = c.prepare_ctas;
  }
  check(prepare_prefill_fused(c.family, c.gate_type,
                              diagonal_for(c.family, static_cast<float>(c.lower_bound), c.normalize != 0)),
        "prepare");
  check(launch_prefill_fused(d.p, c.family, c.gate_type, sm_count, nullptr), "launch");
  check(cudaDeviceSynchronize(), c.name.c_str());
  if (c.is_staged && !d.stages.guard_intact()) std::printf("FAIL stages overrun\n"), std::exit(1);
  if (c.is_balanced && !d.balance_space.guard_intact()) std::printf("FAIL shares overrun\n"), std::exit(1);
  if (c.cut.segments > 1 && !d.segment_space.guard_intact())
    std::printf("FAIL segment space overrun\n"), std::exit(1);
  return {d.out.download<uint16_t>(), d.pool.download<uint8_t>()};
}

struct Expected {
  std::vector<double> out, final_state;
};

inline Expected expect(const Problem& c, Device& d) {
  std::vector<double> initial(static_cast<size_t>(c.sequences()) * c.value_heads * 128 * 128, 0.0);
  const size_t per = static_cast<size_t>(c.value_heads) * 128 * 128;
  const std::vector<uint8_t> pool = pool_bytes(c);
  for (int64_t n = 0; n < c.sequences(); ++n)
    if (is_active(c, n) && !is_fresh(c, n))
      for (size_t i = 0; i < per; ++i)
        initial[n * per + i] = pool_value(pool.data(), c.pool_type, slot_of(c, n) * per + i);
  d.begins64.upload(d.begins);
  d.lengths64.upload(c.lengths);
  d.initial64.upload(initial);
  d.out64.allocate(std::max<size_t>(8, c.rows() * c.value_heads * 128 * 8));
  d.final64.allocate(initial.size() * 8);
  check(cudaFuncSetAttribute(oracle_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 131072), "oracle attribute");
  oracle_kernel<<<static_cast<unsigned>(c.sequences() * c.value_heads), 128, 131072>>>(
      d.p, c.family, c.gate_type, static_cast<const int64_t*>(d.begins64.data()),
      static_cast<const int64_t*>(d.lengths64.data()), static_cast<const double*>(d.initial64.data()),
      static_cast<double*>(d.out64.data()), static_cast<double*>(d.final64.data()));
  check(cudaGetLastError(), "oracle launch");
  check(cudaDeviceSynchronize(), "oracle");
  return {d.out64.download<double>(), d.final64.download<double>()};
}

struct Sums {
  double error = 0, norm = 0;
  void add(double x, double ref, Error& e) {
    if (std::isnan(x) != std::isnan(ref)) ++e.nan_mismatch;
    else if (std::isinf(x) != std::isinf(ref) && std::fabs(ref) < 3e38) ++e.finite_inf_mismatch;
    else if (!std::isnan(x) && !std::isinf(x)) error += (x - ref) * (x - ref), norm += ref * ref;
  }
  double ratio() const { return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error); }
};

inline void fold(Error& e, Sums& total, const Sums& part, int64_t n, int64_t h) {
  total.error += part.error, total.norm += part.norm;
  if (part.ratio() > e.worst_head) e.worst_head = part.ratio(), e.worst_sequence = n, e.worst_head_index = h;
}

// Output and state errors; inactive sequences must be zero, untouched slots and rows bitwise intact.
inline bool compare(const Problem& c, const Device& d, const Result& r, const Expected& x, double out_limit,
                    double state_limit) {
  Error out, state;
  Sums out_total, state_total;
  const size_t per = static_cast<size_t>(c.value_heads) * 128 * 128;
  int64_t bad_rows = 0, bad_slots = 0;
  std::vector<bool> touched(c.state_count(), false);
  for (int64_t n = 0; n < c.sequences(); ++n) {
    for (int64_t h = 0; h < c.value_heads; ++h) {
      Sums so, ss;
      for (int64_t t = d.begins[n]; t < d.begins[n] + c.lengths[n]; ++t)
        for (int i = 0; i < 128; ++i) {
          const size_t at = (t * c.value_heads + h) * 128 + i;
          if (is_active(c, n)) so.add(from_bf16(r.out[at]), x.out[at], out);
          else if (r.out[at] != 0) ++bad_rows;
        }
      fold(out, out_total, so, n, h);
      if (is_active(c, n)) {
        touched[slot_of(c, n)] = true;
        for (size_t i = 0; i < 16384; ++i)
          ss.add(pool_value(r.pool.data(), c.pool_type, slot_of(c, n) * per + h * 16384 + i),
                 x.final_state[n * per + h * 16384 + i], state);
        fold(state, state_total, ss, n, h);
      }
    }
  }
  for (size_t i = c.tokens() * c.value_heads * 128; i < r.out.size(); ++i) bad_rows += r.out[i] != 0x7f7f;
  const std::vector<uint8_t> before = pool_bytes(c);
  const size_t slot_bytes = before.size() / std::max<int64_t>(1, c.state_count());
  for (int64_t s = 0; s < c.state_count(); ++s)
    if (!touched[s] && std::memcmp(&before[s * slot_bytes], &r.pool[s * slot_bytes], slot_bytes) != 0) ++bad_slots;
  const bool guards = d.out.guard_intact() && d.pool.guard_intact();
  const bool ok = out_total.ratio() <= out_limit && state_total.ratio() <= state_limit &&
                  out.worst_head <= 2 * out_limit && state.worst_head <= 2 * state_limit && out.nan_mismatch == 0 &&
                  state.nan_mismatch == 0 && out.finite_inf_mismatch == 0 && state.finite_inf_mismatch == 0 &&
                  bad_rows == 0 && bad_slots == 0 && guards;
  std::printf("%-4s %s%-26s out %.3e (head %.2e) state %.3e (head %.2e) |o| %.6f |S| %.6f", ok ? "ok" : "FAIL",
              !c.is_staged ? (c.is_balanced ? "balanced: " : "")
                           : (c.cut.segments > 1 ? "cut: " : (c.wave > 0 ? "beside: " : "staged: ")),
              c.name.c_str(), out_total.ratio(), out.worst_head, state_total.ratio(), state.worst_head,
              std::sqrt(out_total.norm), std::sqrt(state_total.norm));
  if (!ok)
    std::printf(" nan %ld/%ld inf %ld/%ld rows %ld slots %ld guards %d worst out (%ld,%ld) state (%ld,%ld)",
                out.nan_mismatch, state.nan_mismatch, out.finite_inf_mismatch, state.finite_inf_mismatch, bad_rows,
                bad_slots, guards, out.worst_sequence, out.worst_head_index, state.worst_sequence,
                state.worst_head_index);
  std::printf("\n");
  std::fflush(stdout);
  return ok;
}

// First mismatching rows of a failing problem.
inline void describe(const Problem& c, const Device& d, const Result& r, const Expected& x) {
  for (int64_t n = 0; n < std::min<int64_t>(c.sequences(), 2); ++n) {
    std::printf("  seq %ld rows:", n);
    for (int64_t t = d.begins[n]; t < d.begins[n] + std::min<int64_t>(c.lengths[n], 72); ++t) {
      double e = 0, s = 0;
      for (int i = 0; i < 128; ++i) {
        const size_t at = t * c.value_heads * 128 + i;
        const double y = from_bf16(r.out[at]);
        e += (y - x.out[at]) * (y - x.out[at]), s += x.out[at] * x.out[at];
      }
      std::printf(" %.0e", std::sqrt(e / s));
    }
    std::printf("\n");
  }
}

}  // namespace kda::cuda::prefill_fused::dev

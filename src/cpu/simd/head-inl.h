// One value head of the recurrence (spec E-7), shared by decode, commit and decode_step.
//
// Equations, per value row v of the state [V, K], with q, k normalised (E-4), q scaled (E-6), d = e^g:
//   u = β (v_v − St[v]·(d∘k))     o = St[v]·(d∘q) + u (q·k)     St[v] ← St[v]∘d + u·k
// which is E-7 with o taken from the decayed row and the decay moved to the other factor of both sums: they come
// from one pass over the row, the second pass (the row is in L1) decays, updates and stores. Every mode runs
// step_rows() below, token by token, so that columns, records, commit and fold give the same bits (V-9, V-10, V-10b).
// Precision: all fp32. 16-bit states are widened exactly; a commit multiplies and adds in the same order.
// Memory: value rows are handled kRowBlock at a time; a block of the start state is loaded before its first store
// (V-5).
#if defined(KDA_CPU_SIMD_HEAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_SIMD_HEAD_INL_H_
#undef KDA_CPU_SIMD_HEAD_INL_H_
#else
#define KDA_CPU_SIMD_HEAD_INL_H_
#endif

#include <cmath>

#include "cpu/decode_call.h"
#include "cpu/gate_head.h"
#include "cpu/simd/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// ---- Token preparation ----------------------------------------------------------------------------------

HWY_NOINLINE inline void load_bias(const kda_attention_spec& a, const kda_tensor& dt_bias, int64_t hv, float* bias) {
  if (present(dt_bias)) return load_row(static_cast<const float*>(dt_bias.data) + hv * a.key_dim, a.key_dim, bias);
  std::memset(bias, 0, static_cast<size_t>(padded(a.key_dim)) * sizeof(float));
}

// x ← x·rsqrt(Σx² + 1e-6)·factor over a padded row (E-4); without normalisation x·factor.
HWY_NOINLINE inline void normalize_row(const kda_attention_spec& a, float* x, float factor) {
  const F32 d;
  const int64_t kp = padded(a.key_dim);
  if (!a.no_qk_norm) factor *= 1.0f / std::sqrt(dot(x, x, kp) + 1e-6f);
  const auto f = hn::Set(d, factor);
  for (int64_t i = 0; i < kp; i += static_cast<int64_t>(hn::Lanes(d))) {
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), f), d, x + i);
  }
}

// decay ← e^g over a padded row that holds the raw gate.
HWY_NOINLINE inline void decay_row(const kda_attention_spec& a, const GateHead& head, const float* bias, float* x) {
  const F32 d;
  for (int64_t i = 0; i < padded(a.key_dim); i += static_cast<int64_t>(hn::Lanes(d))) {
    hn::StoreU(exp(d, log_decay(d, head, hn::LoadU(d, x + i), hn::LoadU(d, bias + i))), d, x + i);
  }
}

HWY_INLINE float beta_of(const kda_attention_spec& a, const void* at) {
  const float x = load_one(a.beta_dtype, at);
  if (a.beta_form == KDA_BETA_PLAIN) return x;
  return a.allow_neg_eigval ? 2.0f * sigmoid1(x) : sigmoid1(x);
}

// Row t of the scratch, whose q and k hold post-conv values: normalises them and forms decay, beta, q·k and the
// decayed rows dk, dq. `ahead` may use the time between the steps.
template <class Ahead>
HWY_NOINLINE inline void prepare_token(const kda_attention_spec& a, const GateHead& head, HeadScratch& s, int64_t t,
                                       const void* gate, const void* beta, Ahead& ahead) {
  float* q = s.q + t * s.kp;
  float* k = s.k + t * s.kp;
  normalize_row(a, q, static_cast<float>(a.scale));
  ahead.step();
  normalize_row(a, k, 1.0f);
  ahead.step();
  load_any(a.gate_dtype, gate, a.key_dim, s.decay + t * s.kp);
  decay_row(a, head, s.bias, s.decay + t * s.kp);
  ahead.step();
  s.beta[t] = beta_of(a, beta);
  s.qk[t] = dot(q, k, s.kp);
  ahead.step();
  const F32 d;
  for (int64_t i = 0; i < s.kp; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto decay = hn::LoadU(d, s.decay + t * s.kp + i);
    hn::StoreU(hn::Mul(decay, hn::LoadU(d, q + i)), d, s.dq + t * s.kp + i);
    hn::StoreU(hn::Mul(decay, hn::LoadU(d, k + i)), d, s.dk + t * s.kp + i);
  }
}

// ---- The recurrence -------------------------------------------------------------------------------------

struct Token {
  const float *k, *decay, *dq, *dk;  // padded rows
  float beta, qk;
};
HWY_INLINE Token token_of(const HeadScratch& s, int64_t t) {
  const int64_t at = t * s.kp;
  return {s.k + at, s.decay + at, s.dq + at, s.dk + at, s.beta[t], s.qk[t]};
}

// How a state row is stored: in a pool (dense, nothing may be read behind it) or in padded scratch.
enum class RowKind { pool, scratch };

template <RowKind kKind, class S>
HWY_INLINE VF load_state(const S* p, int64_t left) {
  const F32 d;
  if (kKind == RowKind::pool && left < static_cast<int64_t>(hn::Lanes(d)))
    return load_n(d, p, static_cast<size_t>(left));
  return load(d, p);
}
template <RowKind kKind, class S>
HWY_INLINE void store_state(VF v, S* p, int64_t left) {
  const F32 d;
  if (kKind == RowKind::pool && left < static_cast<int64_t>(hn::Lanes(d)))
    return store_n(d, v, p, static_cast<size_t>(left));
  store(d, v, p);
}

// One token over R value rows, from `in` to `out` (they may be the same). u and o: [R].
template <int R, RowKind kKind, class S>
HWY_INLINE void step_rows(const Token& t, int64_t K, const S* in, S* out, int64_t stride, const float* v, float* u,
                          float* o) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  VF sk[R], sq[R];
  for (int r = 0; r < R; ++r) sk[r] = sq[r] = hn::Zero(d);
  const auto sums = [&](int64_t i, int64_t left) HWY_ATTR {
    const auto dk = hn::LoadU(d, t.dk + i), dq = hn::LoadU(d, t.dq + i);
    for (int r = 0; r < R; ++r) {
      const auto s = load_state<kKind>(in + r * stride + i, left);
      sk[r] = hn::MulAdd(s, dk, sk[r]);
      sq[r] = hn::MulAdd(s, dq, sq[r]);
    }
  };
  int64_t i = 0;
  for (; i + lanes <= K; i += lanes) sums(i, lanes);
  if (i < K) sums(i, K - i);
  float sum_k[R], sum_q[R];
  if constexpr (R == 4) {
    sum_lanes4(sk, sum_k);
    sum_lanes4(sq, sum_q);
  } else {
    for (int r = 0; r < R; ++r) sum_k[r] = sum_lanes(sk[r]), sum_q[r] = sum_lanes(sq[r]);
  }
  VF uv[R];
  for (int r = 0; r < R; ++r) {
    u[r] = t.beta * (v[r] - sum_k[r]);
    o[r] = sum_q[r] + u[r] * t.qk;
    uv[r] = hn::Set(d, u[r]);
  }
  const auto update = [&](int64_t j, int64_t left) HWY_ATTR {
    const auto decay = hn::LoadU(d, t.decay + j), k = hn::LoadU(d, t.k + j);
    for (int r = 0; r < R; ++r) {
      const auto s = hn::Mul(load_state<kKind>(in + r * stride + j, left), decay);
      store_state<kKind>(hn::MulAdd(uv[r], k, s), out + r * stride + j, left);
    }
  };
  for (i = 0; i + lanes <= K; i += lanes) update(i, lanes);
  if (i < K) update(i, K - i);
}

// A recorded token over R rows of padded scratch: the update of step_rows with u known (V-10).
template <int R>
HWY_INLINE void replay_rows(const float* k, const float* decay, const float* u, int64_t K, float* rows,
                            int64_t stride) {
  const F32 d;
  VF uv[R];
  for (int r = 0; r < R; ++r) uv[r] = hn::Set(d, u[r]);
  for (int64_t i = 0; i < K; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto kv = hn::LoadU(d, k + i), dv = hn::LoadU(d, decay + i);
    for (int r = 0; r < R; ++r) {
      float* p = rows + r * stride + i;
      hn::StoreU(hn::MulAdd(uv[r], kv, hn::Mul(hn::LoadU(d, p), dv)), d, p);
    }
  }
}

template <class F>
HWY_INLINE void for_row_blocks(int64_t v0, int64_t v1, const F& f) {
  int64_t v = v0;
  for (; v + kRowBlock <= v1; v += kRowBlock) f(v, std::integral_constant<int, static_cast<int>(kRowBlock)>{});
  for (; v < v1; ++v) f(v, std::integral_constant<int, 1>{});
}

// ---- Records (P-3, V-10) --------------------------------------------------------------------------------

struct RecordPlace {
  float* u;  // [V] of (row, head, token)
  char* kg;  // [2K] gate dtype
};
HWY_INLINE RecordPlace record_place(const kda_records& r, int64_t row, int64_t hv, int64_t t) {
  const auto at = [&](const kda_tensor& x) {
    return static_cast<char*>(x.data) +
           (row * x.strides[0] + hv * x.strides[1] + t * x.strides[2]) * static_cast<int64_t>(dtype_size(x.dtype));
  };
  return {reinterpret_cast<float*>(at(r.u)), at(r.kg)};
}

// Decay and normalised key of the recorded tokens [0, count), formed as prepare_token formed them.
HWY_NOINLINE inline void load_records(const kda_attention_spec& a, const GateHead& head, const kda_records& records,
                                      int64_t row, int64_t hv, int64_t count, HeadScratch& s) {
  const auto size = static_cast<int64_t>(dtype_size(a.gate_dtype));
  for (int64_t t = 0; t < count; ++t) {
    const RecordPlace place = record_place(records, row, hv, t);
    load_any(a.gate_dtype, place.kg, a.key_dim, s.commit_k + t * s.kp);
    load_any(a.gate_dtype, place.kg + a.key_dim * size, a.key_dim, s.commit_decay + t * s.kp);
    normalize_row(a, s.commit_k + t * s.kp, 1.0f);
    decay_row(a, head, s.bias, s.commit_decay + t * s.kp);
  }
}

// Rows [v, v+R) of a pool into `work`, replayed over `count` recorded tokens.
template <int R, class S>
HWY_NOINLINE inline void commit_rows(const kda_attention_spec& a, const kda_records& records, int64_t row, int64_t hv,
                                     int64_t v, int64_t count, const S* from, HeadScratch& s) {
  for (int r = 0; r < R; ++r) load_row(from + r * a.key_dim, a.key_dim, s.work + r * s.kp);
  for (int64_t t = 0; t < count; ++t) {
    replay_rows<R>(s.commit_k + t * s.kp, s.commit_decay + t * s.kp, record_place(records, row, hv, t).u + v,
                   a.key_dim, s.work, s.kp);
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_SIMD_HEAD_INL_H_

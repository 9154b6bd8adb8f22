// The tokens of one decode row through one value head: modes, stores, records. decode_kernel.cc feeds it from
// q, k, v tensors, decode_step_kernel.cc from its own conv.
#if defined(KDA_CPU_SIMD_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_SIMD_DECODE_INL_H_
#undef KDA_CPU_SIMD_DECODE_INL_H_
#else
#define KDA_CPU_SIMD_DECODE_INL_H_
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <type_traits>

#include "cpu/simd/head-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// Output row of token t and value head hv; null if the call skips that row.
HWY_INLINE void* out_head(const DecodeCall& c, const DecodeRow& row, int64_t t, int64_t hv) {
  const kda_tensor& out = c.args->out;
  const int64_t r = out_row(out, c.args->out_rows, row.span, 3, t);
  if (r < 0) return nullptr;
  return const_cast<char*>(head_row(out, row.span, 3, r - row.span.begin, hv));
}

HWY_NOINLINE inline void zero_out(const DecodeCall& c, const DecodeRow& row, int64_t hv, int64_t v0, int64_t v1) {
  const auto size = static_cast<int64_t>(dtype_size(c.desc->attention.out_dtype));
  for (int64_t t = 0; t < row.span.length; ++t) {
    char* to = static_cast<char*>(out_head(c, row, t, hv));
    if (to != nullptr) std::memset(to + v0 * size, 0, static_cast<size_t>((v1 - v0) * size));
  }
}

// Head hv of a slot's state, [V, K] dense.
template <class S>
HWY_INLINE S* state_of(const kda_tensor& state, int64_t slot, int64_t hv) {
  return static_cast<S*>(state.data) + slot * state.strides[0] + hv * state.shape[2] * state.shape[3];
}

// Where one token group of a row starts and ends.
struct GroupEnds {
  bool from_carry = false;  // the state comes from the previous group
  bool to_carry = false;    // it goes on to the next one
};

template <class S>
HWY_INLINE void store_block(const float* work, int64_t kp, int64_t K, int rows, S* to) {
  for (int r = 0; r < rows; ++r) store_row(work + r * kp, K, to + r * K);
}

// Value rows ahead that are fetched while a block is worked on, a whole block at a time so that the lines come in
// order: 8 KiB of fp32 state. Measured on Zen 5: other distances, requests spread over the sums and rows taken one
// after another are all slower; asking for the rows that verify stores to saves a quarter at four tokens.
constexpr int64_t kPrefetchRows = 16;
// Bytes ahead at which one line of a page is asked for: with pages of 4 KiB the walk to the next one takes longer
// than the rows above give it (Zen 5, one thread, 64 MiB of states: 0.76 of the in-place scale rate without, 0.95
// with).
constexpr int64_t kPageAhead = 32768;

HWY_INLINE void prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) hwy::Prefetch(static_cast<const char*>(p) + i);
}

HWY_INLINE void prefetch_state(const void* rows, const kda_attention_spec& a, int64_t count, int64_t size) {
  const int64_t bytes = a.key_dim * size;
  prefetch(static_cast<const char*>(rows) + kPrefetchRows * bytes, count * bytes);
  hwy::Prefetch(static_cast<const char*>(rows) + kPageAhead);
}

// The rows that a head's walk asks for: kPrefetchRows ahead of it, on into the next head's. A share of them is asked
// for while the head's tokens are prepared: the memory would be idle then, a sixth of the time.
class StateAhead {
 public:
  StateAhead() = default;
  template <class S>
  StateAhead(const S* rows, int64_t count, int64_t row_size) {
    next_ = reinterpret_cast<const char*>(rows + kPrefetchRows * row_size);
    end_ = reinterpret_cast<const char*>(rows + (count + kPrefetchRows) * row_size);
    const int64_t lines = (end_ - next_) / 64, blocks = std::max<int64_t>(1, count / kRowBlock);
    per_step_ = lines / 32;
    per_block_ = (lines - kSteps * per_step_ + blocks - 1) / blocks;
  }
  // One of kSteps steps of the preparation, or a block of rows.
  void step() {
    if (steps_-- > 0) ask(per_step_);
  }
  void block() { ask(per_block_); }

 private:
  static constexpr int kSteps = 5;
  HWY_INLINE void ask(int64_t lines) {
    const char* const stop = std::min(end_, next_ + lines * 64);
    if (next_ >= stop) return;
    hwy::Prefetch(next_ + kPageAhead);
    for (; next_ < stop; next_ += 64) hwy::Prefetch(next_);
  }
  const char *next_ = nullptr, *end_ = nullptr;
  int64_t per_step_ = 0, per_block_ = 0;
  int steps_ = kSteps;
};

// From pool to pool: each token reads the rows that the one before it stored. With 16-bit states for one token only,
// since the next one goes on from the unrounded state (N-1).
template <class S>
HWY_NOINLINE inline void run_direct(const kda_attention_spec& a, const S* from, S* const* to, int64_t count,
                                    int64_t v0, int64_t v1, StateAhead& ahead, HeadScratch& s) {
  for_row_blocks(v0, v1, [&](int64_t v, auto rows) HWY_ATTR {
    constexpr int kR = decltype(rows)::value;
    const S* in = from + v * a.key_dim;
    ahead.block();
    for (int64_t t = 0; t < count; ++t) {
      float u[kR];
      S* out = to[t] + v * a.key_dim;
      if (out != in) prefetch_state(out, a, kR, sizeof(S));
      step_rows<kR, RowKind::pool>(token_of(s, t), a.key_dim, in, out, a.key_dim, s.v + t * s.vp + v, u,
                                   s.o + t * s.vp + v);
      in = out;
    }
  });
}

// Columns mode: `count` prepared tokens, the first of which is token t0 of the row.
template <class S>
HWY_NOINLINE inline void run_columns(const DecodeCall& c, const DecodeRow& row, int64_t n, int64_t hv, int64_t v0,
                                     int64_t v1, int64_t count, const GroupEnds& ends, StateAhead& ahead,
                                     HeadScratch& s) {
  const kda_attention_spec& a = c.desc->attention;
  const int64_t K = a.key_dim;
  const kda_tensor& state = c.args->state;
  const bool per_token = c.desc->store == KDA_STORE_PER_TOKEN;
  const S* from = row.fresh || ends.from_carry ? nullptr : state_of<S>(state, row.start_slot, hv);
  S* to[kTokenGroup] = {};
  const auto place = [&](int64_t t, int64_t column) {
    const int64_t slot = store_slot(*c.desc, *c.args, n, column);
    if (slot >= 0) to[t] = state_of<S>(state, slot, hv);
  };
  if (per_token) {
    for (int64_t t = 0; t < count; ++t) place(t, t);
  } else if (!ends.to_carry) {
    place(count - 1, 0);
  }
  const bool all_stored = std::find(to, to + count, nullptr) == to + count;
  if (from != nullptr && all_stored && (count == 1 || std::is_same_v<S, float>)) {
    return run_direct(a, from, to, count, v0, v1, ahead, s);
  }
  for_row_blocks(v0, v1, [&](int64_t v, auto rows) HWY_ATTR {
    constexpr int kR = decltype(rows)::value;
    float* work =
        c.desc->store == KDA_STORE_FINAL && (ends.from_carry || ends.to_carry) ? s.carry + v * s.kp : s.work;
    if (from != nullptr) {
      prefetch_state(from + v * K, a, kR, sizeof(S));
      for (int r = 0; r < kR; ++r) load_row(from + (v + r) * K, K, work + r * s.kp);
    } else if (!ends.from_carry) {
      std::memset(work, 0, static_cast<size_t>(kR * s.kp) * sizeof(float));
    }
    for (int64_t t = 0; t < count; ++t) {
      float u[kR];
      step_rows<kR, RowKind::scratch>(token_of(s, t), K, work, work, s.kp, s.v + t * s.vp + v, u, s.o + t * s.vp + v);
      if (to[t] != nullptr) store_block(work, s.kp, K, kR, to[t] + v * K);
    }
  });
}

// Records mode: commits what a fold accepts, verifies from the committed state, records each token's u.
template <class S>
HWY_NOINLINE inline void run_records(const DecodeCall& c, const DecodeRow& row, int64_t hv, int64_t count,
                                     HeadScratch& s) {
  const kda_attention_spec& a = c.desc->attention;
  const int64_t K = a.key_dim;
  S* state = state_of<S>(c.args->state, row.start_slot, hv);
  for_row_blocks(0, a.value_dim, [&](int64_t v, auto rows) HWY_ATTR {
    constexpr int kR = decltype(rows)::value;
    S* p = state + v * K;
    prefetch_state(p, a, kR, sizeof(S));
    commit_rows<kR>(a, c.args->records, row.record, hv, v, row.commit, p, s);
    if (row.commit > 0) {
      store_block(s.work, s.kp, K, kR, p);
      // The verified tokens start from what a separate call would read back.
      if (!std::is_same_v<S, float>) {
        for (int r = 0; r < kR; ++r) load_row(p + r * K, K, s.work + r * s.kp);
      }
    }
    for (int64_t t = 0; t < count; ++t) {
      float u[kR];
      step_rows<kR, RowKind::scratch>(token_of(s, t), K, s.work, s.work, s.kp, s.v + t * s.vp + v, u,
                                      s.o + t * s.vp + v);
      std::memcpy(record_place(c.args->records, row.record, hv, t).u + v, u, sizeof u);
    }
  });
}

// Post-conv k (in s.k, not normalised yet) and the raw gate of `count` tokens.
HWY_NOINLINE inline void write_records(const DecodeCall& c, const DecodeRow& row, int64_t hv, int64_t count,
                                       const HeadScratch& s) {
  const kda_attention_spec& a = c.desc->attention;
  const auto size = static_cast<int64_t>(dtype_size(a.gate_dtype));
  for (int64_t t = 0; t < count; ++t) {
    char* kg = record_place(c.args->records, row.record, hv, t).kg;
    store_any(a.gate_dtype, s.k + t * s.kp, a.key_dim, kg);
    std::memcpy(kg + a.key_dim * size, head_row(c.args->gate, row.span, 3, t, hv),
                static_cast<size_t>(a.key_dim * size));
  }
}

template <class S>
HWY_NOINLINE inline void store_zero_state(const DecodeCall& c, int64_t n, int64_t hv, int64_t v0, int64_t v1) {
  const int64_t slot = store_slot(*c.desc, *c.args, n, 0);
  const int64_t K = c.desc->attention.key_dim;
  if (slot < 0) return;
  std::memset(state_of<S>(c.args->state, slot, hv) + v0 * K, 0, static_cast<size_t>((v1 - v0) * K) * sizeof(S));
}

// Runs an active row: load(t0, count) puts q, k, v of the tokens into scratch, emit(t, o) takes each output row.
template <class S, class Load, class Emit>
HWY_NOINLINE inline void run_head_as(const DecodeCall& c, const DecodeRow& row, int64_t n, int64_t hv, int64_t v0,
                                     int64_t v1, const GateHead& head, HeadScratch& s, const Load& load,
                                     const Emit& emit) {
  const kda_attention_spec& a = c.desc->attention;
  const bool records = c.desc->mode == KDA_DECODE_RECORDS;
  const int64_t length = row.span.length;
  if (length == 0 && row.fresh) store_zero_state<S>(c, n, hv, v0, v1);  // P-11
  // The old records are taken out before the new ones overwrite them.
  if (row.commit > 0) load_records(a, head, c.args->records, row.record, hv, row.commit, s);
  if (length == 0 && row.commit > 0) return run_records<S>(c, row, hv, 0, s);
  for (int64_t t0 = 0; t0 < length; t0 += kTokenGroup) {
    const int64_t count = std::min(length - t0, kTokenGroup);
    StateAhead ahead;
    if (t0 == 0 && !records && !row.fresh) {
      const S* rows = state_of<S>(c.args->state, row.start_slot, hv) + v0 * a.key_dim;
      ahead = StateAhead(rows, v1 - v0, a.key_dim);
    }
    load(t0, count);
    ahead.step();
    if (records) write_records(c, row, hv, count, s);
    for (int64_t t = 0; t < count; ++t) {
      prepare_token(a, head, s, t, head_row(c.args->gate, row.span, 3, t0 + t, hv),
                    head_row(c.args->beta, row.span, 2, t0 + t, hv), ahead);
    }
    if (records) run_records<S>(c, row, hv, count, s);
    else run_columns<S>(c, row, n, hv, v0, v1, count, {t0 > 0, t0 + count < length}, ahead, s);
    for (int64_t t = 0; t < count; ++t) emit(t0 + t, s.o + t * s.vp);
  }
}

template <class Load, class Emit>
HWY_INLINE void run_head(const DecodeCall& c, const DecodeRow& row, int64_t n, int64_t hv, int64_t v0, int64_t v1,
                         const GateHead& head, HeadScratch& s, const Load& load, const Emit& emit) {
  switch (c.desc->attention.state_dtype) {
    case KDA_FP32: return run_head_as<float>(c, row, n, hv, v0, v1, head, s, load, emit);
    case KDA_BF16: return run_head_as<bf16>(c, row, n, hv, v0, v1, head, s, load, emit);
    default: return run_head_as<fp16>(c, row, n, hv, v0, v1, head, s, load, emit);
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_SIMD_DECODE_INL_H_

// Decode, verify and commit of one value head (spec V, E-7); the recurrence is in cpu/simd/head-inl.h.
//
// A task is (row n, value head hv, value rows [v0, v1)). It prepares the row's tokens in scratch (normalise, gate,
// beta), then walks over its value rows: plain one-token decode goes from pool to pool, everything else through a
// block of kRowBlock rows in L1 that all tokens pass over.
// Limits: K <= 256, V <= 1024 (scratch is booked for the plan's own sizes).
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/decode_kernel.cc"
#include <hwy/foreach_target.h>

#include "cpu/simd/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {
namespace {

// Loads tokens [t0, t0 + count) of a row into scratch.
void load_tokens(const DecodeCall& c, const DecodeRow& row, int64_t hv, int64_t t0, int64_t count, HeadScratch& s) {
  const kda_attention_spec& a = c.desc->attention;
  const int64_t h = hv / (a.num_value_heads / a.num_heads);
  for (int64_t t = 0; t < count; ++t) {
    load_any(a.io_dtype, head_row(c.args->q, row.span, 3, t0 + t, h), a.key_dim, s.q + t * s.kp);
    load_any(a.io_dtype, head_row(c.args->k, row.span, 3, t0 + t, h), a.key_dim, s.k + t * s.kp);
    load_any(a.io_dtype, head_row(c.args->v, row.span, 3, t0 + t, hv), a.value_dim, s.v + t * s.vp);
  }
}

// Starts the token rows of a head on their way to the cache.
void prefetch_tokens(const DecodeCall& c, const DecodeRow& row, int64_t hv) {
  const kda_attention_spec& a = c.desc->attention;
  const int64_t h = hv / (a.num_value_heads / a.num_heads);
  if (row.span.length == 0) return;
  const auto row_of = [&](const kda_tensor& x, int64_t head, int64_t n) HWY_ATTR {
    prefetch(head_row(x, row.span, 3, 0, head), n * static_cast<int64_t>(dtype_size(x.dtype)));
  };
  row_of(c.args->q, h, a.key_dim);
  row_of(c.args->k, h, a.key_dim);
  row_of(c.args->v, hv, a.value_dim);
  row_of(c.args->gate, hv, a.key_dim);
}

void decode_head(const DecodeCall& c, const DecodeRow& row, int64_t n, int64_t hv, int64_t v0, int64_t v1,
                 float* scratch) {
  const kda_attention_spec& a = c.desc->attention;
  HeadScratch s(*c.desc, scratch);
  const GateHead head = gate_head(a, c.args->A_log, hv);
  load_bias(a, c.args->dt_bias, hv, s.bias);
  const auto load = [&](int64_t t0, int64_t count) HWY_ATTR { load_tokens(c, row, hv, t0, count, s); };
  const auto emit = [&](int64_t t, const float* o) HWY_ATTR {
    void* to = out_head(c, row, t, hv);
    if (to == nullptr) return;
    const auto size = static_cast<int64_t>(dtype_size(a.out_dtype));
    store_any(a.out_dtype, o + v0, v1 - v0, static_cast<char*>(to) + v0 * size);
  };
  run_head(c, row, n, hv, v0, v1, head, s, load, emit);
}

void decode(const DecodeCall& c, int64_t n, int64_t hv0, int64_t hv1, int64_t v0, int64_t v1, float* scratch) {
  const DecodeRow& row = c.rows[n];
  for (int64_t hv = hv0; hv < hv1; ++hv) {
    if (hv + 1 < hv1) prefetch_tokens(c, row, hv + 1);
    if (row.active) decode_head(c, row, n, hv, v0, v1, scratch);
    else zero_out(c, row, hv, v0, v1);
  }
}

template <class S>
void commit_state(const CommitCall& c, const CommitRow& row, int64_t hv, HeadScratch& s) {
  const kda_attention_spec& a = c.desc->attention;
  S* state = state_of<S>(c.args->state, row.slot, hv);
  for_row_blocks(0, a.value_dim, [&](int64_t v, auto rows) HWY_ATTR {
    constexpr int kR = decltype(rows)::value;
    S* p = state + v * a.key_dim;
    commit_rows<kR>(a, c.args->records, row.record, hv, v, row.tokens, p, s);
    for (int r = 0; r < kR; ++r) store_row(s.work + r * s.kp, a.key_dim, p + r * a.key_dim);
  });
}

void commit(const CommitCall& c, int64_t n, int64_t hv, float* scratch) {
  const CommitRow& row = c.rows[n];
  if (!row.active || row.tokens == 0) return;
  const kda_attention_spec& a = c.desc->attention;
  HeadScratch s(*c.desc, scratch);
  load_bias(a, c.args->dt_bias, hv, s.bias);
  load_records(a, gate_head(a, c.args->A_log, hv), c.args->records, row.record, hv, row.tokens, s);
  switch (a.state_dtype) {
    case KDA_FP32: return commit_state<float>(c, row, hv, s);
    case KDA_BF16: return commit_state<bf16>(c, row, hv, s);
    default: return commit_state<fp16>(c, row, hv, s);
  }
}

}  // namespace

const DecodeFunctions* decode_table() {
  static constexpr DecodeFunctions table = {decode, commit};
  return &table;
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {
HWY_EXPORT(decode_table);
const DecodeFunctions& decode_functions(Isa isa) { return *KDA_CPU_TABLE(decode_table, isa)(); }
}  // namespace kda::cpu
#endif

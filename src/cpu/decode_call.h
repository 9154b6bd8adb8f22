// What the host half of decode, commit and decode_step hands to the kernels (plain data, no SIMD).
#pragma once

#include <cstdint>

#include "core/rows.h"
#include "cpu/common.h"
#include "cpu/isa.h"

namespace kda::cpu {

// Value rows that are updated together: hides the latency of the sums over K.
constexpr int64_t kRowBlock = 4;
// Tokens that are prepared at a time; also the longest verify row.
constexpr int64_t kTokenGroup = KDA_MAX_VERIFY;

// Scratch memory of one worker. Token rows are padded with zeros (cpu/common.h).
struct HeadScratch {
  float *q, *k, *decay;            // [tokens, padded(K)] normalised and scaled; normalised; e^g
  float *dq, *dk;                  // [tokens, padded(K)] decay∘q, decay∘k
  float *v, *o;                    // [tokens, padded(V)]
  float *beta, *qk;                // [tokens] beta; q.k
  float* bias;                     // [padded(K)] dt_bias of the head
  float *commit_k, *commit_decay;  // [width, padded(K)], records
  float* work;                     // [kRowBlock, padded(K)] value rows between the tokens of a verify row
  float* carry;                    // [V, padded(K)] state between token groups, store = final
  int64_t kp, vp;                  // padded(K), padded(V)
  int64_t total;                   // floats in all

  HeadScratch(const kda_attention_spec& a, int64_t tokens, bool records, bool with_carry, float* base)
      : kp(padded(a.key_dim)), vp(padded(a.value_dim)), total(0) {
    const auto take = [&](int64_t n) {
      float* p = base == nullptr ? nullptr : base + total;
      total += padded(n);
      return p;
    };
    q = take(tokens * kp);
    k = take(tokens * kp);
    decay = take(tokens * kp);
    dq = take(tokens * kp);
    dk = take(tokens * kp);
    v = take(tokens * vp);
    o = take(tokens * vp);
    beta = take(tokens);
    qk = take(tokens);
    bias = take(kp);
    commit_k = take(records ? tokens * kp : 0);
    commit_decay = take(records ? tokens * kp : 0);
    work = take(kRowBlock * kp);
    carry = take(with_carry ? a.value_dim * kp : 0);
  }
  HeadScratch(const kda_decode_desc& d, float* base)
      : HeadScratch(d.attention, d.store == KDA_STORE_FINAL ? kTokenGroup : d.width, d.mode == KDA_DECODE_RECORDS,
                    d.store == KDA_STORE_FINAL, base) {}
  HeadScratch(const kda_commit_desc& d, float* base) : HeadScratch(d.attention, d.width, true, false, base) {}
};

struct DecodeCall {
  const kda_decode_desc* desc;
  const kda_decode_args* args;
  const DecodeRow* rows;  // [N]
};

struct CommitCall {
  const kda_commit_desc* desc;
  const kda_commit_args* args;
  const CommitRow* rows;  // [N]
};

inline void set_count(const kda_records& records, int64_t row, int64_t count) {
  static_cast<int32_t*>(records.count.data)[row * records.count.strides[0]] = static_cast<int32_t>(count);
}
// After a verify_record: every active row has recorded its tokens (V-10).
inline void set_record_counts(const kda_records& records, const DecodeRow* rows, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i].active) set_count(records, rows[i].record, rows[i].span.length);
  }
}

struct DecodeFunctions {
  // Value rows [v0, v1) of value heads [hv0, hv1) in row n; v0 is a multiple of kRowPad.
  void (*decode)(const DecodeCall& call, int64_t n, int64_t hv0, int64_t hv1, int64_t v0, int64_t v1, float* scratch);
  void (*commit)(const CommitCall& call, int64_t n, int64_t hv, float* scratch);
};
const DecodeFunctions& decode_functions(Isa isa);

}  // namespace kda::cpu

// The tokens of one sequence and value head as fp64 vectors, gate and beta activated, q and k normalised.
#pragma once

#include <cmath>

#include "core/rows.h"
#include "reference/equations.h"
#include "reference/scalar.h"

namespace kda::reference {

// Views of the token tensors that all attention operators share (names as in their argument structs).
struct AttentionTensors {
  kda_tensor q, k, v, gate, beta, A_log, dt_bias;

  template <class Args>
  static AttentionTensors of(const Args& a) {
    return {a.q, a.k, a.v, a.gate, a.beta, a.A_log, a.dt_bias};
  }
};

// fp64 vectors of one token and the start of the worker's state.
struct HeadScratch {
  double* state;  // [rows, K]
  double* decay;  // [K]
  double* k;      // [K]
  double* q;      // [K]
  double* v;      // [rows]
  double* u;      // [rows]
  double* o;      // [rows]

  static int64_t size(int64_t rows, int64_t K) { return rows * K + 3 * K + 3 * rows; }
  static HeadScratch carve(double* memory, int64_t rows, int64_t K) {
    double* const vectors = memory + rows * K;
    return {memory,
            vectors,
            vectors + K,
            vectors + 2 * K,
            vectors + 3 * K,
            vectors + 3 * K + rows,
            vectors + 3 * K + 2 * rows};
  }
};

// Reads token rows of value head `head` (query head head / (HV/H), E-8).
class HeadInput {
 public:
  HeadInput(const kda_attention_spec& spec, const AttentionTensors& x, const TokenSpan& span, int64_t head)
      : spec_(spec),
        x_(x),
        span_(span),
        head_(head),
        query_head_(head / (spec.num_value_heads / spec.num_heads)),
        a_(std::exp(parameter(x.A_log, head, 0))) {}

  // e^g of E-1 from a row of raw gates.
  void decay(const char* raw, kda_dtype dtype, double* out) const;
  // Fills in decay, k, q (zeros if there is none) and v[0, V) of token t; gives beta.
  double read(int64_t t, const HeadScratch& s) const;

  const char* raw_gate(int64_t t) const { return head_row(x_.gate, t, head_); }
  const char* raw_key(int64_t t) const { return head_row(x_.k, t, query_head_); }

 private:
  const char* head_row(const kda_tensor& x, int64_t t, int64_t head) const {
    return advance(token_row(x, span_, 3, t), x.dtype, head * x.strides[x.rank - 2]);
  }

  const kda_attention_spec& spec_;
  const AttentionTensors& x_;
  TokenSpan span_;
  int64_t head_, query_head_;
  double a_;
};

// Zeroes the output rows of an inactive sequence, all heads (P-5).
void zero_output(const kda_tensor& out, const kda_tensor& out_rows, const TokenSpan& span, int64_t heads,
                 int64_t dim);

// Stores one head's output of token t, rounded once (N-4), where out_rows says.
void store_output(const kda_tensor& out, const kda_tensor& out_rows, const TokenSpan& span, int64_t t, int64_t head,
                  int64_t dim, const double* o);

// State of (row, head) in a pool or packed tensor [rows, HV, V, K].
inline char* state_at(const kda_tensor& state, int64_t row, int64_t head) {
  return advance(static_cast<char*>(state.data), state.dtype,
                 row * state.strides[0] + head * state.shape[2] * state.shape[3]);
}

}  // namespace kda::reference

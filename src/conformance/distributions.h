// The gate and key distributions D1..D11 of spec N-10, as inputs of the attention operators.
#pragma once

#include <cstdint>
#include <vector>

#include "conformance/tensor.h"

namespace kda::conformance {

// How g of D3..D11 is handed over: as it is, or for candidates without the plain form as an fp32 raw gate of the
// softplus family (A_log 0, raw = softplus^-1(-g), -1000 for g = 0).
enum class GateForm { kPlain, kRaw };

// Inputs of one call of an attention operator, packed sequences.
struct Problem {
  kda_attention_spec spec{};
  std::vector<int64_t> lengths;  // of the sequences, one after another
  Tensor q, k, v, gate, beta, A_log, dt_bias;
  Tensor state;  // initial states [N, HV, V, K] fp32; absent: all fresh

  int64_t tokens() const { return q.shape()[0]; }
  int64_t sequences() const { return static_cast<int64_t>(lengths.size()); }
  std::vector<int64_t> offsets() const;
};

struct Distribution {
  int number;                   // 1..11
  bool degenerate;              // D9..D11: N-9's second column
  double out_norm, state_norm;  // of the oracle, spec N-10
};
extern const std::vector<Distribution> kDistributions;

// q, k, v are bf16 values stored in `io` (bf16 or fp32).
Problem distribution(int number, GateForm form, kda_dtype io = KDA_BF16);

// The field cases' default inputs (Notation): q, k, v, raw gate and beta logits = bf16(scale * R), initial state
// R(6) * state_scale if not 0; bounded family, lb -5, A_log and dt_bias 0.
struct FieldInput {
  std::vector<int64_t> lengths;
  int64_t heads = 12, value_heads = 0, key_dim = 128, value_dim = 128;
  kda_dtype io = KDA_BF16;
  double gate_scale = 1, beta_scale = 1, state_scale = 0;
};
Problem field_problem(const FieldInput& input);

// softplus^-1(y) in fp64: the x with log1p(exp(x)) = y, y > 0.
double inverse_softplus(double y);

}  // namespace kda::conformance

// The scalar equations of spec E-1, E-4, E-5, E-7, L-7.4 and W-1 in fp64: the definition that everything else is
// measured against. Nothing is rounded here.
#pragma once

#include <cstdint>

#include "kda/types.h"

namespace kda::reference {

double sigmoid(double x);
double silu(double x);      // x / (1 + e^-x), W-1
double softplus(double x);  // x if x > 20, else log1p(e^x), E-1

// Log decay of one channel (E-1). `a` = exp(A_log[hv]), 1 without A_log; `bias` = dt_bias or 0. Plain: raw itself.
double log_decay(const kda_attention_spec& spec, double raw, double a, double bias);

// beta of one token and head (E-5).
double beta_value(const kda_attention_spec& spec, double given);

// x := x * rsqrt(sum x^2 + 1e-6) (E-4).
void normalize(double* x, int64_t n);

// y_v = o_v * rsqrt(mean(o^2) + eps) * weight_v * sigmoid(z_v), in place of o (L-7.4).
void gated_norm(double* o, const double* z, const double* weight, int64_t n, double eps);

// One token of one value head (E-7). The state has `rows` rows of K entries, k fastest; rows are independent.
struct Token {
  const double* decay;  // [K] e^g
  const double* k;      // [K]
  const double* q;      // [K]
  const double* v;      // [rows]
  double beta;
  double scale;
  double* u;  // [rows] out
  double* o;  // [rows] out; null: outputs are not wanted
};
void step(double* state, int64_t rows, int64_t K, const Token& token);

// The same update with a known u (V-10): St := St o e^g + u k^T.
void replay(double* state, int64_t rows, int64_t K, const double* decay, const double* k, const double* u);

}  // namespace kda::reference

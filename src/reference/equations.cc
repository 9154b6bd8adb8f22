// E-7 walks the state row by row: a row of K entries stays in the first-level cache while it is decayed, projected,
// updated and read. Sums run over kLanes interleaved partial sums, so that the compiler can use vector registers
// without reordering anything by itself: the order, and with it every bit, is fixed by this text.
#include "reference/equations.h"

#include <cmath>

namespace kda::reference {
namespace {

constexpr int kLanes = 8;

double sum_lanes(const double (&p)[kLanes]) {
  return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
}

// s := s * decay, returns the sum of s * k.
double decay_and_dot(double* __restrict s, const double* __restrict decay, const double* __restrict k, int64_t K) {
  double partial[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= K; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      s[i + l] *= decay[i + l];
      partial[l] += s[i + l] * k[i + l];
    }
  }
  for (int l = 0; i < K; ++i, ++l) {
    s[i] *= decay[i];
    partial[l] += s[i] * k[i];
  }
  return sum_lanes(partial);
}

// s := s + u * k, returns the sum of s * q.
double update_and_dot(double* __restrict s, double u, const double* __restrict k, const double* __restrict q,
                      int64_t K) {
  double partial[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= K; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      s[i + l] += u * k[i + l];
      partial[l] += s[i + l] * q[i + l];
    }
  }
  for (int l = 0; i < K; ++i, ++l) {
    s[i] += u * k[i];
    partial[l] += s[i] * q[i];
  }
  return sum_lanes(partial);
}

}  // namespace

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x / (1 + std::exp(-x)); }
double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

double log_decay(const kda_attention_spec& spec, double raw, double a, double bias) {
  switch (spec.gate_family) {
    case KDA_GATE_SOFTPLUS: return -a * softplus(raw + bias);
    case KDA_GATE_BOUNDED: return spec.lower_bound * sigmoid(a * (raw + bias));
    case KDA_GATE_PLAIN: break;
  }
  return raw;
}

double beta_value(const kda_attention_spec& spec, double given) {
  const double beta = spec.beta_form == KDA_BETA_PLAIN ? given : sigmoid(given);
  return spec.allow_neg_eigval && spec.beta_form != KDA_BETA_PLAIN ? 2 * beta : beta;
}

void normalize(double* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  const double factor = 1 / std::sqrt(sum + 1e-6);
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

void gated_norm(double* o, const double* z, const double* weight, int64_t n, double eps) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += o[i] * o[i];
  const double factor = 1 / std::sqrt(sum / static_cast<double>(n) + eps);
  for (int64_t i = 0; i < n; ++i) o[i] = o[i] * factor * weight[i] * sigmoid(z[i]);
}

void step(double* state, int64_t rows, int64_t K, const Token& token) {
  for (int64_t r = 0; r < rows; ++r) {
    double* row = state + r * K;
    const double u = token.beta * (token.v[r] - decay_and_dot(row, token.decay, token.k, K));
    const double o = update_and_dot(row, u, token.k, token.q, K);
    token.u[r] = u;
    if (token.o != nullptr) token.o[r] = token.scale * o;
  }
}

void replay(double* state, int64_t rows, int64_t K, const double* decay, const double* k, const double* u) {
  for (int64_t r = 0; r < rows; ++r) {
    double* row = state + r * K;
    for (int64_t i = 0; i < K; ++i) row[i] = row[i] * decay[i] + u[r] * k[i];
  }
}

}  // namespace kda::reference

#include "conformance/distributions.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "conformance/random.h"
#include "conformance/rounding.h"

namespace kda::conformance {
namespace {

constexpr int64_t kDim = 128;
using Values = std::vector<double>;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

Values scaled(Values x, double factor) {
  for (double& v : x) v *= factor;
  return x;
}

// log-uniform in about [1e-4, 2600] (D4, D8).
double log_uniform_decay(double r) { return -std::exp(-0.673535 + 8.536805 * r); }

// Log decays [T, H, K] of D3..D11.
Values log_decays(int number, int64_t T, int64_t H) {
  Values g = uniform_vector(4, T * H * kDim);
  const Values channel = uniform_vector(8, H * kDim);
  for (size_t i = 0; i < g.size(); ++i) {
    const size_t k = i % kDim;
    switch (number) {
      case 3: g[i] = -std::pow(10.0, -4 + 2 * g[i]); break;
      case 4: g[i] = log_uniform_decay(g[i]); break;
      case 5: g[i] = -5; break;
      case 6: g[i] = k % 2 ? -5 : 0; break;
      case 7: g[i] = g[i] < -0.75 ? -2613 : -0.01; break;
      case 8: g[i] = log_uniform_decay(channel[i % static_cast<size_t>(H * kDim)]); break;
      case 9: g[i] = -5 * sigmoid(-12); break;
      case 10: g[i] = -1e-3; break;
      default: g[i] = -1e-4; break;
    }
  }
  return g;
}

// D10, D11: near-equal keys.
Values near_equal_keys(int64_t T, double spread) {
  const Values base = uniform_vector(2, kDim);
  Values k = uniform_vector(9, T * kDim);
  for (size_t i = 0; i < k.size(); ++i) k[i] = base[i % kDim] + spread * k[i];
  return k;
}

void make_queries_keys_values(int number, int64_t T, int64_t H, Values& q, Values& k, Values& v) {
  q = rounded(KDA_BF16, uniform_vector(1, T * H * kDim));
  k = rounded(KDA_BF16, uniform_vector(2, T * H * kDim));
  v = rounded(KDA_BF16, uniform_vector(3, T * H * kDim));
  if (number == 8) {
    const Values pick = uniform_vector(7, T * H * kDim);
    for (size_t i = 0; i < v.size(); ++i) {
      if (pick[i] < -0.98) v[i] = round_to(KDA_BF16, 100 * v[i]);
    }
  }
  if (number == 9) {
    for (size_t i = 0; i < q.size(); ++i) {
      k[i] = k[i % kDim];
      q[i] = k[i];
      v[i] = v[i % (16 * kDim)];
    }
  }
  if (number >= 10) k = rounded(KDA_BF16, near_equal_keys(T, number == 10 ? 0.01 : 0.1));
}

void set_gate(int number, GateForm form, int64_t T, int64_t H, Problem& p) {
  p.A_log = Tensor::full(KDA_FP32, {H}, 0);
  if (number <= 2) {
    const Values raw = uniform_vector(4, T * H * kDim);
    p.spec.gate_dtype = KDA_BF16;
    p.gate = Tensor::of(KDA_BF16, {T, H, kDim}, number == 1 ? scaled(raw, 4) : raw);
    p.A_log.set({1}, std::log(number == 1 ? 4.0 : 16.0));
    p.spec.gate_family = number == 1 ? KDA_GATE_BOUNDED : KDA_GATE_SOFTPLUS;
    if (number == 1) p.spec.lower_bound = -5;
    if (number == 2) {
      Values bias = uniform_vector(8, H * kDim);
      for (double& b : bias) b = inverse_softplus(std::pow(10.0, -2 + b));
      p.dt_bias = Tensor::of(KDA_FP32, {H, kDim}, bias);
    }
    return;
  }
  Values g = log_decays(number, T, H);
  p.spec.gate_dtype = KDA_FP32;
  if (form == GateForm::kPlain) {
    p.spec.gate_family = KDA_GATE_PLAIN;
    p.A_log = Tensor();
  } else {
    p.spec.gate_family = KDA_GATE_SOFTPLUS;
    for (double& x : g) x = x == 0 ? -1000 : inverse_softplus(-x);
  }
  p.gate = Tensor::of(KDA_FP32, {T, H, kDim}, g);
}

}  // namespace

const std::vector<Distribution> kDistributions = {
    {1, false, 1.689715, 8.694030},  {2, false, 7.114016, 29.754967},   {3, false, 15.073427, 65.353855},
    {4, false, 1.910948, 9.843067},  {5, false, 1.391539, 8.019110},    {6, false, 11.205494, 48.838372},
    {7, false, 3.602699, 16.182990}, {8, false, 75.856406, 314.494454}, {9, true, 73.917364, 6.662634},
    {10, true, 2.707162, 7.005243},  {11, true, 9.609970, 35.370640},
};

double inverse_softplus(double y) { return y > 20 ? y : std::log(std::expm1(y)); }

std::vector<int64_t> Problem::offsets() const {
  std::vector<int64_t> cu = {0};
  for (int64_t length : lengths) cu.push_back(cu.back() + length);
  return cu;
}

Problem distribution(int number, GateForm form, kda_dtype io) {
  if (number < 1 || number > 11) std::abort();
  const int64_t T = number < 9 ? 1024 : number == 9 ? 16384 : 2048, H = number < 9 ? 2 : 1;
  Problem p;
  p.spec.num_heads = p.spec.num_value_heads = H;
  p.spec.key_dim = p.spec.value_dim = kDim;
  p.spec.io_dtype = io;
  p.spec.beta_dtype = KDA_FP32;
  p.lengths = {T};
  Values q, k, v;
  make_queries_keys_values(number, T, H, q, k, v);
  p.q = Tensor::of(io, {T, H, kDim}, q);
  p.k = Tensor::of(io, {T, H, kDim}, k);
  p.v = Tensor::of(io, {T, H, kDim}, v);
  set_gate(number, form, T, H, p);
  if (io == KDA_FP32 && p.spec.gate_dtype == KDA_BF16) {
    p.gate = p.gate.copy(KDA_FP32);
    p.spec.gate_dtype = KDA_FP32;
  }
  Values logits = rounded(KDA_BF16, scaled(uniform_vector(5, T * H), 3));
  if (number >= 9) logits.assign(logits.size(), number == 9 ? 8 : number == 10 ? 7 : 1000);
  p.beta = Tensor::of(KDA_FP32, {T, H}, logits);
  p.state =
      Tensor::of(KDA_FP32, {1, H, kDim, kDim}, scaled(uniform_vector(6, H * kDim * kDim), number == 9 ? 0 : 0.1));
  return p;
}

Problem field_problem(const FieldInput& input) {
  Problem p;
  p.lengths = input.lengths;
  int64_t T = 0;
  for (int64_t n : input.lengths) T += n;
  const int64_t H = input.heads, HV = input.value_heads ? input.value_heads : H;
  const int64_t K = input.key_dim, V = input.value_dim, N = p.sequences();
  p.spec.num_heads = H;
  p.spec.num_value_heads = HV;
  p.spec.key_dim = K;
  p.spec.value_dim = V;
  p.spec.io_dtype = p.spec.gate_dtype = p.spec.beta_dtype = input.io;
  p.spec.gate_family = KDA_GATE_BOUNDED;
  p.spec.lower_bound = -5;
  const auto tensor = [&](uint32_t stream, Shape shape, double factor) {
    return Tensor::of(input.io, shape, rounded(KDA_BF16, scaled(uniform_vector(stream, product(shape)), factor)));
  };
  p.q = tensor(1, {T, H, K}, 1);
  p.k = tensor(2, {T, H, K}, 1);
  p.v = tensor(3, {T, HV, V}, 1);
  p.gate = tensor(4, {T, HV, K}, input.gate_scale);
  p.beta = tensor(5, {T, HV}, input.beta_scale);
  p.A_log = Tensor::full(KDA_FP32, {HV}, 0);
  p.dt_bias = Tensor::full(KDA_FP32, {HV, K}, 0);
  if (input.state_scale != 0) {
    p.state = Tensor::of(KDA_FP32, {N, HV, V, K}, scaled(uniform_vector(6, N * HV * V * K), input.state_scale));
  }
  return p;
}

}  // namespace kda::conformance

#include "conformance/attention.h"

#include <algorithm>
#include <cmath>

#include "conformance/random.h"

namespace kda::conformance {
namespace {

using Values = std::vector<double>;

// Levels of the raw gate of R-61; the last mixes all of them by channel and token.
constexpr double kLevels[] = {0, -1000, -8, 0, 8, 30, 1000};

Values raw_gate(Raw raw, int64_t count) {
  Values x = uniform_vector(4, count);
  for (size_t i = 0; i < x.size(); ++i) {
    if (raw == Raw::kRandom) x[i] *= 4;
    else if (raw == Raw::kMixed) x[i] = kLevels[1 + splitmix64(i) % 6];
    else x[i] = kLevels[static_cast<size_t>(raw)];
  }
  return x;
}

void set_family(const AttentionChoice& c, int64_t HV, int64_t K, Problem& p) {
  if (c.family == Family::kPlain || c.family == Family::kPlainForget) {
    p.spec.gate_family = KDA_GATE_PLAIN;
    return;
  }
  const bool softplus = c.family == Family::kSoftplus || c.family == Family::kSoftplusNoBias;
  p.spec.gate_family = softplus ? KDA_GATE_SOFTPLUS : KDA_GATE_BOUNDED;
  if (!softplus) p.spec.lower_bound = c.family == Family::kBoundedShallow ? -0.5 : -5;
  if (c.family != Family::kBoundedNoA) {
    Values a(static_cast<size_t>(HV));
    for (size_t h = 0; h < a.size(); ++h) a[h] = std::log(1 + 15 * (uniform(10, h) + 1) / 2);
    p.A_log = Tensor::of(KDA_FP32, {HV}, a);
  }
  if (c.family == Family::kSoftplusNoBias) return;
  Values bias = uniform_vector(8, HV * K);
  for (double& b : bias) b = inverse_softplus(std::pow(10.0, -2 + b));
  p.dt_bias = Tensor::of(KDA_FP32, {HV, K}, bias);
}

// Log decays for the plain form: those of the softplus family with A_log 0, and now and then full forgetting.
Values plain_gate(Values x, bool forget) {
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = -(x[i] > 20 ? x[i] : std::log1p(std::exp(x[i])));
    if (forget && splitmix64(i) % 97 == 0) x[i] = -INFINITY;
  }
  return x;
}

Tensor beta(const AttentionChoice& c, kda_dtype dtype, const Shape& shape) {
  Values b = uniform_vector(5, product(shape));
  for (double& x : b) {
    if (c.beta == Beta::kPlain) x = (x + 1) / 2;
    else if (c.beta == Beta::kSaturated) x = x < 0 ? -20 : 20;
    else x *= 3;
  }
  return Tensor::of(dtype, shape, b);
}

// Copies a dense [rows, ...] tensor into the layout that was chosen.
Tensor laid_out(const Tensor& x, Layout layout, int64_t projection) {
  const Shape& s = x.shape();
  if (layout == Layout::kDense) return x;
  if (layout == Layout::kSlices) {  // columns of one projection
    return s.size() == 3 ? x.copy(x.dtype(), {projection, s[2], 1}, 5) : x.copy(x.dtype(), {projection, 1}, 5);
  }
  if (s.size() == 3) {
    const int64_t head = s[2] + 3;
    return x.copy(x.dtype(), {s[1] * head + 7, head, 1}, 11);
  }
  return x.copy(x.dtype(), {2 * s[1] + 1, 2}, 1);  // beta: any stride >= 1 (G-8)
}

void poison_unused(const Tensor& x, const std::vector<char>& used) {
  for (size_t r = 0; r < used.size(); ++r) {
    if (!used[r]) fill(narrow(x, 0, static_cast<int64_t>(r), 1), NAN);
  }
}

}  // namespace

std::vector<int> sizes_of(const std::vector<Axis>& axes) {
  std::vector<int> sizes;
  for (const Axis& a : axes) sizes.push_back(static_cast<int>(a.values.size()));
  return sizes;
}

std::string case_name(const char* op, const std::vector<Axis>& axes, const std::vector<int>& chosen) {
  std::string name = std::string(op) + "/";
  for (size_t i = 0; i < axes.size(); ++i) {
    if (i > 0) name += ",";
    name += std::string(axes[i].name) + "=" + axes[i].values[static_cast<size_t>(chosen[i])];
  }
  return name;
}

std::vector<Axis> attention_axes(const std::vector<Heads>& heads, const std::vector<Dims>& dims) {
  return {
      {"heads", names_of(heads)},
      {"dims", names_of(dims)},
      {"io", {"fp32", "bf16", "fp16"}},
      {"gate_dtype", {"io", "fp32"}},
      {"beta_dtype", {"io", "fp32"}},
      {"family",
       {"softplus", "softplus-nobias", "bounded", "bounded-shallow", "bounded-noA", "plain", "plain-forget"}},
      {"raw", {"random", "-1000", "-8", "0", "8", "30", "1000", "mixed"}},
      {"beta", {"logits", "saturated", "plain", "negative"}},
      {"qk", {"normalised", "plain"}},
      {"layout", {"dense", "slices", "padded"}},
  };
}

AttentionChoice attention_choice(const std::vector<int>& chosen, size_t first, const std::vector<Heads>& heads,
                                 const std::vector<Dims>& dims) {
  constexpr kda_dtype kIo[] = {KDA_FP32, KDA_BF16, KDA_FP16};
  const auto at = [&](size_t i) { return static_cast<size_t>(chosen[first + i]); };
  AttentionChoice c;
  c.heads = heads[at(0)];
  c.dims = dims[at(1)];
  c.io = kIo[at(2)];
  c.fp32_gate = at(3) == 1;
  c.fp32_beta = at(4) == 1;
  c.family = static_cast<Family>(at(5));
  c.raw = static_cast<Raw>(at(6));
  c.beta = static_cast<Beta>(at(7));
  c.no_qk_norm = at(8) == 1;
  c.layout = static_cast<Layout>(at(9));
  return c;
}

Problem attention_problem(const AttentionChoice& c, int64_t rows, const std::vector<int64_t>& begins,
                          const std::vector<int64_t>& lengths) {
  const int64_t H = c.heads.H, HV = c.heads.HV, K = c.dims.K, V = c.dims.V;
  Problem p;
  p.lengths = lengths;
  p.spec.num_heads = H;
  p.spec.num_value_heads = HV;
  p.spec.key_dim = K;
  p.spec.value_dim = V;
  p.spec.io_dtype = c.io;
  p.spec.gate_dtype = c.fp32_gate ? KDA_FP32 : c.io;
  p.spec.no_qk_norm = c.no_qk_norm;
  p.spec.allow_neg_eigval = c.beta == Beta::kNegative;
  p.spec.beta_form = c.beta == Beta::kPlain ? KDA_BETA_PLAIN : KDA_BETA_LOGITS;
  p.spec.beta_dtype = c.fp32_beta || c.beta == Beta::kPlain ? KDA_FP32 : c.io;
  set_family(c, HV, K, p);

  // Without normalisation |k| <= 1 keeps the recurrence stable (S-5).
  const double qk_scale = c.no_qk_norm ? 1 / std::sqrt(static_cast<double>(K)) : 1;
  // Sums of few terms that may cancel have no relative accuracy, in any arithmetic: with few channels all values are
  // positive, and with many q leans towards k, so that q.k of a sequence's only token stays away from 0.
  const bool few = K < 16;
  const auto random = [&](uint32_t stream, int64_t count) {
    Values x = uniform_vector(stream, count);
    for (double& v : x) v = few ? std::fabs(v) + 0.1 : v;
    return x;
  };
  const Values k = random(2, rows * H * K);
  Values q = random(1, rows * H * K);
  for (size_t i = 0; i < q.size() && !few; ++i) q[i] = 0.6 * q[i] + 0.8 * k[i];
  const auto of = [&](Values x, const Shape& shape, double scale) {
    for (double& v : x) v *= scale;
    return Tensor::of(c.io, shape, x);
  };
  Values gate = raw_gate(c.raw, rows * HV * K);
  if (p.spec.gate_family == KDA_GATE_PLAIN) gate = plain_gate(std::move(gate), c.family == Family::kPlainForget);
  const int64_t projection = 2 * H * K + HV * (V + K) + HV + 3;
  p.q = laid_out(of(q, {rows, H, K}, qk_scale), c.layout, projection);
  p.k = laid_out(of(k, {rows, H, K}, qk_scale), c.layout, projection);
  p.v = laid_out(of(random(3, rows * HV * V), {rows, HV, V}, 1), c.layout, projection);
  p.gate = laid_out(Tensor::of(p.spec.gate_dtype, {rows, HV, K}, gate), c.layout, projection);
  p.beta = laid_out(beta(c, p.spec.beta_dtype, {rows, HV}), c.layout, projection);

  std::vector<char> used(static_cast<size_t>(rows), 0);
  for (size_t n = 0; n < lengths.size(); ++n) std::fill_n(used.begin() + begins[n], lengths[n], 1);
  for (const Tensor* t : {&p.q, &p.k, &p.v, &p.gate, &p.beta}) poison_unused(*t, used);
  return p;
}

}  // namespace kda::conformance

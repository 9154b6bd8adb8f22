// The comparer can fail: F07's two faults, masks, and the names that it gives.
#include "conformance/compare.h"

#include <gtest/gtest.h>

#include <cmath>

#include "conformance/api.h"
#include "conformance/distributions.h"
#include "conformance/random.h"
#include "conformance/tensor.h"

namespace kda::conformance::test {
namespace {

// Widest limit of N-9: tensor cores on degenerate inputs.
constexpr double kWidestLimit = 5e-3;

}  // namespace

TEST(Comparer, F07_RejectsOneRowOfFlippedSign) {
  const int64_t T = 4096, H = 12, V = 16;
  const std::vector<double> reference = uniform_vector(1, T * H * V);
  std::vector<double> x = reference;
  for (int64_t v = 0; v < V; ++v) x[static_cast<size_t>((4095 * H + 7) * V + v)] *= -1;
  double dot = 0;
  for (size_t i = 0; i < x.size(); ++i) dot += x[i] * reference[i];
  EXPECT_GT(dot / (norm(x) * norm(reference)), 0.9999);  // a correlation sees nothing

  const Comparison c = compare_outputs(x, reference, {T}, H, V);
  EXPECT_FALSE(c.within(kWidestLimit)) << c.text();
  EXPECT_EQ(c.head_at.head, 7);
  EXPECT_EQ(c.row_at.token, 4095);
  EXPECT_NEAR(c.worst_row, 2, 1e-12);
  EXPECT_NE(c.text().find("head 7"), std::string::npos);
}

// One 16x16 tile of M below the diagonal left out (H-1: o_i lacks scale * sum_j (q_i . k_j e^G(j,i)) u_j), with gates
// whose 32-token sums are -160, -56 and -0.03 in different channels.
TEST(Comparer, F07_RejectsAMissingTile) {
  FieldInput input;
  input.lengths = {64};
  input.heads = 1;
  input.io = KDA_FP32;
  Problem p = field_problem(input);
  p.spec.gate_family = KDA_GATE_PLAIN;
  p.spec.lower_bound = 0;
  p.A_log = p.dt_bias = Tensor();
  constexpr double kSums[3] = {-160, -56, -0.03};
  const int64_t T = 64, K = 128, V = 128;
  std::vector<double> g(static_cast<size_t>(T * K));
  for (size_t i = 0; i < g.size(); ++i) g[i] = kSums[i % static_cast<size_t>(K) % 3] / 32;
  p.gate.assign(g);
  const Outcome whole = oracle(p);
  ASSERT_EQ(whole.status, KDA_OK) << whole.message;

  // u_j from the state after each token: St_j = St_{j-1} o e^g + u_j k_j^T, so u_j = (St_j - ...) k_j / |k_j|^2.
  std::vector<std::vector<double>> states;
  for (int64_t length = 16; length <= 32; ++length) {
    Problem cut = p;
    cut.lengths = {length};
    cut.q = Tensor::of(KDA_FP32, {length, 1, K}, values(narrow(p.q, 0, 0, length)));
    cut.k = Tensor::of(KDA_FP32, {length, 1, K}, values(narrow(p.k, 0, 0, length)));
    cut.v = Tensor::of(KDA_FP32, {length, 1, V}, values(narrow(p.v, 0, 0, length)));
    cut.gate = Tensor::of(KDA_FP32, {length, 1, K}, values(narrow(p.gate, 0, 0, length)));
    cut.beta = Tensor::of(KDA_FP32, {length, 1}, values(narrow(p.beta, 0, 0, length)));
    states.push_back(oracle(cut).state.values());
  }
  const std::vector<double> q = p.q.values(), k = p.k.values();
  const auto norm_of = [](const double* x) {
    double sum = 0;
    for (int64_t i = 0; i < 128; ++i) sum += x[i] * x[i];
    return std::sqrt(sum + 1e-6);
  };
  std::vector<double> broken = whole.out.values();
  for (int64_t i = 48; i < 64; ++i) {
    for (int64_t j = 16; j < 32; ++j) {
      const double *kj = &k[static_cast<size_t>(j * K)], *qi = &q[static_cast<size_t>(i * K)];
      const double nk = norm_of(kj), nq = norm_of(qi);
      double m = 0, kk = 0;
      for (int64_t c = 0; c < K; ++c) {
        m += qi[c] / nq * kj[c] / nk * std::exp(static_cast<double>(i - j) * g[static_cast<size_t>(c)]);
        kk += kj[c] / nk * kj[c] / nk;
      }
      for (int64_t v = 0; v < V; ++v) {
        double u = 0;
        for (int64_t c = 0; c < K; ++c) {
          const auto at = static_cast<size_t>(v * K + c);
          const double before = states[static_cast<size_t>(j - 16)][at] * std::exp(g[static_cast<size_t>(c)]);
          u += (states[static_cast<size_t>(j - 15)][at] - before) * kj[c] / nk;
        }
        broken[static_cast<size_t>(i * V + v)] -= std::pow(128, -0.5) * m * u / kk;
      }
    }
  }
  const Comparison c = compare_outputs(broken, whole.out.values(), {T}, 1, V);
  EXPECT_FALSE(c.within(kWidestLimit)) << c.text();
  EXPECT_GE(c.row_at.token, 48);
}

TEST(Comparer, N09_MasksComeFirst) {
  std::vector<double> reference = {1, 2, 3, 4}, x = reference;
  EXPECT_TRUE(compare_flat(x, reference).within(0));
  x[2] = NAN;
  EXPECT_FALSE(compare_flat(x, reference).within(1e9));
  reference[2] = NAN;
  EXPECT_TRUE(compare_flat(x, reference).within(0));
  reference[1] = INFINITY;
  x[1] = -INFINITY;
  EXPECT_FALSE(compare_flat(x, reference).within(1e9));
  EXPECT_FALSE(compare_flat({0, 0, 1e-30}, {0, 0, 0}).within(1e9));  // anything against an exact zero
}

TEST(Comparer, N09_ASingleHeadMayHaveTwiceTheLimit) {
  // Head 1 is small: its error shows per head, not in the whole.
  const std::vector<double> reference = {1000, 1, 1000, 1};
  const std::vector<double> x = {1000, 1.003, 1000, 1.003};
  const Comparison c = compare_outputs(x, reference, {2}, 2, 1);
  EXPECT_LT(c.total, 1e-5);
  EXPECT_NEAR(c.worst_head, 3e-3, 1e-9);
  EXPECT_FALSE(c.within(1e-3));
  EXPECT_TRUE(c.within(2e-3));
}

}  // namespace kda::conformance::test

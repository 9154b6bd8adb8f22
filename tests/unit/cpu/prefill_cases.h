// What the field cases of the CPU prefill share: every instruction set of the machine, plain-form problems, the
// ledger.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "unit/cpu/isa_contexts.h"

namespace kda::conformance::test {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInf = std::numeric_limits<double>::infinity();

class FieldCases : public testing::TestWithParam<std::string> {
 protected:
  Outcome run(const Problem& p, kda_dtype state = KDA_FP32) const {
    PrefillOptions options;
    options.backend = "portable";
    options.state_dtype = state;
    options.context = isa_context(GetParam());
    Outcome r = prefill(p, options);
    EXPECT_EQ(r.status, KDA_OK) << r.message;
    return r;
  }
  // One lane at a time: long cases are left to the vector targets, which share the source.
  bool slow() const { return GetParam() == "portable" && isas().size() > 1; }
};

// Plain form, everything fp32: q and k used as they are, log decays and betas given.
inline Problem plain_problem(std::vector<int64_t> lengths, int64_t heads = 1, int64_t K = 128, int64_t V = 128) {
  int64_t T = 0;
  for (int64_t n : lengths) T += n;
  Problem p;
  p.spec.num_heads = p.spec.num_value_heads = heads;
  p.spec.key_dim = K;
  p.spec.value_dim = V;
  p.spec.io_dtype = p.spec.gate_dtype = p.spec.beta_dtype = KDA_FP32;
  p.spec.gate_family = KDA_GATE_PLAIN;
  p.spec.beta_form = KDA_BETA_PLAIN;
  p.spec.no_qk_norm = 1;
  p.q = Tensor::full(KDA_FP32, {T, heads, K}, 0);
  p.k = Tensor::full(KDA_FP32, {T, heads, K}, 0);
  p.v = Tensor::full(KDA_FP32, {T, heads, V}, 0);
  p.gate = Tensor::full(KDA_FP32, {T, heads, K}, 0);
  p.beta = Tensor::full(KDA_FP32, {T, heads}, 0.5);
  p.state = Tensor::full(KDA_FP32, {static_cast<int64_t>(lengths.size()), heads, V, K}, 0);
  p.lengths = std::move(lengths);
  return p;
}

// The ledger: token t is absorbed into column t mod 128.
inline Problem ledger(std::vector<int64_t> lengths, int64_t heads = 1) {
  Problem p = plain_problem(std::move(lengths), heads);
  p.spec.scale = 1;
  int64_t row = 0;
  for (int64_t length : p.lengths) {
    for (int64_t t = 0; t < length; ++t, ++row) {
      for (int64_t h = 0; h < heads; ++h) {
        p.k.set({row, h, t % 128}, 1);
        p.q.set({row, h, t % 128}, 1);
      }
    }
  }
  p.v.fill(1);
  return p;
}

inline void expect_column(const kda_tensor& state, int64_t column, double value, double tolerance = 1e-5) {
  const kda_tensor c = narrow(state, state.rank - 1, column, 1);
  for (double x : values(c)) ASSERT_NEAR(x, value, tolerance) << "column " << column;
}

inline void expect_same(const kda_tensor& a, const kda_tensor& b, const std::string& what) {
  EXPECT_TRUE(same_bits(a, b)) << what << ": " << first_difference(a, b);
}

}  // namespace kda::conformance::test

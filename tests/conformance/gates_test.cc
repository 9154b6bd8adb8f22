// Gate families, causality and illegal gates: F01..F06, E-1, E-10, H-2, H-9.
#include <cfenv>
#include <cmath>
#include <functional>

#include "harness.h"

namespace kda::conformance::test {
namespace {

void set_rows(Tensor& t, const std::function<double(int64_t token, int64_t head, int64_t channel)>& f) {
  const Shape s = t.shape();
  for (int64_t i = 0; i < s[0]; ++i) {
    for (int64_t h = 0; h < s[1]; ++h) {
      for (int64_t d = 0; d < s[2]; ++d) t.set({i, h, d}, f(i, h, d));
    }
  }
}

}  // namespace

class GatesTest : public BackendTest {
 protected:
  Outcome run(const Problem& p, uint32_t flags = 0) {
    PrefillOptions options;
    options.backend = backend();
    options.flags = flags;
    if (is_reference()) options.state_dtype = KDA_FP64;
    const Outcome r = prefill(p, options);
    EXPECT_EQ(r.status, KDA_OK) << r.message;
    return r;
  }
};
KDA_FOR_BACKENDS(GatesTest);

TEST_P(GatesTest, F01_SoftplusFarBelowTheRangeOfExp) {
  FieldInput input;
  input.lengths = {130};
  input.heads = 2;
  input.state_scale = 1;
  Problem p = field_problem(input);
  p.spec.gate_family = KDA_GATE_SOFTPLUS;
  p.spec.lower_bound = 0;
  p.A_log.assign({std::log(201.0), std::log(8.0)});
  set_rows(p.gate, [](int64_t, int64_t, int64_t d) { return d % 3 == 0 ? 13 : -6; });
  p.beta.fill(2);

  const Outcome reference = oracle(p);
  const double out_norms[] = {0.678718, 2.726644}, state_norms[] = {7.136329, 21.536614};
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_NEAR(head_norm(reference.out.values(), 2, 128, h), out_norms[h], 1e-6);
    EXPECT_NEAR(head_norm(reference.state.values(), 2, 128 * 128, h), state_norms[h], 1e-6);
  }
  EXPECT_NEAR(reference.out.get({129, 0, 0}), 2.43507e-3, 5e-9);
  EXPECT_NEAR(reference.out.get({129, 1, 0}), -2.38225e-2, 5e-8);

  const Outcome r = run(p);
  EXPECT_WITHIN(compare_outputs(r.out.values(), reference.out.values(), p.lengths, 2, 128), limits(KDA_BF16).out);
  EXPECT_WITHIN(compare_states(r.state.values(), reference.state.values(), 2, 128 * 128), limits(KDA_BF16).state);
}

// The gate alone, seen through one token with k = v = 0 and a state of ones: St = e^g.
TEST_P(GatesTest, F02_R02_BoundedGateIsAScaledSigmoid) {
  struct Case {
    double A_log, raw, bounded, softplus;  // 0: not given
  };
  const Case cases[] = {{-1, -8, -0.2731313, 0}, {-1, 1, -3.0648921, 0}, {0, -8, -0.0021528, -0.0004306},
                        {0, 0, -2.8108825, 0},   {0, 1, -3.8864993, 0},  {0, 8, -4.9986940, -8.2502612},
                        {2, -1, -0.0195210, 0},  {2, 0, -4.3190277, 0},  {2, 1, -4.9995129, 0},
                        {2, 8, 0, -60.961643}};
  for (const Case& c : cases) {
    for (const kda_gate_family family : {KDA_GATE_BOUNDED, KDA_GATE_SOFTPLUS}) {
      const double wanted = family == KDA_GATE_BOUNDED ? c.bounded : c.softplus;
      if (wanted == 0) continue;
      SCOPED_TRACE(testing::Message() << "A_log " << c.A_log << " raw " << c.raw << " family " << family);
      FieldInput input;
      input.lengths = {1};
      input.heads = 1;
      input.io = KDA_FP32;
      Problem p = field_problem(input);
      p.spec.gate_family = family;
      p.spec.lower_bound = family == KDA_GATE_BOUNDED ? -5 : 0;
      p.A_log.fill(c.A_log);
      p.gate.fill(c.raw);
      for (int64_t d = 0; d < 128; ++d) p.dt_bias.set({0, d}, d == 0 ? 0.25 : -0.5 - static_cast<double>(d) / 256);
      p.k.fill(0);
      p.v.fill(0);
      p.state = Tensor::full(KDA_FP32, {1, 1, 128, 128}, 1);
      const Outcome r = run(p);
      // Rounding e^g to fp32 moves its logarithm by 6e-8. The published numbers have seven decimals.
      const double g = std::log(r.state.get({0, 0, 0, 0}));
      EXPECT_NEAR(g, wanted, 6e-8 + 2e-6 * std::fabs(wanted) + (is_reference() ? 0 : 1.2e-7));
      const double a = std::exp(static_cast<double>(static_cast<float>(c.A_log)));
      for (int64_t d = 0; d < 128; ++d) {
        const double x = c.raw + p.dt_bias.get({0, d});
        const double exact = family == KDA_GATE_BOUNDED ? -5 / (1 + std::exp(-a * x)) : -a * std::log1p(std::exp(x));
        const double e = r.state.get({0, 0, 7, d});
        EXPECT_NEAR(std::log(e), exact, 1.5e-7 + 2e-6 * std::fabs(exact)) << "channel " << d;
      }
    }
  }
}

// log(1 + e^x) is 0 in fp32 below x = -16.6: the state would never be forgotten.
TEST_P(GatesTest, E01_SoftplusOfFarNegativeLogitsStillForgets) {
  for (const double raw : {-17.0, -20.0, -30.0, -60.0}) {
    Problem p = ledger({1}, {0}, 1);
    p.spec.gate_family = KDA_GATE_SOFTPLUS;
    p.k.fill(0);
    p.gate.fill(raw);
    const double a = std::exp(raw < -50 ? 50.0 : -raw - 4);  // g about -e^-4, or far below the range of 1 + e^x
    p.A_log = Tensor::full(KDA_FP32, {1}, std::log(a));
    p.state = Tensor::full(KDA_FP32, {1, 1, 128, 128}, 1);
    const Outcome r = run(p);
    const double a32 = std::exp(p.A_log.get({0}));
    EXPECT_NEAR(r.state.get({0, 0, 5, 5}), std::exp(-a32 * std::log1p(std::exp(raw))), 2e-7 + 2e-6 * std::exp(-4))
        << raw;
  }
}

TEST_P(GatesTest, F03_H02_NoOverflowInTheMaskedHalf) {
  if (on_device()) GTEST_SKIP() << "a device has no floating-point flags";
  for (const int64_t T : {64, 128}) {
    FieldInput input;
    input.lengths = {T};
    input.heads = 1;
    Problem p = field_problem(input);
    p.gate.fill(1000);
    p.beta.fill(0);
    p.state = Tensor::full(KDA_FP32, {1, 1, 128, 128}, 1);
    // One thread: the flags belong to a thread, and this one then runs everything.
    PrefillOptions options;
    options.backend = backend();
    options.context = cpu_context(1);
    std::feclearexcept(FE_ALL_EXCEPT);
    const Outcome r = prefill(p, options);
    const int raised = std::fetestexcept(FE_OVERFLOW | FE_INVALID | FE_DIVBYZERO);
    ASSERT_EQ(r.status, KDA_OK) << r.message;
    // sigmoid(1000) itself is 1/(1+e^-1000): no overflow either.
    EXPECT_EQ(raised, 0) << "T " << T;
    const Outcome reference = oracle(p);
    if (T == 64) {
      EXPECT_NEAR(norm(reference.out.values()), 0.190473, 5e-7);
      EXPECT_NEAR(norm(reference.state.values()), 3.225496, 5e-7);
    }
    EXPECT_WITHIN(compare_outputs(r.out.values(), reference.out.values(), {T}, 1, 128), limits(KDA_BF16).out);
    EXPECT_WITHIN(compare_states(r.state.values(), reference.state.values(), 1, 128 * 128), limits(KDA_BF16).state);
  }
}

TEST_P(GatesTest, F04_H11_SequenceBorderInsideATile) {
  const std::vector<std::vector<int64_t>> cuts = {{63, 65}, {1, 63}, {15, 18}};
  for (const auto& lengths : cuts) {
    FieldInput input;
    input.lengths = lengths;
    input.heads = 4;
    input.state_scale = 1;
    Problem p = field_problem(input);
    p.spec.gate_family = KDA_GATE_PLAIN;
    p.spec.lower_bound = 0;
    p.spec.gate_dtype = KDA_FP32;
    p.A_log = p.dt_bias = Tensor();
    p.gate = Tensor(KDA_FP32, p.gate.shape());
    set_rows(p.gate, [&](int64_t t, int64_t, int64_t) { return t < lengths[0] ? -5.0 : -0.01; });
    const Outcome both = run(p, invariant());
    for (int64_t n = 0; n < 2; ++n) {
      Problem alone = cut(p, n == 0 ? 0 : lengths[0], lengths[static_cast<size_t>(n)]);
      alone.state = state_of(p.state, n);
      const Outcome one = run(alone, invariant());
      EXPECT_EQ(first_difference(narrow(both.out, 0, n == 0 ? 0 : lengths[0], alone.tokens()), one.out), "");
      EXPECT_EQ(first_difference(narrow(both.state, 0, n, 1), one.state), "");
    }
  }
}

TEST_P(GatesTest, F05_E06_LaterTokensDoNotReachBack) {
  FieldInput input;
  input.lengths = {32};
  input.heads = 4;
  Problem all = field_problem(input);
  all.gate.fill(-0.69921875);
  all.beta.fill(1000);  // beta = 1
  all.A_log.assign({0, std::log(4.0), std::log(9.0), std::log(16.0)});
  const Problem p = cut(all, 0, 22);
  const Outcome first = run(p);

  const Outcome reference = oracle(p);
  const double at20[] = {3.231037e-3, 7.144846e-3, -1.362309e-2, 2.086213e-2};
  for (int64_t h = 0; h < 4; ++h) EXPECT_NEAR(reference.out.get({20, h, 0}), at20[h], 6e-9);
  EXPECT_NEAR(reference.out.get({21, 0, 0}), 1.960977e-3, 6e-10);
  EXPECT_WITHIN(compare_outputs(first.out.values(), reference.out.values(), {22}, 4, 128), limits(KDA_BF16).out);

  Problem changed = p;
  for (int64_t h = 0; h < 4; ++h) {
    for (int64_t d = 0; d < 128; ++d) changed.gate.set({21, h, d}, 1000);
  }
  EXPECT_NEAR(oracle(changed).out.get({21, 0, 0}), 1.567355e-3, 6e-10);
  const auto same_rows = [&](const Outcome& other, const std::string& what) {
    EXPECT_EQ(first_difference(narrow(first.out, 0, 0, 21), narrow(other.out, 0, 0, 21)), "") << what;
  };
  const Outcome second = run(changed);
  same_rows(second, "gate of token 21 changed");
  EXPECT_FALSE(same_bits(narrow(first.out, 0, 21, 1), narrow(second.out, 0, 21, 1)));
  same_rows(run(cut(all, 0, 21)), "21 tokens");
  for (int64_t T = 23; T <= 32; ++T) same_rows(run(cut(all, 0, T)), std::to_string(T) + " tokens");

  // NaN and Inf in a later token included (H-9).
  Problem poisoned = p;
  for (int64_t h = 0; h < 4; ++h) {
    poisoned.v.set({21, h, 3}, NAN);
    poisoned.k.set({21, h, 3}, INFINITY);
  }
  same_rows(run(poisoned), "NaN in token 21");
}

TEST_P(GatesTest, F06_FullForgettingAndIllegalGates) {
  const auto one_token = [&](double g0, uint32_t flags) {
    Problem p = ledger({1, 1}, {0, 1}, 2);
    p.k.fill(0);
    p.v.fill(0);
    p.state = Tensor::full(KDA_FP32, {2, 2, 128, 128}, 1);
    for (int64_t h = 0; h < 2; ++h) p.gate.set({0, h, 0}, g0);  // sequence 0 alone
    PrefillOptions options;
    options.backend = backend();
    options.flags = flags;
    return prefill(p, options);
  };
  const Outcome forgotten = one_token(-INFINITY, 0);
  ASSERT_EQ(forgotten.status, KDA_OK) << forgotten.message;
  for (int64_t v = 0; v < 128; ++v) {
    EXPECT_EQ(forgotten.state.get({0, 1, v, 0}), 0);
    EXPECT_EQ(forgotten.state.get({0, 1, v, 1}), 1);
  }
  for (const double bad : {5.0, static_cast<double>(NAN)}) {
    const Outcome checked = one_token(bad, KDA_PLAN_CHECKED);
    EXPECT_EQ(checked.status, KDA_INVALID_ARGUMENT);
    EXPECT_NE(checked.message.find("token 0, head 0, channel 0"), std::string::npos) << checked.message;
    const Outcome normal = one_token(bad, 0);
    ASSERT_EQ(normal.status, KDA_OK);
    for (int64_t i = 0; i < 128; ++i) EXPECT_EQ(normal.state.get({1, 1, i, i}), 1);  // the other sequence
    if (std::isnan(bad)) {
      EXPECT_TRUE(std::isnan(normal.state.get({0, 0, 5, 0})));
    }
  }
}

TEST_P(GatesTest, E10_MinusInfinityKeepsNaN) {
  Problem p = ledger({1}, {0}, 1);
  p.k.fill(0);
  p.state = Tensor::full(KDA_FP32, {1, 1, 128, 128}, 1);
  p.state.set({0, 0, 3, 0}, NAN);
  p.state.set({0, 0, 4, 0}, INFINITY);
  p.gate.set({0, 0, 0}, -INFINITY);
  const Outcome r = run(p);
  EXPECT_TRUE(std::isnan(r.state.get({0, 0, 3, 0})));
  EXPECT_TRUE(std::isnan(r.state.get({0, 0, 4, 0})));
  EXPECT_EQ(r.state.get({0, 0, 5, 0}), 0);
}

TEST_P(GatesTest, E05_NegativeEigenvaluesDoubleBeta) {
  FieldInput input;
  input.lengths = {33};
  input.heads = 2;
  input.beta_scale = 3;
  input.state_scale = 0.1;
  Problem p = field_problem(input);
  p.spec.allow_neg_eigval = 1;
  const Outcome reference = oracle(p), r = run(p);
  EXPECT_WITHIN(compare_outputs(r.out.values(), reference.out.values(), p.lengths, 2, 128), limits(KDA_BF16).out);
  EXPECT_WITHIN(compare_states(r.state.values(), reference.state.values(), 2, 128 * 128), limits(KDA_BF16).state);
  p.spec.allow_neg_eigval = 0;
  EXPECT_FALSE(compare_states(r.state.values(), oracle(p).state.values(), 2, 128 * 128).within(1e-2));
}

TEST_P(GatesTest, E01_NoALogMeansOneForTheBoundedFamily) {
  FieldInput input;
  input.lengths = {20};
  input.heads = 2;
  input.gate_scale = 4;
  Problem p = field_problem(input);
  const Outcome with = run(p);
  p.A_log = Tensor();
  EXPECT_EQ(first_difference(run(p).state, with.state), "");
  p.dt_bias = Tensor();  // absent = 0
  EXPECT_EQ(first_difference(run(p).state, with.state), "");
}

TEST_P(GatesTest, R61_ExtremeLogitsOfBothFamilies) {
  for (const kda_gate_family family : {KDA_GATE_BOUNDED, KDA_GATE_SOFTPLUS}) {
    for (const double raw : {-1000.0, -8.0, 0.0, 8.0, 30.0, 1000.0}) {
      for (const double beta : {-20.0, 20.0}) {
        SCOPED_TRACE(testing::Message() << "family " << family << " raw " << raw << " beta " << beta);
        FieldInput input;
        input.lengths = {33};
        input.heads = 1;
        input.io = KDA_FP32;  // a handful of outputs dominates: rounding them to bf16 would be the whole error
        input.state_scale = 1;
        Problem p = field_problem(input);
        p.spec.gate_family = family;
        p.spec.lower_bound = family == KDA_GATE_BOUNDED ? -5 : 0;
        p.gate.fill(raw);
        p.beta.fill(beta);
        const Outcome reference = oracle(p), r = run(p);
        // Both gates are flat here: what is left of the state may be far below fp32's smallest normal number, and
        // N-14 lets a backend flush that.
        const std::vector<double> wanted = reference.state.values();
        double largest = 0;
        for (double x : wanted) largest = std::max(largest, std::fabs(x));
        if (largest > 1e-30) {
          EXPECT_WITHIN(compare_states(r.state.values(), wanted, 1, 128 * 128), limits(KDA_FP32).state);
        }
        EXPECT_WITHIN(compare_outputs(r.out.values(), reference.out.values(), p.lengths, 1, 128),
                      limits(KDA_FP32).out);
      }
    }
  }
}

// exp(A_log) and the bound may pass fp32's range (E-3: any finite bound): a gate of zero stays a gate of zero.
TEST_P(GatesTest, E01_E03_ParametersBeyondTheRangeOfFp32) {
  const struct {
    kda_gate_family family;
    double lower_bound, A_log, raw;
  } cases[] = {
      {KDA_GATE_SOFTPLUS, 0, 100, -1000},   {KDA_GATE_SOFTPLUS, 0, 100, 0},    {KDA_GATE_SOFTPLUS, 0, -200, 3},
      {KDA_GATE_BOUNDED, -5, 100, 0},       {KDA_GATE_BOUNDED, -5, 100, -3},   {KDA_GATE_BOUNDED, -5, -200, 7},
      {KDA_GATE_BOUNDED, -1e300, 0, -1000}, {KDA_GATE_BOUNDED, -1e-300, 0, 0}, {KDA_GATE_BOUNDED, -1e300, 0, 0}};
  for (const auto& c : cases) {
    SCOPED_TRACE(testing::Message() << "family " << c.family << " bound " << c.lower_bound << " A_log " << c.A_log
                                    << " raw " << c.raw);
    FieldInput input;
    input.lengths = {5};
    input.heads = 2;
    input.io = KDA_FP32;
    input.state_scale = 1;
    Problem p = field_problem(input);
    p.spec.gate_family = c.family;
    p.spec.lower_bound = c.lower_bound;
    p.A_log.fill(c.A_log);
    p.gate.fill(c.raw);
    const Outcome reference = oracle(p), r = run(p);
    EXPECT_WITHIN(compare_outputs(r.out.values(), reference.out.values(), p.lengths, 2, 128), limits(KDA_FP32).out);
    EXPECT_WITHIN(compare_states(r.state.values(), reference.state.values(), 2, 128 * 128), limits(KDA_FP32).state);
    DecodeCall step(cut(p, 0, 1), backend());
    step.pool = Tensor(KDA_FP32, {1, 2, 128, 128});
    step.pool.assign(p.state.values());
    step.slots = Tensor::ints({0});
    ASSERT_EQ(step.run(), KDA_OK) << step.message;
    Problem one = cut(p, 0, 1);
    one.state = p.state;
    EXPECT_WITHIN(compare_states(step.slot(0), oracle(one).state.values(), 2, 128 * 128), limits(KDA_FP32).state);
  }
}

TEST_P(GatesTest, Z12_NoDecayKeepsTheBitsOfAnUntouchedState) {
  Problem p = ledger({100}, iota(100), 2);
  p.k.fill(0);
  p.state = Tensor(KDA_FP32, {1, 2, 128, 128});
  p.state.assign(uniform_vector(6, 2 * 128 * 128));
  PrefillOptions options;
  options.backend = backend();
  const Outcome r = prefill(p, options);
  EXPECT_EQ(first_difference(r.state, p.state), "");
}

}  // namespace kda::conformance::test

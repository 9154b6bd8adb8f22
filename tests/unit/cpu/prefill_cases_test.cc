// Field cases of the CPU prefill about numbers: gates, near-equal and large terms, dtypes, the mode bits. On every
// ISA of the machine.
#include "unit/cpu/prefill_cases.h"

#include <cfenv>
#include <cmath>

#include "conformance/compare.h"
#include "conformance/random.h"
#include "conformance/rounding.h"

namespace kda::conformance::test {

INSTANTIATE_TEST_SUITE_P(Isa, FieldCases, testing::ValuesIn(isas()), [](const auto& p) { return p.param; });

TEST_P(FieldCases, F01_SoftplusGateFarBelowTheRangeOfExp) {
  FieldInput input;
  input.lengths = {130};
  input.heads = 2;
  input.io = KDA_FP32;
  input.state_scale = 1;
  Problem p = field_problem(input);
  p.spec.gate_family = KDA_GATE_SOFTPLUS;
  p.spec.lower_bound = 0;
  p.A_log.set({0}, std::log(201.0));
  p.A_log.set({1}, std::log(8.0));
  p.beta.fill(2);
  for (int64_t t = 0; t < 130; ++t) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t k = 0; k < 128; ++k) p.gate.set({t, h, k}, k % 3 == 0 ? 13 : -6);
    }
  }
  const Outcome r = run(p);
  const auto out = r.out.values(), state = r.state.values();
  EXPECT_NEAR(head_norm(out, 2, 128, 0) / 0.678718, 1, 1e-5);
  EXPECT_NEAR(head_norm(out, 2, 128, 1) / 2.726644, 1, 1e-5);
  EXPECT_NEAR(head_norm(state, 2, 128 * 128, 0) / 7.136329, 1, 1e-5);
  EXPECT_NEAR(head_norm(state, 2, 128 * 128, 1) / 21.536614, 1, 1e-5);
  EXPECT_NEAR(r.out.get({129, 0, 0}) / 2.43507e-3, 1, 1e-4);
  EXPECT_NEAR(r.out.get({129, 1, 0}) / -2.38225e-2, 1, 1e-4);
}

TEST_P(FieldCases, F03_NoExceptionIsRaised) {
  for (int64_t T : {64, 128}) {
    FieldInput input;
    input.lengths = {T};
    input.heads = 1;
    input.io = KDA_FP32;
    input.state_scale = 1;
    Problem p = field_problem(input);
    p.gate.fill(1000);
    p.beta.fill(0);
    p.state.fill(1);
    // One thread, this one: its exception flags are what is looked at.
    PrefillOptions options;
    options.backend = "portable";
    options.context = isa_context(GetParam(), 1);
    std::feclearexcept(FE_ALL_EXCEPT);
    const Outcome r = prefill(p, options);
    EXPECT_EQ(std::fetestexcept(FE_OVERFLOW | FE_INVALID | FE_DIVBYZERO), 0);
    ASSERT_EQ(r.status, KDA_OK) << r.message;
    if (T != 64) continue;
    EXPECT_NEAR(norm(r.out.values()) / 0.190473, 1, 1e-5);
    EXPECT_NEAR(norm(r.state.values()) / 3.225496, 1, 1e-5);
  }
}

TEST_P(FieldCases, F06_IllegalAndExtremeGates) {
  Problem p = plain_problem({1, 1});
  p.state.fill(1);
  const Outcome clean = run(p);
  expect_same(clean.state, p.state, "g = 0");
  for (double g : {-kInf, 5.0, kNaN}) {
    p.gate.set({0, 0, 0}, g);
    const Outcome r = run(p);
    if (g == -kInf) {
      expect_column(select(r.state, 0, 0), 0, 0, 0);
      for (int64_t k = 1; k < 128; ++k) expect_column(select(r.state, 0, 0), k, 1, 0);
    }
    expect_same(narrow(r.state, 0, 1, 1), narrow(clean.state, 0, 1, 1), "the other sequence");
    expect_same(narrow(r.out, 0, 1, 1), narrow(clean.out, 0, 1, 1), "the other sequence's output");
    if (std::isnan(g)) {
      for (double x : values(narrow(select(r.state, 0, 0), 2, 0, 1))) EXPECT_TRUE(std::isnan(x));
    }
  }
}

TEST_P(FieldCases, F08_RepeatedKeys) {
  for (int64_t T : {16, 64, 16384}) {
    if (slow() && T > 64) continue;
    FieldInput input;
    input.lengths = {T};
    input.heads = 1;
    input.io = KDA_FP32;
    Problem p = field_problem(input);
    p.q.fill(1);
    p.k.fill(1);
    p.gate.fill(-12);
    p.beta.fill(8);
    for (int64_t t = 0; t < T; ++t) fill(narrow(p.v, 0, t, 1), (static_cast<double>(t % 16) - 7.5) / 8);
    const Outcome r = run(p);
    EXPECT_NEAR(r.out.get({0, 0, 5}) / -0.0828363, 1, 1e-4);
    EXPECT_NEAR(r.out.get({7, 0, 5}) / -0.00552798, 1, 1e-3);
    EXPECT_NEAR(r.out.get({T - 1, 0, 5}) / 0.0828604, 1, 1e-4);
    for (double x : r.state.values()) ASSERT_NEAR(x / 0.0828604, 1, 1e-3);
  }
}

TEST_P(FieldCases, F09_LowerMatrixWithRowSum40) {
  Problem p = plain_problem({64});
  p.spec.scale = 1;
  for (int64_t t = 0; t < 64; ++t) {
    for (Tensor* x : {&p.q, &p.k}) {
      x->set({t, 0, t}, 0.60546875);
      x->set({t, 0, 127}, 0.796875);
    }
  }
  p.v.fill(1);
  p.beta.fill(1);
  const Outcome r = run(p);
  const double expected[] = {0.6054688, 0.2209902, 0.0806593, 0.0294398};
  for (int64_t k = 0; k < 4; ++k) expect_column(r.state, k, expected[k], 1e-6);
  expect_column(r.state, 63, 0, 1e-6);
  expect_column(r.state, 127, 1.2549020, 1e-6);
  for (double x : values(narrow(r.out, 0, 63, 1))) EXPECT_NEAR(x, 1.000, 1e-3);
}

TEST_P(FieldCases, F11_SmallDifferenceOfLargeNumbers) {
  for (double beta : {0.5, 0.25}) {
    Problem p = plain_problem({1});
    p.state.set({0, 0, 0, 5}, 4098);
    p.k.set({0, 0, 5}, 1);
    p.v.set({0, 0, 0}, 4096);
    p.beta.fill(beta);
    EXPECT_NEAR(run(p).state.get({0, 0, 0, 5}), beta == 0.5 ? 4097.0 : 4097.5, 0.01);
  }
}

TEST_P(FieldCases, F12_ThePoolsDtypeDecides) {
  Problem p = plain_problem({64});
  p.spec.io_dtype = KDA_BF16;
  p.state.set({0, 0, 0, 0}, 1);
  for (int64_t t = 0; t < 64; ++t) {
    p.k.set({t, 0, 0}, 1);
    p.v.set({t, 0, 0}, 1.0078125);
  }
  p.beta.fill(0x1p-6);
  for (Tensor Problem::*m : {&Problem::q, &Problem::k, &Problem::v}) p.*m = (p.*m).copy(KDA_BF16);
  EXPECT_NEAR(run(p).state.get({0, 0, 0, 0}), 1.0049610, 1e-4);
  EXPECT_EQ(run(p, KDA_BF16).state.get({0, 0, 0, 0}), 1.0078125);
  // 64 calls of one token: a bf16 pool never leaves 1.
  Problem one = plain_problem({1});
  one.spec.io_dtype = KDA_BF16;
  one.k.set({0, 0, 0}, 1);
  one.v.set({0, 0, 0}, 1.0078125);
  one.beta.fill(0x1p-6);
  for (Tensor Problem::*m : {&Problem::q, &Problem::k, &Problem::v}) one.*m = (one.*m).copy(KDA_BF16);
  for (kda_dtype pool : {KDA_FP32, KDA_BF16}) {
    one.state = p.state;
    for (int i = 0; i < 64; ++i) one.state = run(one, pool).state.copy(KDA_FP32);
    if (pool == KDA_FP32) EXPECT_NEAR(one.state.get({0, 0, 0, 0}), 1.0049610, 1e-4);
    else EXPECT_EQ(one.state.get({0, 0, 0, 0}), 1.0);
  }
}

TEST_P(FieldCases, F17_LastValidRowOfATail) {
  for (int64_t T : {1, 15, 17, 63, 65, 127, 129, 500, 1000, 1500}) {
    Problem p = plain_problem({T}, 1, 24, 20);
    p.state.fill(1);
    p.gate.fill(-1.0 / 128);
    const double expected = std::exp(-static_cast<double>(T) / 128);
    for (double x : run(p).state.values()) ASSERT_NEAR(x / expected, 1, 1e-5) << "T = " << T;
  }
}

TEST_P(FieldCases, F31_SlowDecayOverALongSequence) {
  const int64_t T = slow() ? 4096 : 65536;
  Problem p = plain_problem({T}, 1, 16, 16);
  p.gate.fill(-1e-6);
  p.state.assign(uniform_vector(6, 256));
  const Outcome r = run(p);
  const double kept = std::exp(-static_cast<double>(static_cast<float>(1e-6)) * static_cast<double>(T));
  const auto before = p.state.values(), after = r.state.values();
  for (size_t i = 0; i < before.size(); ++i) ASSERT_NEAR(after[i], kept * before[i], 1e-5 * std::abs(before[i]));
}

TEST_P(FieldCases, N14_TheModeBitsAreRestored) {
  PrefillOptions options;
  options.backend = "portable";
  options.context = isa_context(GetParam(), 1);
  (void)prefill(ledger({20}), options);
  volatile float least = std::numeric_limits<float>::min();
  EXPECT_GT(least / 2, 0.0f) << "denormals are flushed after the call";
}

}  // namespace kda::conformance::test

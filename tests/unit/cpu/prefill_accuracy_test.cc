// CPU prefill against the fp64 oracle within spec N-9, on every ISA: the distributions D1..D11, dtypes, head sizes,
// gate families, lengths.
#include <gtest/gtest.h>

#include "conformance/compare.h"
#include "unit/cpu/isa_contexts.h"

namespace kda::conformance::test {
namespace {

struct Limits {
  double out, state;
};
// N-9, fp32 arithmetic.
constexpr Limits kFp32Regular{1e-5, 1e-5}, kFp32Degenerate{1e-4, 2e-4};
constexpr Limits kBf16Regular{1.8e-3, 1e-5}, kBf16Degenerate{2.5e-3, 2e-4};

void expect_close(const Problem& p, const Outcome& expected, const Outcome& got, Limits limits,
                  const std::string& what) {
  ASSERT_EQ(expected.status, KDA_OK) << expected.message;
  ASSERT_EQ(got.status, KDA_OK) << got.message;
  const int64_t heads = p.v.shape()[1], V = p.spec.value_dim, K = p.spec.key_dim;
  const Comparison out = compare_outputs(got.out.values(), expected.out.values(), p.lengths, heads, V);
  const Comparison state = compare_states(got.state.values(), expected.state.values(), heads, V * K);
  EXPECT_TRUE(out.within(limits.out)) << what << ", out: " << out.text();
  EXPECT_TRUE(state.within(limits.state)) << what << ", state: " << state.text();
}

Outcome portable(const Problem& p, const std::string& isa, kda_dtype state = KDA_FP32) {
  PrefillOptions options;
  options.backend = "portable";
  options.state_dtype = state;
  options.context = isa_context(isa);
  return prefill(p, options);
}

}  // namespace

class Distributions : public testing::TestWithParam<Distribution> {};

TEST_P(Distributions, N09_WithinTheLimitsOfFp32Arithmetic) {
  const Distribution& d = GetParam();
  for (kda_dtype io : {KDA_FP32, KDA_BF16}) {
    const Problem p = distribution(d.number, GateForm::kPlain, io);
    const Outcome expected = oracle(p);
    const Limits limits = io == KDA_FP32 ? d.degenerate ? kFp32Degenerate : kFp32Regular
                          : d.degenerate ? kBf16Degenerate
                                         : kBf16Regular;
    for (const std::string& isa : isas()) {
      if (isa == "portable" && (d.number > 8 || io == KDA_BF16)) continue;  // one lane: kept short
      expect_close(p, expected, portable(p, isa), limits, isa + (io == KDA_FP32 ? " fp32 io" : " bf16 io"));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(D, Distributions, testing::ValuesIn(kDistributions),
                         [](const auto& p) { return std::to_string(p.param.number); });

TEST(Prefill, N09_OneRepeatedKeyWithoutDecay) {
  Problem p = distribution(9, GateForm::kPlain, KDA_FP32);
  p.gate.fill(0);
  const Outcome expected = oracle(p);
  for (const std::string& isa : isas()) {
    if (isa != "portable") expect_close(p, expected, portable(p, isa), kFp32Degenerate, isa + " D9, g = 0");
  }
}

TEST(Prefill, N09_RawGatesOfTheSoftplusFamily) {
  for (int number : {4, 5, 6, 7}) {
    const Problem p = distribution(number, GateForm::kRaw, KDA_FP32);
    const Outcome expected = oracle(p);
    for (const std::string& isa : isas()) {
      if (isa != "portable")
        expect_close(p, expected, portable(p, isa), kFp32Regular, isa + " raw D" + std::to_string(number));
    }
  }
}

// Every io, gate, beta and pool dtype in turn in one process, with grouped heads (F38).
TEST(Prefill, F38_TypesOfThisCall) {
  FieldInput input;
  input.lengths = {37, 1, 64};
  input.heads = 2;
  input.value_heads = 6;
  input.key_dim = 48;
  input.value_dim = 72;
  input.gate_scale = 4;
  input.beta_scale = 3;
  input.state_scale = 1;
  const struct {
    kda_dtype io, gate, beta, pool;
    double out, state;
  } cases[] = {
      {KDA_FP32, KDA_FP32, KDA_FP32, KDA_FP32, 1e-5, 1e-5},
      {KDA_BF16, KDA_BF16, KDA_FP32, KDA_FP32, 1.8e-3, 1e-5},
      {KDA_FP16, KDA_FP32, KDA_FP16, KDA_FP32, 2.3e-4, 1e-5},
      {KDA_BF16, KDA_FP32, KDA_BF16, KDA_BF16, 1.8e-3, 1.81e-3},
      {KDA_FP16, KDA_FP16, KDA_FP16, KDA_FP16, 2.3e-4, 2.4e-4},
      {KDA_FP32, KDA_FP32, KDA_FP32, KDA_BF16, 1e-5, 1.81e-3},
  };
  for (const auto& c : cases) {
    input.io = c.io;
    Problem p = field_problem(input);
    p.spec.allow_neg_eigval = c.pool == KDA_BF16;
    p.gate = p.gate.copy(c.gate);
    p.spec.gate_dtype = c.gate;
    p.beta = p.beta.copy(c.beta);
    p.spec.beta_dtype = c.beta;
    p.state = p.state.copy(c.pool).copy(KDA_FP32);
    const Outcome expected = oracle(p);
    for (const std::string& isa : isas()) {
      expect_close(p, expected, portable(p, isa, c.pool), {c.out, c.state}, isa + " mixed types");
    }
  }
}

}  // namespace kda::conformance::test

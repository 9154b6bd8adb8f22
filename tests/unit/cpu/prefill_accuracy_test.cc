// CPU prefill against the fp64 oracle within spec N-9, on every ISA: the distributions D1..D11, dtypes, head sizes,
// gate families, lengths.
#include <gtest/gtest.h>

#include "support/compare.h"
#include "unit/cpu/isa_contexts.h"

namespace kda::test {
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
  if (testing::Test::HasFailure()) return;
  std::printf("  %-40s out %.2e state %.2e\n", what.c_str(), out.total, state.total);
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

}  // namespace kda::test

// Decode against the fp64 oracle on the distributions of N-10 (limits of N-9), with the whole sequence as one row of
// store = final: every token goes through the one-token recurrence.
#include <gtest/gtest.h>

#include <map>

#include "conformance/api.h"
#include "conformance/compare.h"
#include "conformance/distributions.h"
#include "conformance/tensor.h"
#include "unit/cpu/isa_contexts.h"

namespace kda::conformance::test {
namespace {

class DecodeAccuracy : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Isa, DecodeAccuracy, testing::ValuesIn(isas()), [](const auto& test) { return test.param; });

// The oracle's results do not depend on the ISA or the io dtype (the inputs are bf16 values in both).
const Outcome& reference_of(int number) {
  static std::map<int, Outcome> outcomes;
  const auto found = outcomes.find(number);
  if (found != outcomes.end()) return found->second;
  return outcomes[number] = oracle(distribution(number, GateForm::kPlain));
}

void check_distribution(const std::string& isa, const Distribution& d, kda_dtype io, GateForm form) {
  SCOPED_TRACE(testing::Message() << "D" << d.number << (io == KDA_BF16 ? " bf16" : " fp32"));
  const Problem p = distribution(d.number, form, io);
  const Outcome& reference = reference_of(d.number);
  ASSERT_EQ(reference.status, KDA_OK) << reference.message;
  kda_decode_desc desc = decode_desc(p, "portable");
  desc.store = KDA_STORE_FINAL;
  desc.initial_state = p.state.present() ? KDA_INITIAL_ALL : KDA_INITIAL_NONE;
  const int64_t HV = p.spec.num_value_heads ? p.spec.num_value_heads : p.spec.num_heads;
  const Tensor state = p.state.present() ? p.state.copy(KDA_FP32) : Tensor(KDA_FP32, {1, HV, 128, 128});
  const Tensor out(io, {p.tokens(), HV, 128}), offsets = Tensor::ints(p.offsets());
  kda_decode_args args = decode_args(p);
  args.sequences.cu_seqlens = offsets;
  args.state = state;
  args.out = out;
  Plan plan = make_plan(desc, isa_context(isa));
  ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  const double limit = io == KDA_FP32 ? (d.degenerate ? 1e-4 : 1e-5) : (d.degenerate ? 2.5e-3 : 1.8e-3);
  const Comparison o = compare_outputs(out.values(), reference.out.values(), p.lengths, HV, 128);
  const Comparison s = compare_states(state.values(), reference.state.values(), HV, 128 * 128);
  EXPECT_TRUE(o.within(limit)) << o.text();
  EXPECT_TRUE(s.within(d.degenerate ? 2e-4 : 1e-5)) << s.text();
}

TEST_P(DecodeAccuracy, N09_RegularDistributions) {
  for (const Distribution& d : kDistributions) {
    if (d.degenerate) continue;
    check_distribution(GetParam(), d, KDA_FP32, GateForm::kPlain);
    check_distribution(GetParam(), d, KDA_BF16, d.number <= 2 ? GateForm::kPlain : GateForm::kRaw);
  }
}

TEST_P(DecodeAccuracy, N09_DegenerateDistributions) {
  for (const Distribution& d : kDistributions) {
    if (d.degenerate && (d.number > 9 || GetParam() == isas().front())) {
      check_distribution(GetParam(), d, KDA_BF16, GateForm::kPlain);
    }
  }
}

}  // namespace
}  // namespace kda::conformance::test

// D1..D11 of N-10 within the limits of N-9, in both gate forms and with bf16 and fp32 io.
#include <functional>
#include <map>

#include "harness.h"

namespace kda::conformance::test {

class DistributionsTest : public BackendTest {};
KDA_FOR_BACKENDS(DistributionsTest);

namespace {

// The same for every backend, io dtype and form.
const Outcome& oracle_of(int number) {
  static std::map<int, Outcome> known;
  const auto [it, missing] = known.try_emplace(number);
  if (missing) it->second = oracle(distribution(number, GateForm::kPlain));
  return it->second;
}

using LimitOf = std::function<Limits(kda_dtype io, bool degenerate)>;

void check(const std::string& backend, const Distribution& d, const LimitOf& limit_of) {
  const bool own_form = d.number <= 2;
  const Outcome& reference = oracle_of(d.number);
  ASSERT_EQ(reference.status, KDA_OK) << reference.message;
  for (const kda_dtype io : {KDA_BF16, KDA_FP32}) {
    for (const GateForm form : {GateForm::kPlain, GateForm::kRaw}) {
      if (form == GateForm::kRaw && own_form) continue;
      // The oracle against itself: one run shows its roundings (its raw form is held to the same norms elsewhere).
      if (backend == "reference" && (form == GateForm::kRaw || io == KDA_FP32)) continue;
      SCOPED_TRACE(testing::Message() << "D" << d.number << (io == KDA_BF16 ? " bf16" : " fp32")
                                      << (form == GateForm::kRaw ? " raw" : ""));
      const Problem p = distribution(d.number, form, io);
      PrefillOptions options;
      options.backend = backend.c_str();
      const Outcome r = prefill(p, options);
      ASSERT_EQ(r.status, KDA_OK) << r.message;
      const Limits limit = limit_of(io, d.degenerate);
      const int64_t HV = p.spec.num_value_heads;
      EXPECT_WITHIN(compare_outputs(r.out.values(), reference.out.values(), p.lengths, HV, 128), limit.out);
      EXPECT_WITHIN(compare_states(r.state.values(), reference.state.values(), HV, 128 * 128), limit.state);
    }
  }
}

}  // namespace

TEST_P(DistributionsTest, N09_H01_H03_N03_N04_N05_Regular) {
  for (const Distribution& d : kDistributions) {
    if (!d.degenerate) check(backend(), d, [&](kda_dtype io, bool degenerate) { return limits(io, degenerate); });
  }
}

TEST_P(DistributionsTest, N09_H01_N03_N05_Degenerate) {
  for (const Distribution& d : kDistributions) {
    if (d.degenerate) check(backend(), d, [&](kda_dtype io, bool degenerate) { return limits(io, degenerate); });
  }
}

}  // namespace kda::conformance::test

// One token by hand and the edge cases of the operators on their own: E-7, P-4, Z-4, Z-10, Z-11, R-51.
#include <cmath>

#include "harness.h"

namespace kda::conformance::test {

class EdgesTest : public BackendTest {};
KDA_FOR_BACKENDS(EdgesTest);

TEST_P(EdgesTest, E07_OneTokenByHand) {
  // St = [[1,2],[3,4]] decays by (1/2, 1/4): [[.5,.5],[1.5,1]]. u = .5 ((2,4) - (.5,1.5)) = (.75,1.25) goes to
  // column 0: [[1.25,.5],[2.75,1]]. The output sees that: q = (1,1) gives (1.75, 3.75).
  Problem p = ledger({1}, {0}, 1, 2);
  p.q.fill(1);
  p.v = Tensor::of(KDA_BF16, {1, 1, 2}, {2, 4});
  p.gate = Tensor::of(KDA_FP32, {1, 1, 2}, {std::log(0.5), std::log(0.25)});
  p.state = Tensor::of(KDA_FP32, {1, 1, 2, 2}, {1, 2, 3, 4});
  const double state[] = {1.25, 0.5, 2.75, 1};
  PrefillCall prompt(p, backend());
  prompt.use_pool(1, {0});
  prompt.desc.initial_state = KDA_INITIAL_ALL;
  DecodeCall step(p, backend());
  step.pool = canary_pool(KDA_FP32, {1, 1, 2, 2});
  assign(step.pool, p.state.values());
  step.slots = Tensor::ints({0});
  ASSERT_EQ(prompt.run(), KDA_OK) << prompt.message;
  ASSERT_EQ(step.run(), KDA_OK) << step.message;
  EXPECT_EQ(prompt.out.values(), (std::vector<double>{1.75, 3.75}));
  EXPECT_EQ(step.out.values(), (std::vector<double>{1.75, 3.75}));
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(prompt.slot(0)[i], state[i], 1e-6) << i;
    EXPECT_NEAR(step.slot(0)[i], state[i], 1e-6) << i;
  }
}

TEST_P(EdgesTest, P04_PackedStatesAreSlotsInOrder) {
  FieldInput input;
  input.lengths = {5, 0, 70};
  input.heads = 2;
  input.beta_scale = 3;
  input.state_scale = 1;
  const Problem p = field_problem(input);
  PrefillCall packed(p, backend()), pool(p, backend());
  packed.desc.initial_state = KDA_INITIAL_ALL;
  packed.final_state = Tensor(KDA_FP32, {3, 2, 128, 128});
  pool.use_pool(3, {0, 1, 2});
  pool.desc.initial_state = KDA_INITIAL_ALL;
  ASSERT_EQ(packed.run(), KDA_OK) << packed.message;
  ASSERT_EQ(pool.run(), KDA_OK) << pool.message;
  EXPECT_EQ(first_difference(packed.out, pool.out), "");
  EXPECT_EQ(first_difference(packed.final_state, pool.pool), "");
}

TEST_P(EdgesTest, Z04_OnlyInactiveRows) {
  PrefillCall call(ledger({3, 66}, iota(69), 2), backend());
  call.use_pool(3, {-1, 7});
  const Snapshot before(call.pool);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.pool), "");
  for (const double x : call.out.values()) ASSERT_EQ(x, 0);
}

TEST_P(EdgesTest, Z10_ZeroKeysAndZeroQueries) {
  Problem p = ledger({70}, iota(70), 1);
  p.spec.no_qk_norm = 0;  // normalising a zero row gives zero, not NaN
  p.k.fill(0);
  for (int64_t d = 0; d < 128; ++d) p.q.set({3, 0, d}, 0);
  p.state = Tensor::of(KDA_FP32, {1, 1, 128, 128}, uniform_vector(6, 128 * 128));
  PrefillOptions options;
  options.backend = backend();
  const Outcome r = prefill(p, options);
  ASSERT_EQ(r.status, KDA_OK) << r.message;
  EXPECT_EQ(first_difference(r.state, p.state), "");
  for (const double x : rows(r.out, 3, 1)) ASSERT_EQ(x, 0);
  for (const double x : rows(r.out, 4, 1)) ASSERT_TRUE(std::isfinite(x) && x != 0);
}

TEST_P(EdgesTest, Z11_BetaOfExactlyZeroAndOne) {
  for (const double logit : {-1000.0, 1000.0}) {
    Problem p = ledger({1}, {9}, 1);
    p.spec.beta_form = KDA_BETA_LOGITS;
    p.beta.fill(logit);
    p.state = Tensor::full(KDA_FP32, {1, 1, 128, 128}, 0.25);
    PrefillOptions options;
    options.backend = backend();
    const Outcome r = prefill(p, options);
    ASSERT_EQ(r.status, KDA_OK) << r.message;
    for (int64_t v : {0, 127}) {
      EXPECT_EQ(r.state.get({0, 0, v, 9}), logit < 0 ? 0.25 : 1);
      EXPECT_EQ(r.state.get({0, 0, v, 8}), 0.25);
    }
  }
}

// Choosing another candidate converts nothing: each goes on from the other's pool.
TEST(Candidates, R51_APoolIsTheSameForEachOfThem) {
  FieldInput input;
  input.lengths = {100};
  input.heads = 2;
  input.beta_scale = 3;
  input.io = KDA_FP32;
  const Problem all = field_problem(input);
  const Outcome reference = oracle(all);
  for (const auto& [first, second] : {std::pair{"reference", "portable"}, std::pair{"portable", "reference"}}) {
    PrefillCall begin(cut(all, 0, 70), first), rest(cut(all, 70, 30), second);
    begin.use_pool(2, {1});
    ASSERT_EQ(begin.run(), KDA_OK) << begin.message;
    rest.pool = begin.pool;
    rest.slots = Tensor::ints({1});
    rest.desc.initial_state = KDA_INITIAL_ALL;
    ASSERT_EQ(rest.run(), KDA_OK) << rest.message;
    EXPECT_WITHIN(compare_states(rest.slot(1), reference.state.values(), 2, 128 * 128), 1e-5);
  }
}

}  // namespace kda::conformance::test

// Triangular solves on hard keys and where values are rounded: F08..F13, N-1..N-4.
#include <cmath>

#include "harness.h"

namespace kda::conformance::test {

class RoundingTest : public BackendTest {
 protected:
  Outcome run(const Problem& p, kda_dtype state_dtype = KDA_DTYPE_NONE) {
    PrefillOptions options;
    options.backend = backend();
    options.state_dtype = state_dtype;
    const Outcome r = prefill(p, options);
    EXPECT_EQ(r.status, KDA_OK) << r.message;
    return r;
  }
  void expect_close(const Outcome& r, const Outcome& reference, const Problem& p, const Limits& limit) {
    const int64_t HV = p.spec.num_value_heads, V = p.spec.value_dim;
    EXPECT_WITHIN(compare_outputs(r.out.values(), reference.out.values(), p.lengths, HV, V), limit.out);
    EXPECT_WITHIN(compare_states(r.state.values(), reference.state.values(), HV, V * p.spec.key_dim), limit.state);
  }
};
KDA_FOR_BACKENDS(RoundingTest);

TEST_P(RoundingTest, F08_H08_RepeatedKeys) {
  for (const int64_t T : {16, 64, 16384}) {
    FieldInput input;
    input.lengths = {T};
    input.heads = 1;
    input.io = KDA_FP32;
    Problem p = field_problem(input);
    p.q.fill(1);
    p.k.fill(1);
    p.gate.fill(-12);
    p.beta.fill(8);
    std::vector<double> v(static_cast<size_t>(T * 128));
    for (size_t i = 0; i < v.size(); ++i) v[i] = (static_cast<double>(i / 128 % 16) - 7.5) / 8;
    p.v.assign(v);
    const Outcome reference = oracle(p), r = run(p);
    EXPECT_NEAR(reference.out.get({0, 0, 5}), -0.0828363, 5e-8);
    EXPECT_NEAR(reference.out.get({7, 0, 5}), -0.00552798, 5e-9);
    EXPECT_NEAR(reference.out.get({T - 1, 0, 5}), 0.0828604, 6e-8);
    EXPECT_NEAR(reference.state.get({0, 0, 9, 77}), 0.0828604, 6e-8);
    expect_close(r, reference, p, limits(KDA_FP32, true));
  }
}

TEST_P(RoundingTest, F09_H08_E04_LowerMatrixWithRowSum40) {
  for (const bool normalised : {false, true}) {
    Problem p = ledger({64}, iota(64), 1);
    p.spec.no_qk_norm = !normalised;
    for (int64_t t = 0; t < 64; ++t) {
      p.k.set({t, 0, t}, 0.60546875);
      p.k.set({t, 0, 127}, 0.796875);
    }
    p.q = p.k;
    p.beta.fill(1);
    const Outcome reference = oracle(p), r = run(p);
    const double given[2][5] = {{0.6054688, 0.2209902, 0.0806593, 0.0294398, 1.2549020},
                                {0.604984, 0.221428, 0.081044, 0.029663, 1.255907}};
    const double* wanted = given[normalised];
    for (int64_t c = 0; c < 4; ++c) EXPECT_NEAR(reference.state.get({0, 0, 3, c}), wanted[c], 6e-7);
    EXPECT_LT(std::fabs(reference.state.get({0, 0, 3, 63})), 1e-6);
    EXPECT_NEAR(reference.state.get({0, 0, 3, 127}), wanted[4], 6e-7);
    EXPECT_NEAR(reference.out.get({63, 0, 3}), 1.0, 5e-4);
    expect_close(r, reference, p, limits(KDA_BF16, true));
  }
}

TEST_P(RoundingTest, F11_SmallDifferenceOfLargeNumbers) {
  if (takes_tensor_cores(KDA_BF16)) GTEST_SKIP() << "N-6: to its own bound on fp32 paths only";
  for (const double beta : {0.5, 0.25}) {
    Problem p = ledger({1}, {5}, 1);
    p.v.fill(0);
    p.v.set({0, 0, 0}, 4096);
    p.beta.fill(beta);
    p.state = Tensor::full(KDA_FP32, {1, 1, 128, 128}, 0);
    p.state.set({0, 0, 0, 5}, 4098);
    const Outcome r = run(p);
    EXPECT_NEAR(r.state.get({0, 0, 0, 5}), beta == 0.5 ? 4097.0 : 4097.5, 0.01);
  }
}

TEST_P(RoundingTest, F12_N01_ThePoolsDtypeDecides) {
  const auto chain = [&](int64_t calls, int64_t tokens, kda_dtype pool, bool raw) {
    Problem p = ledger({tokens}, std::vector<int64_t>(static_cast<size_t>(tokens), 0), 1);
    p.v.fill(0);
    for (int64_t t = 0; t < tokens; ++t) p.v.set({t, 0, 0}, 1.0078125);
    p.beta.fill(0.015625);
    if (raw) {  // the raw form alone: beta as a logit, keys normalised
      p.spec.beta_form = KDA_BETA_LOGITS;
      p.spec.no_qk_norm = 0;
      p.beta.fill(-4.15625);
    }
    Tensor state = Tensor::full(pool, {1, 1, 128, 128}, 0);
    state.set({0, 0, 0, 0}, 1);
    for (int64_t c = 0; c < calls; ++c) {
      p.state = state;
      state = run(p, pool).state;
    }
    return state.get({0, 0, 0, 0});
  };
  EXPECT_NEAR(chain(1, 1, KDA_FP32, false), 1.0001220703125, 1.2e-7);
  EXPECT_NEAR(chain(1, 64, KDA_FP32, false), 1.0049610, 1e-4);
  EXPECT_NEAR(chain(64, 1, KDA_FP32, false), 1.0049610, 1e-4);
  EXPECT_EQ(chain(1, 64, KDA_BF16, false), 1.0078125);  // one rounding, at the end of the call
  EXPECT_EQ(chain(64, 1, KDA_BF16, false), 1.0);
  EXPECT_NEAR(chain(1, 64, KDA_FP32, true), 1.0049236, takes_tensor_cores(KDA_BF16) ? limits(KDA_BF16).state : 1e-5);
  EXPECT_EQ(chain(1, 64, KDA_BF16, true), 1.0078125);
}

TEST_P(RoundingTest, F12_OneRoundingOfTheFp32State) {
  FieldInput input;
  input.lengths = {70};
  input.heads = 2;
  input.state_scale = 1;
  input.beta_scale = 3;
  const Problem p = field_problem(input);
  for (const kda_dtype pool : {KDA_BF16, KDA_FP16}) {
    Problem q = p;
    q.state = p.state.copy(pool).copy(KDA_FP32);  // initial values that both pools hold exactly
    const Outcome wide = run(q, is_reference() ? KDA_FP64 : KDA_FP32), narrow_pool = run(q, pool);
    // The narrow result is the wide one rounded once: bit for bit.
    EXPECT_EQ(first_difference(narrow_pool.state, wide.state.copy(pool)), "");
    EXPECT_EQ(first_difference(narrow_pool.out, wide.out), "");
  }
}

TEST_P(RoundingTest, F13_CuttingAPrompt) {
  FieldInput input;
  input.lengths = {4096};
  input.heads = 4;
  input.gate_scale = 4;
  input.beta_scale = 3;
  input.io = KDA_FP32;
  const Problem p = field_problem(input);
  const Outcome reference = oracle(p);
  const double state_norms[] = {6.139464, 2.266581, 2.789367, 4.746525};
  const double out_norms[] = {2.050551, 2.110841, 2.106733, 2.132000};
  for (int64_t h = 0; h < 4; ++h) {
    EXPECT_NEAR(head_norm(reference.state.values(), 4, 128 * 128, h), state_norms[h], 1e-6);
    EXPECT_NEAR(head_norm(reference.out.values(), 4, 128, h), out_norms[h], 1e-6);
  }

  const auto in_pieces = [&](const std::vector<int64_t>& pieces, kda_dtype pool) {
    Outcome r;
    Tensor state = Tensor::full(pool, {1, 4, 128, 128}, 0);
    std::vector<double> out;
    int64_t begin = 0;
    for (int64_t n : pieces) {
      Problem piece = cut(p, begin, n);
      piece.state = state;
      PrefillOptions options;
      options.backend = backend();
      options.state_dtype = pool;
      // With a narrow pool no bits are promised; N-13 speaks of fp32 pools.
      options.flags = pool == exact_pool() ? invariant() : 0;
      const Outcome part = prefill(piece, options);
      EXPECT_EQ(part.status, KDA_OK) << part.message;
      state = part.state;
      const std::vector<double> o = part.out.values();
      out.insert(out.end(), o.begin(), o.end());
      begin += n;
    }
    r.state = state;
    r.out = Tensor::of(KDA_FP32, {4096, 4, 128}, out);
    return r;
  };

  const Outcome whole = in_pieces({4096}, exact_pool());
  const double whole_error = compare_states(whole.state.values(), reference.state.values(), 4, 128 * 128).total;
  const std::vector<std::vector<int64_t>> cuts = {
      {2048, 2048}, {1, 4095}, {63, 65, 3968}, std::vector<int64_t>(256, 16)};
  for (const auto& pieces : cuts) {
    const Outcome r = in_pieces(pieces, exact_pool());
    expect_close(r, reference, p, limits(KDA_FP32));
    if (pieces[0] == 2048 || is_reference()) {  // cuts at multiples of 64 keep the bits
      EXPECT_EQ(first_difference(r.out, whole.out), "");
      EXPECT_EQ(first_difference(r.state, whole.state), "");
    } else {
      const double error = compare_states(r.state.values(), reference.state.values(), 4, 128 * 128).total;
      // No run worse than twice the whole one, and 1e-7 for runs that are exact to fp32 anyway.
      EXPECT_LE(error, 2 * whole_error + 1e-7);
    }
  }
  // A bf16 pool pays one rounding a call.
  const Outcome narrow_pool = in_pieces({2048, 2048}, KDA_BF16);
  EXPECT_WITHIN(compare_states(narrow_pool.state.values(), reference.state.values(), 4, 128 * 128),
                limits(KDA_FP32).state + 2 * pool_rounding(KDA_BF16));
}

class DecodeRoundingTest : public DecodeBackendTest {};
KDA_FOR_BACKENDS(DecodeRoundingTest);

TEST_P(DecodeRoundingTest, F10_BetaKeepsFp32) {
  Problem p = ledger({1}, {0}, 1);
  p.spec.beta_form = KDA_BETA_LOGITS;
  p.beta.fill(0.5);
  DecodeCall call(p, backend());
  call.pool = Tensor::full(KDA_FP32, {1, 1, 128, 128}, 0);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_NEAR(call.pool.get({0, 0, 0, 0}), 0.6224593, 1e-6);
}

TEST_P(DecodeRoundingTest, F10_LongForm) {
  // 8192 steps over 32 fixed keys in turn; few value rows keep it short.
  const int64_t steps = 8192, K = 128, V = 8;
  Problem all = ledger({steps}, iota(steps), 1, K);
  all.spec.value_dim = V;
  all.spec.no_qk_norm = 0;
  all.spec.beta_form = KDA_BETA_LOGITS;
  all.v = Tensor::of(KDA_BF16, {steps, 1, V}, uniform_vector(3, steps * V));
  const std::vector<double> keys = uniform_vector(2, 32 * K);
  std::vector<double> k(static_cast<size_t>(steps * K));
  for (size_t i = 0; i < k.size(); ++i) k[i] = keys[i % keys.size()];
  all.k.assign(k);
  all.q.assign(k);
  all.gate.fill(-1e-4);
  std::vector<double> logits = uniform_vector(5, steps);
  for (double& x : logits) x *= 3;
  all.beta.assign(logits);
  const Outcome reference = oracle(all);

  Tensor state = Tensor::full(is_reference() ? KDA_FP64 : KDA_FP32, {1, 1, V, K}, 0);
  DecodeCall call(cut(all, 0, 1), backend());
  call.desc.attention.state_dtype = state.dtype();
  Plan plan = make_plan(call.desc);
  call.pool = state;
  for (int64_t t = 0; t < steps; ++t) {
    kda_decode_args a = call.args();
    a.q = narrow(all.q, 0, t, 1);
    a.k = narrow(all.k, 0, t, 1);
    a.v = narrow(all.v, 0, t, 1);
    a.gate = narrow(all.gate, 0, t, 1);
    a.beta = narrow(all.beta, 0, t, 1);
    ASSERT_EQ(plan.run(a), KDA_OK) << plan.message();
  }
  EXPECT_WITHIN(compare_states(call.pool.values(), reference.state.values(), 1, V * K), 1e-5);
}

TEST_P(DecodeRoundingTest, F11_SmallDifferenceOfLargeNumbers) {
  for (const double beta : {0.5, 0.25}) {
    Problem p = ledger({1}, {5}, 1);
    p.v.fill(0);
    p.v.set({0, 0, 0}, 4096);
    p.beta.fill(beta);
    DecodeCall call(p, backend());
    call.pool = Tensor::full(KDA_FP32, {1, 1, 128, 128}, 0);
    call.pool.set({0, 0, 0, 5}, 4098);
    ASSERT_EQ(call.run(), KDA_OK) << call.message;
    EXPECT_NEAR(call.pool.get({0, 0, 0, 5}), beta == 0.5 ? 4097.0 : 4097.5, 0.01);
  }
}

TEST_P(DecodeRoundingTest, F12_N01_ThePoolsDtypeDecides) {
  for (const kda_dtype pool : {KDA_FP32, KDA_BF16}) {
    Problem p = ledger({1}, {0}, 1);
    p.v.fill(0);
    p.v.set({0, 0, 0}, 1.0078125);
    p.beta.fill(0.015625);
    DecodeCall call(p, backend());
    call.desc.attention.state_dtype = pool;
    call.pool = Tensor::full(pool, {1, 1, 128, 128}, 0);
    call.pool.set({0, 0, 0, 0}, 1);
    for (int i = 0; i < 64; ++i) ASSERT_EQ(call.run(), KDA_OK) << call.message;
    // fp32 follows the recurrence; in bf16 each step's increment rounds away.
    EXPECT_NEAR(call.pool.get({0, 0, 0, 0}), pool == KDA_FP32 ? 1.0049610 : 1.0, pool == KDA_FP32 ? 1e-4 : 0);
  }
}

}  // namespace kda::conformance::test

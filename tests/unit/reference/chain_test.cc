// Where the oracle rounds and where it does not (E-11, L-7), and what it declines.
#include <gtest/gtest.h>

#include <cmath>

#include "conformance/api.h"
#include "conformance/compare.h"
#include "conformance/distributions.h"
#include "conformance/random.h"
#include "conformance/rounding.h"
#include "conformance/tensor.h"

namespace kda::conformance::test {

TEST(Oracle, E11_Fp64StatesChainWithoutRounding) {
  FieldInput input;
  input.lengths = {50};
  input.heads = 2;
  input.value_heads = 4;
  input.gate_scale = 4;
  input.beta_scale = 3;
  const Problem p = field_problem(input);
  const Outcome whole = oracle(p);
  // One token at a time through decode with fp64 states: the same bits as one prefill.
  Tensor state = Tensor::full(KDA_FP64, {1, 4, 128, 128}, 0);
  kda_decode_desc desc = decode_desc(p, "reference");
  desc.attention.state_dtype = desc.attention.out_dtype = KDA_FP64;
  desc.flags = KDA_PLAN_BATCH_INVARIANT;  // with fp64 states it can promise that
  Plan plan = make_plan(desc);
  for (int64_t t = 0; t < 50; ++t) {
    const Tensor out(KDA_FP64, {1, 4, 128}), offsets = Tensor::ints({0, 1});
    kda_decode_args a = decode_args(p);
    a.q = narrow(p.q, 0, t, 1);
    a.k = narrow(p.k, 0, t, 1);
    a.v = narrow(p.v, 0, t, 1);
    a.gate = narrow(p.gate, 0, t, 1);
    a.beta = narrow(p.beta, 0, t, 1);
    a.sequences.cu_seqlens = offsets;
    a.state = state;
    a.out = out;
    ASSERT_EQ(plan.run(a), KDA_OK) << plan.message();
    EXPECT_EQ(first_difference(out, narrow(whole.out, 0, t, 1)), "");
  }
  EXPECT_EQ(first_difference(state, whole.state), "");
}

TEST(Oracle, N02_N04_StoredResultsAreTheFp64OnesRoundedOnce) {
  FieldInput input;
  input.lengths = {9, 4};
  input.heads = 2;
  input.state_scale = 1;
  const Problem p = field_problem(input);
  const Outcome wide = oracle(p);
  for (const kda_dtype pool : {KDA_FP32, KDA_BF16, KDA_FP16}) {
    Problem q = p;
    q.state = p.state.copy(pool).copy(KDA_FP32);
    PrefillOptions options;
    options.state_dtype = pool;
    const Outcome narrow_states = prefill(q, options);
    ASSERT_EQ(narrow_states.status, KDA_OK) << narrow_states.message;
    const Outcome exact = oracle(q);
    EXPECT_EQ(first_difference(narrow_states.state, exact.state.copy(pool)), "");
    EXPECT_EQ(first_difference(narrow_states.out, exact.out.copy(KDA_BF16)), "");
  }
}

TEST(Oracle, L07_DecodeStepRoundsAfterConvAndAttentionOnly) {
  const int64_t H = 2, K = 128, C = 3 * H * K, T = 3;
  Problem p;
  p.spec.num_heads = p.spec.num_value_heads = H;
  p.spec.key_dim = p.spec.value_dim = K;
  p.spec.io_dtype = p.spec.gate_dtype = p.spec.beta_dtype = KDA_BF16;
  p.spec.state_dtype = KDA_FP64;
  p.spec.gate_family = KDA_GATE_SOFTPLUS;
  kda_decode_step_desc d;
  kda_decode_step_desc_init(&d);
  d.decode.attention = p.spec;
  d.decode.attention.out_dtype = KDA_FP64;
  d.decode.backend = "reference";
  d.decode.max_tokens = T;
  d.decode.max_sequences = 1;
  d.decode.store = KDA_STORE_FINAL;
  d.conv_width = 4;
  d.conv_parts = 1;
  d.conv_layout = KDA_CONV_DS;
  const auto tensor = [](kda_dtype dtype, uint32_t stream, Shape shape) {
    return Tensor::of(dtype, shape, uniform_vector(stream, product(shape)));
  };
  const Tensor x = tensor(KDA_BF16, 1, {T, C}), gate = tensor(KDA_BF16, 4, {T, H, K}),
               beta = tensor(KDA_BF16, 5, {T, H});
  const Tensor z = tensor(KDA_BF16, 6, {T, H, K}), taps = tensor(KDA_FP32, 7, {C, 4}),
               weight = tensor(KDA_FP32, 8, {K});
  const Tensor A_log = Tensor::full(KDA_FP32, {H}, 0.5), offsets = Tensor::ints({0, T});
  const Tensor state = Tensor::full(KDA_FP64, {1, H, K, K}, 0), out(KDA_FP64, {T, H, K});
  Tensor window = Tensor::full(KDA_BF16, {1, C, 3}, 0);
  auto a = sized<kda_decode_step_args>();
  a.decode = sized<kda_decode_args>();
  a.decode.gate = gate;
  a.decode.beta = beta;
  a.decode.A_log = A_log;
  a.decode.sequences.cu_seqlens = offsets;
  a.decode.state = state;
  a.decode.out = out;
  a.x[0] = x;
  a.conv_weight[0] = taps;
  a.conv_state[0] = window;
  a.z = z;
  a.norm_weight = weight;
  Plan plan = make_plan(d);
  ASSERT_EQ(plan.run(a), KDA_OK) << plan.message();
  // The window ends with the last W-1 inputs, as for a prefill (W-2): the row stores its final state only.
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(window.get({0, 17, i}), x.get({i, 17}));

  // By hand: conv in fp64, rounded; attention in fp64, rounded; norm in fp64, not rounded.
  std::vector<double> qkv(static_cast<size_t>(T * C));
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t c = 0; c < C; ++c) {
      double sum = 0;
      for (int64_t j = 0; j < 4; ++j) sum += t - 3 + j >= 0 ? taps.get({c, j}) * x.get({t - 3 + j, c}) : 0;
      qkv[static_cast<size_t>(t * C + c)] = round_to(KDA_BF16, sum / (1 + std::exp(-sum)));
    }
  }
  const Tensor rows = Tensor::of(KDA_BF16, {T, C}, qkv);
  p.lengths = {T};
  p.q = Tensor::of(KDA_BF16, {T, H, K}, values(narrow(rows, 1, 0, H * K)));
  p.k = Tensor::of(KDA_BF16, {T, H, K}, values(narrow(rows, 1, H * K, H * K)));
  p.v = Tensor::of(KDA_BF16, {T, H, K}, values(narrow(rows, 1, 2 * H * K, H * K)));
  p.gate = gate;
  p.beta = beta;
  p.A_log = A_log;
  const Outcome attention = oracle(p);
  ASSERT_EQ(attention.status, KDA_OK) << attention.message;
  EXPECT_EQ(first_difference(attention.state, state), "");
  const std::vector<double> o = rounded(KDA_BF16, attention.out.values()), gates = z.values(), w = weight.values();
  std::vector<double> wanted(o.size());
  for (size_t row = 0; row < o.size(); row += 128) {
    double sum = 0;
    for (size_t v = 0; v < 128; ++v) sum += o[row + v] * o[row + v];
    for (size_t v = 0; v < 128; ++v) {
      wanted[row + v] = o[row + v] / std::sqrt(sum / 128 + 1e-5) * w[v] / (1 + std::exp(-gates[row + v]));
    }
  }
  EXPECT_TRUE(compare_flat(out.values(), wanted).within(1e-15)) << compare_flat(out.values(), wanted).text();
}

TEST(Oracle, N13_DeclinesBatchInvarianceWithRoundedStates) {
  const Problem p = field_problem({{4}, 1});
  kda_prefill_desc d = prefill_desc(p, "reference");
  d.flags = KDA_PLAN_BATCH_INVARIANT;
  const Plan plan = make_plan(d);
  EXPECT_EQ(plan.status(), KDA_UNSUPPORTED);
  EXPECT_NE(plan.message().find("batch_invariant"), std::string::npos) << plan.message();
}

// Norms that the field cases give for inputs of the CUDA section: the oracle agrees with them too.
TEST(Oracle, F65_NormsWithBetaByChunk) {
  for (const int64_t chunk : {16, 64}) {
    FieldInput input;
    input.lengths = {257};
    input.heads = 1;
    input.state_scale = 1;
    Problem p = field_problem(input);
    p.spec.gate_family = KDA_GATE_PLAIN;
    p.spec.lower_bound = 0;
    p.spec.gate_dtype = KDA_FP32;
    p.gate = Tensor::full(KDA_FP32, {257, 1, 128}, -0.01);
    p.A_log = p.dt_bias = Tensor();
    for (int64_t t = 0; t < 257; ++t) p.beta.set({t, 0}, t / chunk % 2 ? 1000 : -1000);
    const Outcome r = oracle(p);
    EXPECT_NEAR(norm(r.state.values()), chunk == 16 ? 32.036381 : 36.616205, 5e-6);
    EXPECT_NEAR(norm(r.out.values()), chunk == 16 ? 5.064238 : 5.049568, 5e-6);
  }
}

TEST(Oracle, F31_SlowDecayOver65536Tokens) {
  FieldInput input;
  input.lengths = {65536};
  input.heads = 1;
  input.value_dim = 2;
  input.key_dim = 8;
  input.state_scale = 1;
  Problem p = field_problem(input);
  p.spec.gate_family = KDA_GATE_PLAIN;
  p.spec.lower_bound = 0;
  p.spec.gate_dtype = KDA_FP32;
  p.gate = Tensor::full(KDA_FP32, {65536, 1, 8}, -1e-6);
  p.A_log = p.dt_bias = Tensor();
  p.k.fill(0);
  p.v.fill(0);
  const std::vector<double> before = p.state.values(), after = oracle(p).state.values();
  for (size_t i = 0; i < before.size(); ++i) EXPECT_NEAR(after[i] / before[i], 0.9365653, 1e-7);
}

}  // namespace kda::conformance::test

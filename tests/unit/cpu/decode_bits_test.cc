// What the bits of decode, conv and gated norm may not depend on: threads, the rest of the batch, the form in which
// sequences are given (N-12, N-13, G-8); and what a run leaves as it was (N-14).
#include <gtest/gtest.h>

#include <cmath>

#include "conformance/random.h"
#include "unit/cpu/isa_contexts.h"

namespace kda::conformance::test {
namespace {

class DecodeBits : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Isa, DecodeBits, testing::ValuesIn(isas()), [](const auto& test) { return test.param; });

constexpr int64_t kRows = 5;

// One-token decode of rows [first, first + count) of the same five requests; state rows stand where they always do.
struct Decoded {
  Tensor out, state;
};
Decoded decode(const std::string& isa, int threads, int64_t first, int64_t count, kda_dtype pool = KDA_FP32) {
  const Problem p = field_problem({std::vector<int64_t>(kRows, 1), 2, 4, 100, 80, KDA_BF16, 4, 3, 1});
  kda_decode_desc d = decode_desc(p, "portable");
  d.attention.state_dtype = pool;
  d.flags = KDA_PLAN_BATCH_INVARIANT;
  kda_decode_args args = decode_args(p);
  for (kda_tensor* t : {&args.q, &args.k, &args.v, &args.gate, &args.beta}) *t = narrow(*t, 0, first, count);
  std::vector<int64_t> offsets, slots;
  for (int64_t n = 0; n <= count; ++n) offsets.push_back(n);
  for (int64_t n = 0; n < count; ++n) slots.push_back(first + n);
  const Tensor cu = Tensor::ints(offsets), ids = Tensor::ints(slots);
  Decoded r{Tensor(KDA_BF16, {count, 4, 80}), p.state.copy(pool)};
  args.sequences.cu_seqlens = cu;
  args.slots = ids;
  args.state = r.state;
  args.out = r.out;
  Plan plan = make_plan(d, isa_context(isa, threads));
  EXPECT_EQ(plan.run(args), KDA_OK) << plan.message();
  return r;
}

TEST_P(DecodeBits, N12_ThreadsChangeNothing) {
  for (kda_dtype pool : {KDA_FP32, KDA_BF16, KDA_FP16}) {
    const Decoded one = decode(GetParam(), 1, 0, kRows, pool);
    for (int threads : {2, 3, 16, 64}) {  // more threads than heads: value rows are divided too
      const Decoded many = decode(GetParam(), threads, 0, kRows, pool);
      EXPECT_EQ(first_difference(many.out, one.out), "") << threads;
      EXPECT_EQ(first_difference(many.state, one.state), "") << threads;
    }
  }
}

TEST_P(DecodeBits, N13_TheRestOfTheBatchChangesNothing) {
  const Decoded all = decode(GetParam(), 2, 0, kRows);
  for (int64_t n = 0; n < kRows; ++n) {
    const Decoded alone = decode(GetParam(), 2, n, 1);
    EXPECT_EQ(first_difference(select(alone.out.view(), 0, 0), select(all.out.view(), 0, n)), "") << n;
    EXPECT_EQ(first_difference(select(alone.state.view(), 0, n), select(all.state.view(), 0, n)), "") << n;
  }
}

// A batched [B, T, ...] call without offsets is B sequences of T rows.
TEST_P(DecodeBits, G08_BatchedFormEqualsOffsets) {
  constexpr int64_t B = 3, T = 2;
  const Problem p = field_problem({{T, T, T}, 2, 2, 24, 20, KDA_FP32, 4, 3, 1});
  kda_decode_desc d = decode_desc(p, "portable");
  d.store = KDA_STORE_FINAL;
  const Tensor offsets = Tensor::ints(p.offsets());
  const auto run = [&](bool batched) {
    kda_decode_args args = decode_args(p);
    Decoded r{Tensor(KDA_FP32, {B * T, 2, 20}), p.state};
    args.out = r.out;
    args.state = r.state;
    if (batched) {
      for (kda_tensor* t : {&args.q, &args.k, &args.v, &args.gate, &args.beta, &args.out}) {
        Shape shape(t->shape, t->shape + t->rank);
        shape[0] = T;
        shape.insert(shape.begin(), B);
        *t = reshape(*t, shape);
      }
    } else {
      args.sequences.cu_seqlens = offsets;
    }
    Plan plan = make_plan(d, isa_context(GetParam()));
    EXPECT_EQ(plan.run(args), KDA_OK) << plan.message();
    return r;
  };
  const Decoded flat = run(false), batched = run(true);
  EXPECT_EQ(first_difference(batched.out, flat.out), "");
  EXPECT_EQ(first_difference(batched.state, flat.state), "");
}

TEST_P(DecodeBits, G08_BatchedConvAndNorm) {
  constexpr int64_t B = 2, T = 70, C = 40, H = 5, V = 8;
  const Tensor x = Tensor::of(KDA_FP32, {B, T, C}, uniform_vector(1, B * T * C));
  const Tensor w = Tensor::of(KDA_FP32, {C, 4}, uniform_vector(2, C * 4));
  const Tensor norm_w = Tensor::of(KDA_FP32, {V}, uniform_vector(3, V));
  const auto run = [&](bool batched) {
    const Tensor conv_out(KDA_FP32, {B, T, C}), norm_out(KDA_FP32, {B, T, H, V});
    kda_conv_desc d;
    kda_conv_desc_init(&d);
    d.backend = "portable";
    d.mode = KDA_CONV_PREFILL;
    d.width = 4;
    d.layout = KDA_CONV_SD;
    d.channels[0] = C;
    d.io_dtype = KDA_FP32;
    d.max_tokens = B * T;
    d.max_sequences = B;
    auto args = sized<kda_conv_args>();
    const Tensor cu = Tensor::ints({0, T, 2 * T});
    args.x[0] = batched ? x.view() : reshape(x, {B * T, C});
    args.out[0] = batched ? conv_out.view() : reshape(conv_out, {B * T, C});
    args.weight[0] = w;
    if (!batched) args.sequences.cu_seqlens = cu;
    Plan conv = make_plan(d, isa_context(GetParam(), batched ? 3 : 1));
    EXPECT_EQ(conv.run(args), KDA_OK) << conv.message();

    auto norm_desc = sized<kda_gated_norm_desc>();
    norm_desc.backend = "portable";
    norm_desc.num_value_heads = H;
    norm_desc.value_dim = V;
    norm_desc.io_dtype = KDA_FP32;
    norm_desc.max_tokens = B * T;
    auto norm_args = sized<kda_gated_norm_args>();
    const Shape shape = batched ? Shape{B, T, H, V} : Shape{B * T, H, V};
    norm_args.o = reshape(conv_out, shape);
    norm_args.z = reshape(x, shape);
    norm_args.weight = norm_w;
    norm_args.out = reshape(norm_out, shape);
    Plan norm = make_plan(norm_desc, isa_context(GetParam(), batched ? 3 : 1));
    EXPECT_EQ(norm.run(norm_args), KDA_OK) << norm.message();
    return std::make_pair(conv_out, norm_out);
  };
  const auto flat = run(false), batched = run(true);
  EXPECT_EQ(first_difference(batched.first, flat.first), "");
  EXPECT_EQ(first_difference(batched.second, flat.second), "");
}

TEST_P(DecodeBits, N14_DenormalsAndModeBits) {
  volatile float tiny = 1e-40f;
  (void)decode(GetParam(), 1, 0, 1);
  EXPECT_NE(tiny * 1.0f, 0.0f);  // the caller's thread still keeps denormals
}

TEST_P(DecodeBits, F06_IllegalGatesStayInTheirRow) {
  // Plain form, one token: -inf forgets a channel exactly, NaN poisons its own row and head only.
  constexpr int64_t K = 4, V = 3;
  const double inf = HUGE_VAL;
  kda_decode_desc d;
  kda_decode_desc_init(&d);
  d.backend = "portable";
  d.attention.num_heads = 1;
  d.attention.key_dim = K, d.attention.value_dim = V;
  d.attention.io_dtype = KDA_FP32;
  d.attention.gate_family = KDA_GATE_PLAIN;
  d.max_tokens = d.max_sequences = 2;
  const Tensor zero = Tensor::full(KDA_FP32, {2, 1, K}, 0), v = Tensor::full(KDA_FP32, {2, 1, V}, 0);
  const Tensor gate = Tensor::of(KDA_FP32, {2, 1, K}, {-inf, 0, -1, -0.0, NAN, 0, 0, 0});
  const Tensor beta = Tensor::full(KDA_FP32, {2, 1}, 0), state = Tensor::full(KDA_FP32, {2, 1, V, K}, 1);
  const Tensor cu = Tensor::ints({0, 1, 2}), out(KDA_FP32, {2, 1, V});
  auto args = sized<kda_decode_args>();
  args.q = zero, args.k = zero, args.v = v, args.gate = gate, args.beta = beta;
  args.sequences.cu_seqlens = cu;
  args.state = state;
  args.out = out;
  Plan plan = make_plan(d, isa_context(GetParam()));
  ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  for (int64_t row = 0; row < V; ++row) {
    EXPECT_EQ(state.get({0, 0, row, 0}), 0);
    EXPECT_EQ(state.get({0, 0, row, 1}), 1);
    EXPECT_NEAR(state.get({0, 0, row, 2}), std::exp(-1.0), 1e-7);
    EXPECT_EQ(state.get({0, 0, row, 3}), 1);
    EXPECT_TRUE(std::isnan(state.get({1, 0, row, 0})));
    EXPECT_EQ(out.get({0, 0, row}), 0);
    EXPECT_TRUE(std::isnan(out.get({1, 0, row})));
  }
}

}  // namespace
}  // namespace kda::conformance::test

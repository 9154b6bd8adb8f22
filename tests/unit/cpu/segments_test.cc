// Segment maps on the CPU (S-1..S-9): summaries and merges against the fp64 oracle and against the unsplit prefill.
#include <gtest/gtest.h>

#include <cmath>

#include "conformance/compare.h"
#include "unit/cpu/isa_contexts.h"

namespace kda::conformance::test {
namespace {

Problem problem(std::vector<int64_t> lengths, int64_t K, int64_t V) {
  FieldInput input;
  input.lengths = std::move(lengths);
  input.heads = 2;
  input.value_heads = 4;
  input.key_dim = K;
  input.value_dim = V;
  input.io = KDA_FP32;
  input.gate_scale = 8;
  input.beta_scale = 3;
  Problem p = field_problem(input);
  p.A_log.set({1}, 1);  // heads that forget at different speeds
  p.A_log.set({2}, -2);
  for (int64_t k = 0; k < K; ++k) p.dt_bias.set({3, k}, -8);
  return p;
}

class Segments : public testing::TestWithParam<std::string> {
 protected:
  Tensor summary(const Problem& p, const char* backend, int threads = 2, Shape strides = {}) const {
    const int64_t N = p.sequences(), K = p.spec.key_dim, V = p.spec.value_dim, HV = p.spec.num_value_heads;
    Plan plan = make_summary_plan(prefill_desc(p, backend), isa_context(GetParam(), threads));
    Tensor result(KDA_FP32, {N, HV, V + K, K}, std::move(strides));
    const Tensor cu = Tensor::ints(p.offsets());
    auto args = sized<kda_segment_summary_args>();
    args.k = p.k;
    args.v = p.v;
    args.gate = p.gate;
    args.beta = p.beta;
    args.A_log = p.A_log;
    args.dt_bias = p.dt_bias;
    args.sequences.cu_seqlens = cu;
    args.summary = result;
    EXPECT_EQ(plan.run(args), KDA_OK) << plan.message();
    EXPECT_EQ(result.guard_report(), "");
    return result;
  }
};

struct Merged {
  Tensor starts, final;
};
Merged merge(const std::string& isa, const Tensor& summaries, int64_t V, const Tensor& initial, const Tensor& present,
             const char* backend = "portable", int threads = 2) {
  const int64_t P = summaries.shape()[0], HV = summaries.shape()[1], K = summaries.shape()[3];
  auto d = sized<kda_segment_merge_desc>();
  d.backend = backend;
  d.num_value_heads = HV;
  d.key_dim = K;
  d.value_dim = V;
  d.max_segments = P;
  Plan plan = make_plan(d, isa_context(isa, threads));
  Merged r{Tensor(KDA_FP32, {P, HV, V, K}, {HV * V * K + 7, V * K, K, 1}), Tensor(KDA_FP32, {HV, V, K})};
  auto args = sized<kda_segment_merge_args>();
  args.initial_state = initial;
  args.summaries = summaries;
  args.present = present;
  args.start_states = r.starts;
  args.final_state = r.final;
  EXPECT_EQ(plan.run(args), KDA_OK) << plan.message();
  EXPECT_EQ(r.starts.guard_report(), "");
  return r;
}

Tensor random_state(int64_t HV, int64_t V, int64_t K) {
  FieldInput input;
  input.lengths = {1};
  input.heads = HV;
  input.key_dim = K;
  input.value_dim = V;
  input.state_scale = 1;
  const Tensor state = field_problem(input).state;
  return Tensor::of(KDA_FP32, {HV, V, K}, state.values());
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Isa, Segments, testing::ValuesIn(isas()), [](const auto& p) { return p.param; });

TEST_P(Segments, S02_S03_SummariesAgreeWithTheOracle) {
  const int64_t sizes[][2] = {{128, 128}, {40, 27}, {1, 1}, {33, 70}};
  for (const auto& [K, V] : sizes) {
    const Problem p = problem({70, 1, 0, 33}, K, V);
    const Tensor got = summary(p, "portable"), expected = summary(p, "reference");
    const Comparison c = compare_states(got.values(), expected.values(), 4, (V + K) * K);
    EXPECT_TRUE(c.within(1e-5)) << K << " x " << V << ": " << c.text();
  }
}

TEST_P(Segments, S04_AnEmptySegmentIsTheIdentity) {
  const int64_t K = 40, V = 27;
  const Tensor s = summary(problem({0, 5}, K, V), "portable");
  for (int64_t h = 0; h < 4; ++h) {
    for (int64_t row = 0; row < V + K; ++row) {
      for (int64_t k = 0; k < K; ++k) ASSERT_EQ(s.get({0, h, row, k}), row - V == k ? 1 : 0);
    }
  }
}

TEST_P(Segments, S09_ThreadsBlocksAndStridesChangeNoBit) {
  const int64_t K = 40, V = 70;
  const Problem p = problem({50, 17}, K, V);
  const Tensor one = summary(p, "portable", 1), more = summary(p, "portable", 16);
  EXPECT_TRUE(same_bits(one, more)) << first_difference(one, more);
  const Tensor strided = summary(p, "portable", 2, {4 * 110 * 40 + 333, 110 * 40, 40, 1});
  EXPECT_TRUE(same_bits(one, strided)) << first_difference(one, strided);
  const Tensor start = random_state(4, V, K);
  const Merged a = merge(GetParam(), one, V, start, {}, "portable", 1);
  const Merged b = merge(GetParam(), one, V, start, {}, "portable", 3);
  EXPECT_TRUE(same_bits(a.final, b.final));
  EXPECT_TRUE(same_bits(a.starts, b.starts));
}

TEST_P(Segments, S09_MergedSegmentsEqualTheUnsplitPrompt) {
  const int64_t sizes[][2] = {{128, 128}, {37, 50}};
  for (const auto& [K, V] : sizes) {
    const std::vector<int64_t> cuts = {64, 1, 0, 127, 30};
    Problem whole = problem({222}, K, V);
    const Tensor start = random_state(4, V, K);
    whole.state = Tensor::of(KDA_FP32, {1, 4, V, K}, start.values());
    PrefillOptions options;
    options.backend = "portable";
    options.context = isa_context(GetParam());
    const Outcome unsplit = prefill(whole, options);
    Problem parts = whole;
    parts.lengths = cuts;
    parts.state = Tensor();
    const Merged merged = merge(GetParam(), summary(parts, "portable"), V, start, {});
    const Comparison c = compare_states(merged.final.values(), unsplit.state.values(), 4, V * K);
    EXPECT_TRUE(c.within(1e-5)) << c.text();
    // Every segment from its merged start state gives the unsplit outputs.
    parts.state = merged.starts;
    const Outcome split = prefill(parts, options);
    const Comparison o = compare_outputs(split.out.values(), unsplit.out.values(), {222}, 4, V);
    EXPECT_TRUE(o.within(1e-5)) << o.text();
  }
}

TEST_P(Segments, S09_AbsentSegmentsAreTheIdentityAndNotRead) {
  const int64_t K = 40, V = 27;
  const Tensor all = summary(problem({20, 30, 10}, K, V), "portable");
  Tensor holed = Tensor::of(KDA_FP32, all.shape(), all.values());
  fill(select(holed, 0, 1), std::nan(""));
  const Tensor start = random_state(4, V, K);
  const Merged got = merge(GetParam(), holed, V, start, Tensor::flags({1, 0, 1}));
  const Merged expected = merge(GetParam(), holed, V, start, Tensor::flags({1, 0, 1}), "reference");
  const Comparison c = compare_states(got.final.values(), expected.final.values(), 4, V * K);
  EXPECT_TRUE(c.within(1e-6)) << c.text();
  EXPECT_TRUE(same_bits(select(got.starts, 0, 0), start)) << "segment 0 starts from the initial state";
  EXPECT_TRUE(same_bits(select(got.starts, 0, 1), select(got.starts, 0, 2)));
  // No initial state: zero, so the first start is zero and the second is B.
  const Merged fresh = merge(GetParam(), all, V, {}, {});
  for (double x : values(select(fresh.starts, 0, 0))) ASSERT_EQ(x, 0);
  EXPECT_TRUE(same_bits(select(fresh.starts, 0, 1), narrow(select(all, 0, 0), 1, 0, V)));
}

}  // namespace kda::conformance::test

// Segment maps: S-1..S-5, S-9, F64's slow decay, and the summary's confinement.
#include <cmath>

#include "harness.h"

namespace kda::conformance::test {

class SegmentsTest : public BackendTest {
 protected:
  void SetUp() override {
    kda_prefill_desc d = prefill_desc(field_problem({{1}, 1}), "auto");
    require(KDA_OP_SEGMENT_SUMMARY, &d);
    const kda_segment_merge_desc m = merge_desc(1, 8, 8, 1);
    if (!IsSkipped()) require(KDA_OP_SEGMENT_MERGE, &m);
  }
  kda_segment_merge_desc merge_desc(int64_t HV, int64_t K, int64_t V, int64_t P) const {
    auto d = sized<kda_segment_merge_desc>();
    d.backend = backend();
    d.num_value_heads = HV;
    d.key_dim = K;
    d.value_dim = V;
    d.max_segments = P;
    return d;
  }
  // What a state that went through summaries and a merge may differ by (S-7).
  double state_limit(const Problem& p, bool degenerate = false) const {
    const bool fits = p.spec.key_dim == 128 && p.spec.value_dim == 128;
    return fits && takes_tensor_cores(p.spec.io_dtype) ? limits(p.spec.io_dtype, degenerate).state
                                                       : test::limits(KDA_FP32, degenerate).state;
  }
  // Summaries [N, HV, V+K, K] of a packed problem's sequences.
  Tensor summarise(const Problem& p) {
    const kda_attention_spec& a = p.spec;
    return summarise(p, Tensor(KDA_FP32, {p.sequences(), a.num_value_heads, a.value_dim + a.key_dim, a.key_dim}));
  }
  Tensor summarise(const Problem& p, Tensor summary) {
    const Tensor offsets = Tensor::ints(p.offsets());
    auto args = sized<kda_segment_summary_args>();
    args.k = p.k;
    args.v = p.v;
    args.gate = p.gate;
    args.beta = p.beta;
    args.A_log = p.A_log;
    args.dt_bias = p.dt_bias;
    args.sequences.cu_seqlens = offsets;
    args.summary = summary;
    Plan plan = make_summary_plan(prefill_desc(p, backend()));
    EXPECT_EQ(plan.run(args), KDA_OK) << plan.message();
    EXPECT_EQ(summary.guard_report(), "");
    return summary;
  }
  struct Merged {
    Tensor starts, final;
  };
  Merged merge(const Tensor& initial, const Tensor& summaries, const std::vector<int64_t>& present = {}) {
    const Shape s = summaries.shape();
    const int64_t P = s[0], HV = s[1], K = s[3], V = s[2] - K;
    Merged m{Tensor(KDA_FP32, {P, HV, V, K}), Tensor(KDA_FP32, {HV, V, K})};
    const Tensor flags = present.empty() ? Tensor() : Tensor::flags(present);
    auto args = sized<kda_segment_merge_args>();
    args.initial_state = initial;
    args.summaries = summaries;
    args.present = flags;
    args.start_states = m.starts;
    args.final_state = m.final;
    Plan plan = make_plan(merge_desc(HV, K, V, P));
    EXPECT_EQ(plan.run(args), KDA_OK) << plan.message();
    EXPECT_EQ(m.starts.guard_report() + m.final.guard_report(), "");
    return m;
  }
};
KDA_FOR_BACKENDS(SegmentsTest);

TEST_P(SegmentsTest, S01_S09_MergeEqualsTheUnsplitRun) {
  struct Sizes {
    int64_t H, HV, K, V;
  };
  for (const Sizes s : {Sizes{2, 2, 128, 128}, {1, 3, 64, 32}, {1, 1, 17, 40}}) {
    for (const bool neg : {false, true}) {
      FieldInput input;
      input.lengths = {70, 0, 1, 129, 40};  // shards of one text
      input.heads = s.H;
      input.value_heads = s.HV;
      input.key_dim = s.K;
      input.value_dim = s.V;
      input.gate_scale = 4;
      input.beta_scale = 3;
      Problem shards = field_problem(input);
      shards.spec.allow_neg_eigval = neg;
      Problem text = shards;
      text.lengths = {240};
      Tensor initial = Tensor::of(KDA_FP32, {s.HV, s.V, s.K}, uniform_vector(6, s.HV * s.V * s.K));
      text.state = Tensor::of(KDA_FP32, {1, s.HV, s.V, s.K}, initial.values());
      const Tensor summaries = summarise(shards);
      const Merged m = merge(initial, summaries);
      EXPECT_WITHIN(compare_states(m.final.values(), oracle(text).state.values(), s.HV, s.V * s.K),
                    state_limit(shards));
      int64_t at = 0;
      for (int64_t p = 0; p < 5; ++p) {
        Problem before = cut(text, 0, at);
        before.state = text.state;
        EXPECT_WITHIN(compare_states(values(select(m.starts, 0, p)), oracle(before).state.values(), s.HV, s.V * s.K),
                      state_limit(shards));
        at += input.lengths[static_cast<size_t>(p)];
      }
      // The empty shard is the identity: M = I, B = 0.
      const kda_tensor empty = select(select(summaries, 0, 1), 0, 0);
      for (int64_t r = 0; r < s.V + s.K; ++r) {
        for (int64_t c = 0; c < s.K; ++c) {
          ASSERT_EQ(values(select(select(empty, 0, r), 0, c))[0], r - s.V == c ? 1 : 0);
        }
        if (r > 3 && r < s.V) r = s.V - 1;  // a few rows of B, all of M
      }
      // All ranks compute the same bits.
      EXPECT_EQ(first_difference(merge(initial, summaries).final, m.final), "");
    }
  }
}

TEST_P(SegmentsTest, S09_AbsentSummariesAreNotRead) {
  FieldInput input;
  input.lengths = {20, 20, 20};
  input.heads = 1;
  input.key_dim = input.value_dim = 32;
  input.beta_scale = 3;
  const Problem p = field_problem(input);
  Tensor summaries = summarise(p);
  fill(select(summaries, 0, 1), NAN);
  const Tensor initial = Tensor::of(KDA_FP32, {1, 32, 32}, uniform_vector(6, 32 * 32));
  const Merged m = merge(initial, summaries, {1, 0, 1});
  EXPECT_EQ(first_difference(select(m.starts, 0, 1), select(m.starts, 0, 2)), "");
  for (const double x : m.final.values()) ASSERT_TRUE(std::isfinite(x));
  // An absent initial state is zero.
  const Merged from_zero = merge(Tensor(), summaries, {1, 0, 1});
  for (const double x : values(select(from_zero.starts, 0, 0))) ASSERT_EQ(x, 0);
}

TEST_P(SegmentsTest, S09_SummariesAtAnyElement) {
  FieldInput input;
  input.lengths = {33, 0, 5};
  input.heads = 2;
  const Problem p = field_problem(input);
  const Shape shape = {3, 2, 256, 128};
  Shape strides = dense_strides(shape);
  strides[0] += 21;
  Tensor apart(KDA_FP32, shape, strides, 5);
  EXPECT_EQ(first_difference(summarise(p), summarise(p, apart)), "");
}

// More maps than a backend may have on their way at once, some absent, and maps that no wide load can take.
TEST_P(SegmentsTest, S09_MergeBitsDoNotDependOnPlaces) {
  const int64_t P = 9, HV = 2, K = 128, V = 32;
  std::vector<double> x = uniform_vector(6, P * HV * (V + K) * K);
  for (double& v : x) v *= 0.1;
  const Tensor summaries = Tensor::of(KDA_FP32, {P, HV, V + K, K}, x);
  Shape strides = dense_strides(summaries.shape());
  strides[0] += 1;
  const Tensor apart = summaries.copy(KDA_FP32, strides, 1);
  const Tensor initial = Tensor::of(KDA_FP32, {HV, V, K}, uniform_vector(7, HV * V * K));
  for (const std::vector<int64_t>& present :
       {std::vector<int64_t>{}, {0, 1, 1, 0, 0, 1, 1, 1, 0}, {0, 0, 0, 0, 0, 0, 0, 0, 0}}) {
    const Merged one = merge(initial, summaries, present), other = merge(initial, apart, present);
    EXPECT_EQ(first_difference(one.starts, other.starts), "");
    EXPECT_EQ(first_difference(one.final, other.final), "");
  }
}

TEST_P(SegmentsTest, S09_NoSegments) {
  const Tensor initial = Tensor::of(KDA_FP32, {2, 8, 8}, uniform_vector(6, 2 * 64));
  const Merged m = merge(initial, Tensor(KDA_FP32, {0, 2, 16, 8}));
  EXPECT_EQ(first_difference(m.final, initial), "");
}

TEST_P(SegmentsTest, F64_SlowDecaySurvivesTheMerge) {
  // k = v = 0, g = -1e-6: nothing but decay; "it has decayed anyway" would drop a map that is almost the identity.
  const int64_t T = 400;
  Problem p = ledger({100, 100, 100, 100}, iota(T), 1);
  p.k.fill(0);
  p.gate.fill(-1e-6);
  const Tensor initial = Tensor::of(KDA_FP32, {1, 128, 128}, uniform_vector(6, 128 * 128));
  const Merged m = merge(initial, summarise(p));
  std::vector<double> wanted = initial.values();
  for (double& x : wanted) x *= std::exp(-1e-6 * static_cast<double>(T));
  // F64's bound. Where decays are sums of a chunk more is had; token by token, near-equal roundings add up.
  EXPECT_WITHIN(compare_flat(m.final.values(), wanted), on_device() ? 1e-5 : 1e-6);
  // The ledger over shards [2, 2, 1, 1].
  const Merged six = merge(Tensor(), summarise(ledger({2, 2, 1, 1}, iota(6), 2)));
  expect_ledger(six.final.values(), iota(6));
}

TEST_P(SegmentsTest, P15_NaNStaysInItsSegment) {
  FieldInput input;
  input.lengths = {9, 9};
  input.heads = 2;
  Problem p = field_problem(input);
  const Tensor clean = summarise(p);
  p.v.set({3, 0, 5}, NAN);
  const Tensor dirty = summarise(p);
  EXPECT_EQ(first_difference(select(clean, 0, 1), select(dirty, 0, 1)), "");
  EXPECT_EQ(first_difference(select(select(clean, 0, 0), 0, 1), select(select(dirty, 0, 0), 0, 1)), "");
  EXPECT_FALSE(same_bits(select(select(clean, 0, 0), 0, 0), select(select(dirty, 0, 0), 0, 0)));
}

TEST_P(SegmentsTest, S07_DegenerateDistributionsMerge) {
  // D9 (one key again and again) in four segments: N-9's degenerate row, S-7.
  const Problem whole = distribution(9, GateForm::kPlain);
  const Outcome reference = oracle(whole);
  Problem shards = whole;
  shards.lengths = {4096, 4096, 4096, 4096};
  shards.state = Tensor();
  const Merged m = merge(Tensor(), summarise(shards));
  EXPECT_WITHIN(compare_states(m.final.values(), reference.state.values(), 1, 128 * 128), state_limit(whole, true));
}

// A merge amplifies nothing: no vector grows under M, also with beta up to 2.
TEST_P(SegmentsTest, S05_NoVectorGrows) {
  FieldInput input;
  input.lengths = {70, 33};
  input.heads = 2;
  input.key_dim = 48;
  input.value_dim = 8;
  input.gate_scale = 4;
  input.beta_scale = 6;
  Problem p = field_problem(input);
  p.spec.allow_neg_eigval = 1;
  const Tensor summaries = summarise(p);
  for (int64_t n = 0; n < 2; ++n) {
    for (int64_t h = 0; h < 2; ++h) {
      const std::vector<double> m = values(narrow(select(select(summaries, 0, n), 0, h), 0, 8, 48));
      for (uint32_t start = 1; start < 6; ++start) {
        std::vector<double> x = uniform_vector(start, 48);
        for (int round = 0; round < 8; ++round) {  // towards the direction that M shrinks least
          std::vector<double> y(48, 0), back(48, 0);
          for (size_t i = 0; i < 48; ++i) {
            for (size_t j = 0; j < 48; ++j) y[j] += x[i] * m[i * 48 + j];
          }
          ASSERT_LE(norm(y), norm(x) * (1 + 1e-5));
          for (size_t i = 0; i < 48; ++i) {
            for (size_t j = 0; j < 48; ++j) back[i] += y[j] * m[i * 48 + j];
          }
          const double length = norm(back);
          if (length < 1e-20) break;  // everything is forgotten
          for (size_t i = 0; i < 48; ++i) x[i] = back[i] / length;
        }
      }
    }
  }
}

}  // namespace kda::conformance::test

// decode_step: V-15, L-8, L-9, F54, and whole chains R-65.
#include <algorithm>
#include <cmath>

#include "harness.h"

namespace kda::conformance::test {
namespace {

constexpr int64_t kH = 2, kHV = 4, kDim = 128, kTaps = 4;
constexpr int64_t kQk = kH * kDim, kV = kHV * kDim, kChannels = 2 * kQk + kV;

}  // namespace

class StepTest : public BackendTest {
 protected:
  struct Step {
    std::vector<int64_t> lengths;
    Tensor x, gate, beta, z;
    Tensor slots, accepted;
  };
  // Everything that lasts between steps.
  struct State {
    Tensor pool, window, u, kg, count;
  };

  Tensor A_log, dt_bias, conv_weight, norm_weight;

  void SetUp() override {
    const kda_decode_step_desc d = desc_of(1, KDA_DECODE_COLUMNS, KDA_FP32, KDA_CONV_DS);
    require(KDA_OP_DECODE_STEP, &d);
    A_log = Tensor::of(KDA_FP32, {kHV}, {-0.5, 0, 0.5, 1});
    dt_bias = Tensor::of(KDA_FP32, {kHV, kDim}, uniform_vector(8, kHV * kDim));
    conv_weight = Tensor::of(KDA_FP32, {kChannels, kTaps}, uniform_vector(9, kChannels * kTaps));
    norm_weight = Tensor::of(KDA_FP32, {kDim}, uniform_vector(10, kDim));
  }

  kda_attention_spec spec(kda_dtype pool) const {
    kda_attention_spec a{};
    a.num_heads = kH;
    a.num_value_heads = kHV;
    a.key_dim = a.value_dim = kDim;
    a.io_dtype = a.gate_dtype = a.beta_dtype = KDA_BF16;
    a.state_dtype = pool;
    a.gate_family = KDA_GATE_BOUNDED;
    a.lower_bound = -5;
    return a;
  }
  kda_decode_step_desc desc_of(int32_t width, kda_decode_mode mode, kda_dtype pool, kda_conv_layout layout) const {
    kda_decode_step_desc d;
    kda_decode_step_desc_init(&d);
    d.decode.attention = spec(pool);
    d.decode.backend = backend();
    d.decode.max_tokens = 64;
    d.decode.max_sequences = 8;
    d.decode.width = width;
    d.decode.mode = mode;
    d.decode.fold = mode == KDA_DECODE_RECORDS;
    d.conv_width = kTaps;
    d.conv_parts = 1;
    d.conv_layout = layout;
    return d;
  }
  static Step step_of(int64_t seed, const std::vector<int64_t>& lengths) {
    Step s;
    s.lengths = lengths;
    int64_t T = 0;
    for (int64_t n : lengths) T += n;
    const auto part = [&](uint32_t stream, Shape shape, double factor) {
      std::vector<double> x(static_cast<size_t>(product(shape)));
      for (size_t i = 0; i < x.size(); ++i)
        x[i] = factor * uniform(stream, i + static_cast<uint64_t>(seed) * 1000003);
      return Tensor::of(KDA_BF16, std::move(shape), x);
    };
    s.x = part(1, {T, kChannels}, 1);
    s.gate = part(4, {T, kHV, kDim}, 4);
    s.beta = part(5, {T, kHV}, 3);
    s.z = part(11, {T, kHV, kDim}, 2);
    return s;
  }
  // Tokens of three rows; in the last rounds one window and no more tokens than rows, for which backends may have
  // another way.
  static std::vector<int64_t> lengths_of(int64_t round, int64_t width) {
    if (round == 4) return {std::min<int64_t>(width, 3), 0, 0};
    if (round == 5) return {0, std::min<int64_t>(width, 3), 0};
    std::vector<int64_t> lengths;
    for (int64_t n = 0; n < 3; ++n) {
      const uint64_t r = splitmix64(static_cast<uint64_t>(round * 5 + n));
      lengths.push_back(1 + static_cast<int64_t>(r % static_cast<uint64_t>(width)));
    }
    return lengths;
  }
  State fresh_state(int64_t slots, int32_t width, kda_decode_mode mode, kda_dtype pool,
                    kda_conv_layout layout) const {
    State s;
    const int64_t L = kTaps - 1 + width;
    s.pool = canary_pool(pool, {slots, kHV, kDim, kDim});
    s.window = canary_pool(KDA_BF16, layout == KDA_CONV_SD ? Shape{slots, L, kChannels} : Shape{slots, kChannels, L});
    if (mode == KDA_DECODE_RECORDS) {
      s.u = Tensor(KDA_FP32, {slots, kHV, width, kDim});
      s.kg = Tensor(KDA_BF16, {slots, kHV, width, 2 * kDim});
      s.count = Tensor::full(KDA_INT32, {slots}, 0);
    }
    return s;
  }

  kda_decode_args decode_args_of(const Step& s, const State& state, const Tensor& offsets, const Tensor& out) const {
    auto a = sized<kda_decode_args>();
    a.gate = s.gate;
    a.beta = s.beta;
    a.A_log = A_log;
    a.dt_bias = dt_bias;
    a.sequences.cu_seqlens = offsets;
    a.state = state.pool;
    a.slots = s.slots;
    a.accepted = s.accepted;
    a.records = {state.u, state.kg, state.count, {}};
    a.out = out;
    return a;
  }
  static Tensor offsets_of(const Step& s) {
    std::vector<int64_t> cu = {0};
    for (int64_t n : s.lengths) cu.push_back(cu.back() + n);
    return Tensor::ints(cu);
  }

  // One pass.
  Tensor fused(const kda_decode_step_desc& d, const Step& s, State& state) {
    const Tensor offsets = offsets_of(s);
    Tensor out(KDA_BF16, {s.x.shape()[0], kHV, kDim});
    auto a = sized<kda_decode_step_args>();
    a.decode = decode_args_of(s, state, offsets, out);
    if (d.conv_parts == 1) {
      a.x[0] = s.x;
      a.conv_weight[0] = conv_weight;
      a.conv_state[0] = state.window;
    } else {
      const int64_t begin[] = {0, kQk, 2 * kQk}, count[] = {kQk, kQk, kV};
      const int dim = d.conv_layout == KDA_CONV_SD ? 2 : 1;
      for (int i = 0; i < 3; ++i) {
        a.x[i] = narrow(s.x, 1, begin[i], count[i]);
        a.conv_weight[i] = narrow(conv_weight, 0, begin[i], count[i]);
        a.conv_state[i] = narrow(state.window, dim, begin[i], count[i]);
      }
    }
    if (!d.no_norm) {
      a.z = s.z;
      a.norm_weight = norm_weight;
    }
    Plan plan = make_plan(d);
    EXPECT_EQ(plan.run(a), KDA_OK) << plan.message();
    return out;
  }

  // The chain conv -> decode -> gated norm.
  Tensor unfused(const kda_decode_step_desc& d, const Step& s, State& state) {
    const int64_t T = s.x.shape()[0];
    const Tensor offsets = offsets_of(s), qkv(KDA_BF16, {T, kChannels});
    kda_conv_desc c;
    kda_conv_desc_init(&c);
    c.backend = backend();
    c.mode = d.decode.mode == KDA_DECODE_RECORDS ? KDA_CONV_RECORDS : KDA_CONV_COLUMNS;
    c.width = kTaps;
    c.parts = 1;
    c.channels[0] = kChannels;
    c.io_dtype = KDA_BF16;
    c.layout = d.conv_layout;
    c.verify_width = d.decode.width;
    c.fold = d.decode.fold;
    c.max_tokens = d.decode.max_tokens;
    c.max_sequences = d.decode.max_sequences;
    auto ca = sized<kda_conv_args>();
    ca.x[0] = s.x;
    ca.weight[0] = conv_weight;
    ca.sequences.cu_seqlens = offsets;
    ca.state[0] = state.window;
    ca.slots = s.slots;
    ca.accepted = s.accepted;
    ca.record_count = state.count;
    ca.out[0] = qkv;
    Plan conv = make_plan(c);
    EXPECT_EQ(conv.run(ca), KDA_OK) << conv.message();

    const Tensor o(KDA_BF16, {T, kHV, kDim});
    kda_decode_args a = decode_args_of(s, state, offsets, o);
    const auto heads = [&](int64_t begin, int64_t count) {
      kda_tensor t = narrow(qkv, 1, begin, count * kDim);
      t.rank = 3;
      t.shape[1] = count;
      t.shape[2] = kDim;
      t.strides[1] = kDim;
      t.strides[2] = 1;
      return t;
    };
    a.q = heads(0, kH);
    a.k = heads(kQk, kH);
    a.v = heads(2 * kQk, kHV);
    Plan decode = make_plan(d.decode);
    EXPECT_EQ(decode.run(a), KDA_OK) << decode.message();

    Tensor out(KDA_BF16, {T, kHV, kDim});
    auto n = sized<kda_gated_norm_desc>();
    n.backend = backend();
    n.num_value_heads = kHV;
    n.value_dim = kDim;
    n.io_dtype = KDA_BF16;
    n.max_tokens = d.decode.max_tokens;
    auto na = sized<kda_gated_norm_args>();
    na.o = o;
    na.z = s.z;
    na.weight = norm_weight;
    na.out = out;
    Plan norm_plan = make_plan(n);
    EXPECT_EQ(norm_plan.run(na), KDA_OK) << norm_plan.message();
    return d.no_norm ? o : out;
  }

  void expect_same(const State& a, const State& b) {
    EXPECT_EQ(first_difference(a.pool, b.pool), "");
    EXPECT_EQ(first_difference(a.window, b.window), "");
    if (!a.u.present()) return;
    EXPECT_EQ(first_difference(a.u, b.u), "");
    EXPECT_EQ(first_difference(a.kg, b.kg), "");
    EXPECT_EQ(first_difference(a.count, b.count), "");
  }
};
KDA_FOR_BACKENDS(StepTest);

TEST_P(StepTest, L08_EqualsTheChainBitForBit) {
  for (const kda_decode_mode mode : {KDA_DECODE_COLUMNS, KDA_DECODE_RECORDS}) {
    for (const int32_t width : {1, 4}) {
      for (const kda_conv_layout layout : {KDA_CONV_SD, KDA_CONV_DS}) {
        for (const kda_dtype pool : {KDA_FP32, KDA_BF16}) {
          SCOPED_TRACE(testing::Message()
                       << "mode " << mode << " width " << width << " layout " << layout << " pool " << pool);
          const kda_decode_step_desc d = desc_of(width, mode, pool, layout);
          const bool table = mode == KDA_DECODE_COLUMNS && width > 1;
          const int64_t slots = table ? 3 * width + 1 : 5;
          State one = fresh_state(slots, width, mode, pool, layout), chain = one;
          std::vector<int64_t> accepted = {1, 1, 1};
          for (int64_t round = 0; round < 6; ++round) {
            const std::vector<int64_t> lengths = lengths_of(round, width);
            Step s = step_of(round, lengths);
            s.slots = Tensor::ints({2, 0, -1});
            if (table) {
              s.slots = Tensor(KDA_INT32, {3, width});
              for (int64_t n = 0; n < 3; ++n) {
                for (int64_t c = 0; c < width; ++c)
                  s.slots.set({n, c}, n == 2 ? -1 : static_cast<double>(n * width + c));
              }
            }
            s.accepted = Tensor::ints(accepted);
            const Tensor a = fused(d, s, one), b = unfused(d, s, chain);
            // The chain's norm does not know that the last sequence is inactive: it may give it a negative zero.
            const int64_t live = lengths[0] + lengths[1];
            EXPECT_EQ(first_difference(narrow(a, 0, 0, live), narrow(b, 0, 0, live)), "");
            for (const double x : rows(a, live, lengths[2])) EXPECT_EQ(x, 0);
            expect_same(one, chain);
            for (size_t n = 0; n < 3; ++n) accepted[n] = lengths[n] > 1 ? lengths[n] - 1 : 1;
          }
        }
      }
    }
  }
}

TEST_P(StepTest, L09_ThreePartsEqualOne) {
  for (const kda_conv_layout layout : {KDA_CONV_SD, KDA_CONV_DS}) {
    kda_decode_step_desc d = desc_of(3, KDA_DECODE_COLUMNS, KDA_FP32, layout);
    State one = fresh_state(3, 3, KDA_DECODE_COLUMNS, KDA_FP32, layout), three = one;
    Step s = step_of(5, {3});
    s.slots = Tensor::of(KDA_INT32, {1, 3}, {2, 0, 1});
    s.accepted = Tensor::ints({2});
    const Tensor a = fused(d, s, one);
    d.conv_parts = 3;
    const Tensor b = fused(d, s, three);
    EXPECT_EQ(first_difference(a, b), "");
    expect_same(one, three);
  }
}

TEST_P(StepTest, V15_WithoutNormTheRawOutput) {
  kda_decode_step_desc d = desc_of(1, KDA_DECODE_COLUMNS, KDA_FP32, KDA_CONV_DS);
  d.no_norm = 1;
  State one = fresh_state(2, 1, KDA_DECODE_COLUMNS, KDA_FP32, KDA_CONV_DS), chain = one;
  Step s = step_of(6, {1, 1});
  s.slots = Tensor::ints({1, 0});
  EXPECT_EQ(first_difference(fused(d, s, one), unfused(d, s, chain)), "");
  expect_same(one, chain);
}

TEST_P(StepTest, V06_InactiveRowsAreZeroWhateverZHolds) {
  const kda_decode_step_desc d = desc_of(1, KDA_DECODE_COLUMNS, KDA_FP32, KDA_CONV_DS);
  State state = fresh_state(2, 1, KDA_DECODE_COLUMNS, KDA_FP32, KDA_CONV_DS);
  Step s = step_of(7, {1, 1});
  s.slots = Tensor::ints({-1, 0});
  fill(select(s.z, 0, 0), NAN);
  fill(select(s.x, 0, 0), NAN);
  const Snapshot pool(state.pool), window(state.window);
  const Tensor out = fused(d, s, state);
  for (const double x : rows(out, 0, 1)) ASSERT_EQ(x, 0);
  for (const double x : rows(out, 1, 1)) ASSERT_TRUE(std::isfinite(x));
  EXPECT_EQ(pool.changes_outside(state.pool, {0}), "");
  EXPECT_EQ(window.changes_outside(state.window, {0}), "");
}

// F54, F57 through the whole step: verify + acceptance equals one-token steps, in columns and in records mode.
TEST_P(StepTest, F57_VerifyEqualsPlainSteps) {
  const kda_dtype pool = exact_pool();
  const int32_t width = 4;
  const kda_conv_layout layout = KDA_CONV_SD;
  kda_decode_step_desc plain_desc = desc_of(1, KDA_DECODE_COLUMNS, pool, layout);
  kda_decode_step_desc columns_desc = desc_of(width, KDA_DECODE_COLUMNS, pool, layout);
  kda_decode_step_desc records_desc = desc_of(width, KDA_DECODE_RECORDS, pool, layout);
  for (kda_decode_step_desc* d : {&plain_desc, &columns_desc}) d->decode.flags = invariant();
  if (!is_reference()) records_desc.decode.flags = invariant();
  State plain = fresh_state(1, 1, KDA_DECODE_COLUMNS, pool, layout);
  State columns = fresh_state(width, width, KDA_DECODE_COLUMNS, pool, layout);
  State records = fresh_state(1, width, KDA_DECODE_RECORDS, pool, layout);
  // All start from slot 0 of the plain run.
  for (State* s : {&columns, &records}) {
    assign(select(s->pool, 0, 0), values(select(plain.pool, 0, 0)));
    assign(narrow(select(s->window, 0, 0), 0, 0, kTaps - 1),
           values(narrow(select(plain.window, 0, 0), 0, 0, kTaps - 1)));
  }
  int64_t accepted = 1;
  for (int64_t round = 0; round < 8; ++round) {
    const uint64_t r = splitmix64(static_cast<uint64_t>(round));
    const int64_t length = 1 + static_cast<int64_t>(r % 4),
                  take = 1 + static_cast<int64_t>((r >> 8) % static_cast<uint64_t>(length));
    Step s = step_of(20 + round, {length});
    s.slots = Tensor::of(KDA_INT32, {1, width}, {0, 1, 2, 3});
    s.accepted = Tensor::ints({accepted});
    const Tensor by_columns = fused(columns_desc, s, columns);
    s.slots = Tensor::ints({0});
    const Tensor by_records = fused(records_desc, s, records);
    for (int64_t t = 0; t < take; ++t) {
      Step one;
      one.lengths = {1};
      one.x = Tensor::of(KDA_BF16, {1, kChannels}, rows(s.x, t, 1));
      one.gate = Tensor::of(KDA_BF16, {1, kHV, kDim}, rows(s.gate, t, 1));
      one.beta = Tensor::of(KDA_BF16, {1, kHV}, rows(s.beta, t, 1));
      one.z = Tensor::of(KDA_BF16, {1, kHV, kDim}, rows(s.z, t, 1));
      one.slots = Tensor::ints({0});
      const Tensor out = fused(plain_desc, one, plain);
      EXPECT_EQ(first_difference(out, narrow(by_columns, 0, t, 1)), "") << "round " << round << " token " << t;
      if (is_reference()) continue;  // its records round u to fp32
      EXPECT_EQ(first_difference(out, narrow(by_records, 0, t, 1)), "") << "round " << round << " token " << t;
    }
    EXPECT_EQ(first_difference(select(columns.pool, 0, take - 1), select(plain.pool, 0, 0)), "");
    accepted = take;
  }
}

// ---- Chains ---------------------------------------------------------------------------------------------

class ChainTest : public BackendTest {};
KDA_FOR_BACKENDS(ChainTest);

TEST_P(ChainTest, R50_R65_PrefillDecodeVerifyPrefillEqualsOneShot) {
  FieldInput input;
  input.lengths = {150};
  input.heads = 2;
  input.gate_scale = 4;
  input.beta_scale = 3;
  input.io = KDA_FP32;
  const Problem all = field_problem(input);
  const Outcome reference = oracle(all);
  const Tensor table = Tensor::of(KDA_INT32, {1, 4}, {2, 0, 3, 1});
  PrefillCall prompt(cut(all, 0, 70), backend());
  prompt.use_pool(4, {2});
  ASSERT_EQ(prompt.run(), KDA_OK) << prompt.message;
  Tensor pool = prompt.pool;
  std::vector<double> out = prompt.out.values();
  int64_t at = 70, accepted = 1;
  for (int round = 0; at < 100; ++round) {
    // Plain steps and windows of random length and acceptance; rejected drafts are the text's own later tokens.
    const uint64_t r = splitmix64(static_cast<uint64_t>(round));
    const int64_t length = 1 + static_cast<int64_t>(r % 4),
                  take = 1 + static_cast<int64_t>((r >> 9) % static_cast<uint64_t>(length));
    DecodeCall step(cut(all, at, length), backend(), 4);
    step.pool = pool;
    step.slots = table;
    step.accepted = Tensor::ints({accepted});
    ASSERT_EQ(step.run(), KDA_OK) << step.message;
    pool = step.pool;
    const std::vector<double> o = rows(step.out, 0, take);
    out.insert(out.end(), o.begin(), o.end());
    accepted = take;
    at += take;
  }
  // The text goes on with a chunked pass from the accepted column.
  PrefillCall rest(cut(all, at, 150 - at), backend());
  rest.pool = pool;
  rest.desc.initial_state = KDA_INITIAL_ALL;
  rest.slots = Tensor::ints({static_cast<int64_t>(table.get({0, accepted - 1}))});
  ASSERT_EQ(rest.run(), KDA_OK) << rest.message;
  const std::vector<double> o = rest.out.values();
  out.insert(out.end(), o.begin(), o.end());
  EXPECT_WITHIN(compare_outputs(out, reference.out.values(), {150}, 2, 128), 1e-5);
  EXPECT_WITHIN(compare_states(rest.slot(static_cast<int64_t>(table.get({0, accepted - 1}))),
                               reference.state.values(), 2, 128 * 128),
                1e-5);
}

}  // namespace kda::conformance::test

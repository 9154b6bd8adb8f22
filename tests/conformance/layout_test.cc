// State layout, head mapping, tails, strides: F14..F17, F19, F23, F33..F35, F38, F63, G-8.
#include <cmath>

#include "harness.h"

namespace kda::conformance::test {

class LayoutTest : public BackendTest {
 protected:
  Outcome run(const Problem& p, uint32_t flags = 0) {
    PrefillOptions options;
    options.backend = backend();
    options.flags = flags;
    if (is_reference() && flags) options.state_dtype = KDA_FP64;
    const Outcome r = prefill(p, options);
    EXPECT_EQ(r.status, KDA_OK) << r.message;
    return r;
  }
  void expect_oracle(const Problem& p, const Outcome& r, const std::string& what) {
    SCOPED_TRACE(what);
    const Outcome reference = oracle(p);
    const int64_t HV = p.spec.num_value_heads, V = p.spec.value_dim;
    const Limits limit = limits(p.q.dtype());
    EXPECT_WITHIN(compare_outputs(r.out.values(), reference.out.values(), p.lengths, HV, V), limit.out);
    EXPECT_WITHIN(compare_states(r.state.values(), reference.state.values(), HV, V * p.spec.key_dim), limit.state);
  }
};
KDA_FOR_BACKENDS(LayoutTest);

TEST_P(LayoutTest, F14_E09_G01_RowsOfTheStateAreValues) {
  for (const int64_t V : {128, 64}) {
    for (const int64_t T : {1, 65}) {
      Problem p = ledger({T}, std::vector<int64_t>(static_cast<size_t>(T), 5), 2);
      p.spec.value_dim = V;
      p.v = Tensor::full(KDA_BF16, {T, 2, V}, 0);
      p.k.fill(0);
      p.state = Tensor::full(KDA_FP32, {1, 2, V, 128}, 0);
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t v = 0; v < V; ++v) p.state.set({0, h, v, 5}, static_cast<double>(v + 1));
      }
      const Outcome r = run(p);
      for (int64_t v = 0; v < V; ++v) EXPECT_EQ(r.out.get({T - 1, 1, v}), v + 1);
      EXPECT_EQ(first_difference(r.state, p.state), "");
    }
  }
}

TEST_P(LayoutTest, F16_G01_GroupedValueHeads) {
  // By hand: K = V = 2, S0[hv] = (hv+1) I, k = 0.
  Problem p = ledger({1}, {0}, 4, 2);
  p.spec.num_heads = 2;
  p.q = Tensor::of(KDA_BF16, {1, 2, 2}, {1, 0, 0, 1});
  p.k = Tensor::full(KDA_BF16, {1, 2, 2}, 0);
  p.state = Tensor::of(KDA_FP32, {1, 4, 2, 2}, {1, 0, 0, 1, 2, 0, 0, 2, 3, 0, 0, 3, 4, 0, 0, 4});
  EXPECT_EQ(run(p).out.values(), (std::vector<double>{1, 0, 2, 0, 0, 3, 0, 4}));

  // Against a run with q and k repeated.
  for (const auto& [H, HV] : {std::pair<int64_t, int64_t>{4, 12}, {16, 32}, {2, 8}}) {
    FieldInput input;
    input.lengths = {HV == 32 ? 65 : 256};
    input.heads = H;
    input.value_heads = HV;
    input.beta_scale = 3;
    const Problem grouped = field_problem(input);
    Problem repeated = grouped;
    repeated.spec.num_heads = HV;
    const int64_t T = grouped.tokens();
    repeated.q = Tensor(KDA_BF16, {T, HV, 128});
    repeated.k = Tensor(KDA_BF16, {T, HV, 128});
    for (int64_t h = 0; h < HV; ++h) {
      assign(select(repeated.q, 1, h), values(select(grouped.q, 1, h / (HV / H))));
      assign(select(repeated.k, 1, h), values(select(grouped.k, 1, h / (HV / H))));
    }
    const Outcome a = run(grouped), b = run(repeated);
    EXPECT_EQ(first_difference(a.out, b.out), "");
    EXPECT_EQ(first_difference(a.state, b.state), "");
    expect_oracle(grouped, a, std::to_string(H) + " of " + std::to_string(HV));
  }
}

TEST_P(LayoutTest, F16_RefusesHeadCountsThatDoNotDivide) {
  FieldInput input;
  input.lengths = {3};
  input.heads = 5;
  Problem p = field_problem(input);
  p.spec.num_value_heads = 12;
  PrefillOptions options;
  options.backend = backend();
  const Outcome r = prefill(p, options);
  EXPECT_EQ(r.status, KDA_INVALID_ARGUMENT);
  EXPECT_NE(r.message.find("5"), std::string::npos) << r.message;
  EXPECT_NE(r.message.find("12"), std::string::npos) << r.message;
}

TEST_P(LayoutTest, F39_R01_RefusesGateParametersOfTheWrongSize) {
  FieldInput input;
  input.lengths = {3};
  Problem p = field_problem(input);
  PrefillOptions options;
  options.backend = backend();
  p.dt_bias = Tensor::full(KDA_FP32, {12}, 0);
  const Outcome r = prefill(p, options);
  EXPECT_EQ(r.status, KDA_INVALID_ARGUMENT);
  EXPECT_NE(r.message.find("1536"), std::string::npos) << r.message;
  EXPECT_NE(r.message.find("12"), std::string::npos) << r.message;
  // A_log counts value heads, not query heads.
  FieldInput grouped = input;
  grouped.heads = 4;
  grouped.value_heads = 12;
  p = field_problem(grouped);
  p.A_log = Tensor::full(KDA_FP32, {4}, 0);
  const Outcome by_query_head = prefill(p, options);
  EXPECT_EQ(by_query_head.status, KDA_INVALID_ARGUMENT);
  EXPECT_NE(by_query_head.message.find("A_log: wanted 12 values, got 4"), std::string::npos) << by_query_head.message;
  // Both good shapes agree.
  p = field_problem(input);
  const Outcome flat_bias = [&] {
    Problem q = p;
    q.dt_bias = Tensor::of(KDA_FP32, {12 * 128}, p.dt_bias.values());
    q.A_log = Tensor::of(KDA_FP32, {1, 1, 12, 1}, p.A_log.values());
    return run(q);
  }();
  EXPECT_EQ(first_difference(flat_bias.state, run(p).state), "");
}

TEST_P(LayoutTest, F17_G01_H11_LastValidRowOfATail) {
  const std::pair<int64_t, double> given[] = {
      {1, 0.9922179},   {15, 0.8894184},  {17, 0.8756293},  {63, 0.6112877},     {65, 0.6018106},
      {127, 0.3707648}, {129, 0.3650166}, {500, 0.0201158}, {1000, 4.046452e-4}, {1500, 8.139759e-6}};
  for (const auto& [T, wanted] : given) {
    Problem p = ledger({T}, iota(T), 1);
    p.k.fill(0);
    p.v.fill(0);
    p.gate.fill(-1.0 / 128);
    p.state = Tensor::full(KDA_FP32, {1, 1, 128, 128}, 1);
    const Outcome r = run(p);
    const double exact = std::exp(-static_cast<double>(T) / 128);
    EXPECT_NEAR(wanted / exact, 1, 1e-6);
    for (const double x : r.state.values()) ASSERT_NEAR(x / exact, 1, 1e-5) << "T " << T;
  }
}

TEST_P(LayoutTest, F19_Z06_OneTokenRowsAmongLongOnes) {
  const std::vector<int64_t> lengths = {1, 1, 1, 300, 1, 129};
  FieldInput input;
  input.lengths = lengths;
  input.heads = 2;
  input.state_scale = 0.5;
  input.beta_scale = 3;
  const Problem p = field_problem(input);
  const Outcome batch = run(p, invariant());
  expect_oracle(p, batch, "batch");
  int64_t begin = 0;
  std::vector<Outcome> solo;
  for (size_t n = 0; n < lengths.size(); ++n) {
    Problem alone = cut(p, begin, lengths[n]);
    alone.state = state_of(p.state, static_cast<int64_t>(n));
    solo.push_back(run(alone, invariant()));
    EXPECT_EQ(first_difference(narrow(batch.out, 0, begin, lengths[n]), solo[n].out), "") << "sequence " << n;
    EXPECT_EQ(first_difference(narrow(batch.state, 0, static_cast<int64_t>(n), 1), solo[n].state), "")
        << "sequence " << n;
    begin += lengths[n];
  }
}

// ---- Strides (G-8) --------------------------------------------------------------------------------------

// The problem's tensors re-laid; the call must give the bits of the dense one.
class StridesTest : public BackendTest {
 protected:
  static FieldInput input(int64_t T) {
    FieldInput i;
    i.lengths = {T / 2, T - T / 2};
    i.heads = 12;
    i.gate_scale = 4;
    i.beta_scale = 3;
    return i;
  }
  void expect_same(const Problem& dense, const Problem& strided) {
    PrefillCall a(dense, backend()), b(strided, backend());
    a.final_state = b.final_state = Tensor(KDA_FP32, {2, 12, 128, 128});
    ASSERT_EQ(a.run(), KDA_OK) << a.message;
    ASSERT_EQ(b.run(), KDA_OK) << b.message;
    EXPECT_EQ(first_difference(a.out, b.out), "");
    EXPECT_EQ(first_difference(a.final_state, b.final_state), "");
  }
};
KDA_FOR_BACKENDS(StridesTest);

TEST_P(StridesTest, F33_R05_BetaAndGateAsSlices) {
  const Problem dense = field_problem(input(33));
  for (const kda_dtype beta : {KDA_FP32, KDA_BF16}) {
    Problem a = dense;
    a.spec.beta_dtype = beta;
    a.beta = dense.beta.copy(beta);
    Problem b = a;
    b.beta = a.beta.copy(beta, {40, 1}, 3);                       // columns 3..14 of [33, 40], start not aligned
    b.gate = a.gate.copy(KDA_BF16, {12 * 128 + 64, 128, 1}, 64);  // a slice of [33, 12*128+64]
    expect_same(a, b);
  }
}

TEST_P(StridesTest, F33_BatchStride) {
  // Every second sample of a larger batch: [B, T, ...] without offsets is B sequences of T rows.
  FieldInput i = input(33);
  i.lengths = {20, 20};
  const Problem dense = field_problem(i);
  PrefillCall a(dense, backend());
  a.final_state = Tensor(KDA_FP32, {2, 12, 128, 128});
  ASSERT_EQ(a.run(), KDA_OK) << a.message;

  const auto batched = [](const Tensor& x) {
    Shape shape = x.shape(), strides = dense_strides(x.shape());
    shape[0] = 20;
    shape.insert(shape.begin(), 2);
    strides.insert(strides.begin(), 2 * 20 * strides[0]);
    Tensor t(x.dtype(), shape, strides);
    t.assign(x.values());
    return t;
  };
  const Tensor q = batched(dense.q), k = batched(dense.k), v = batched(dense.v), gate = batched(dense.gate),
               beta = batched(dense.beta);
  const Tensor out(KDA_BF16, {2, 20, 12, 128}, {2 * 20 * 12 * 128, 12 * 128, 128, 1}),
      state(KDA_FP32, {2, 12, 128, 128});
  kda_prefill_args args = a.args();
  args.q = q;
  args.k = k;
  args.v = v;
  args.gate = gate;
  args.beta = beta;
  args.sequences = {};
  args.out = out;
  args.final_state = state;
  Plan plan = make_plan(a.desc);
  ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  EXPECT_EQ(first_difference(reshape(a.out, {2, 20, 12, 128}), out), "");
  EXPECT_EQ(first_difference(a.final_state, state), "");
  EXPECT_EQ(out.guard_report(), "");
}

TEST_P(StridesTest, F34_R05_QueryKeyValueInOneBuffer) {
  for (const int64_t T : {1, 33, 150}) {
    const Problem dense = field_problem(input(T));
    for (const int64_t head : {128, 256}) {  // head rows dense, or padded to 256
      const int64_t row = 3 * 12 * head;
      Problem b = dense;
      // Rows 1..T of [T+1, 3 * 12 * head]; each part is a view with the buffer's row stride.
      b.q = dense.q.copy(KDA_BF16, {row, head, 1}, row);
      b.k = dense.k.copy(KDA_BF16, {row, head, 1}, row + 12 * head);
      b.v = dense.v.copy(KDA_BF16, {row, head, 1}, row + 2 * 12 * head);
      expect_same(dense, b);
    }
  }
}

TEST_P(StridesTest, G08_OutputThroughItsOwnStrides) {
  const Problem dense = field_problem(input(40));
  PrefillCall a(dense, backend()), b(dense, backend());
  b.out = Tensor(KDA_BF16, {40, 12, 128}, {12 * 200 + 8, 200, 1}, 16);
  ASSERT_EQ(a.run(), KDA_OK) << a.message;
  ASSERT_EQ(b.run(), KDA_OK) << b.message;
  EXPECT_EQ(first_difference(a.out, b.out), "");
  EXPECT_EQ(b.out.guard_report(), "");
}

TEST_P(StridesTest, G08_RefusesAnInnermostStride) {
  const Problem dense = field_problem(input(8));
  Problem b = dense;
  b.k = dense.k.copy(KDA_BF16, {12 * 128 * 2, 128 * 2, 2});
  PrefillCall call(b, backend());
  EXPECT_EQ(call.run(), KDA_INVALID_ARGUMENT);
  EXPECT_NE(call.message.find("k"), std::string::npos);
}

TEST_P(StridesTest, F35_PaddedPool) {
  for (const kda_dtype pool : {KDA_FP32, KDA_BF16}) {
    FieldInput i = input(70);
    i.state_scale = 1;
    const Problem p = field_problem(i);
    PrefillCall a(p, backend()), b(p, backend());
    a.use_pool(5, {3, 1}, pool);
    b.use_pool(5, {3, 1}, pool, 540672, 393216);
    const Snapshot before(b.pool);
    ASSERT_EQ(a.run(), KDA_OK) << a.message;
    ASSERT_EQ(b.run(), KDA_OK) << b.message;
    EXPECT_EQ(first_difference(a.out, b.out), "");
    EXPECT_EQ(first_difference(a.pool, b.pool), "");
    EXPECT_EQ(before.changes_outside(b.pool, {3, 1}), "");
  }
}

// Slots may start at any element, odd ones too; checkpoints go where they say.
TEST_P(StridesTest, P01_PoolsAtAnyElement) {
  for (const kda_dtype pool : {KDA_FP32, KDA_BF16, KDA_FP16}) {
    FieldInput i = input(70);
    i.heads = 2;
    i.state_scale = 1;
    const Problem p = field_problem(i);
    PrefillCall a(p, backend()), b(p, backend());
    for (PrefillCall* c : {&a, &b}) {
      c->desc.max_checkpoints = 1;
      c->checkpoint_offsets = Tensor::of(KDA_INT32, {2, 1}, {64, 37});
      c->checkpoint_slots = Tensor::of(KDA_INT32, {2, 1}, {0, 4});
    }
    a.use_pool(5, {3, 1}, pool);
    b.use_pool(5, {3, 1}, pool, 2 * 128 * 128 + 1, 3);
    ASSERT_EQ(a.run(), KDA_OK) << a.message;
    ASSERT_EQ(b.run(), KDA_OK) << b.message;
    EXPECT_EQ(first_difference(a.out, b.out), "");
    EXPECT_EQ(first_difference(a.pool, b.pool), "");
  }
}

TEST_P(StridesTest, F35_RefusesInnerGaps) {
  PrefillCall call(field_problem(input(4)), backend());
  call.pool = Tensor(KDA_FP32, {5, 12, 128, 128}, {12 * 128 * 256, 128 * 256, 256, 2});
  call.slots = Tensor::ints({0, 1});
  EXPECT_EQ(call.run(), KDA_INVALID_ARGUMENT);
  call.pool = Tensor(KDA_FP32, {5, 12, 128, 128}, {12 * 20000, 20000, 128, 1});
  EXPECT_EQ(call.run(), KDA_INVALID_ARGUMENT);
  EXPECT_NE(call.message.find("state"), std::string::npos) << call.message;
}

TEST_P(StridesTest, F38_G03_TypesOfThisCallOutputsOfThisCall) {
  Tensor kept;
  std::vector<double> kept_values;
  for (const kda_dtype io : {KDA_BF16, KDA_FP16, KDA_FP32}) {
    for (const kda_dtype index : {KDA_INT32, KDA_INT64}) {
      for (const kda_dtype pool : {KDA_FP32, KDA_BF16}) {
        FieldInput i = input(20);
        i.heads = 2;
        i.io = io;
        i.state_scale = 0.5;
        Problem p = field_problem(i);
        if (pool == KDA_BF16) {  // an fp32 gate and beta beside the io dtype
          p.gate = p.gate.copy(KDA_FP32);
          p.beta = p.beta.copy(KDA_FP32);
          p.spec.gate_dtype = p.spec.beta_dtype = KDA_FP32;
        }
        PrefillCall call(p, backend());
        call.use_pool(4, {2, 0}, pool);
        call.slots = Tensor::ints({2, 0}, index);
        call.offsets = Tensor::ints(p.offsets(), index == KDA_INT32 ? KDA_INT64 : KDA_INT32);
        p.state = Tensor::of(KDA_FP32, {2, 2, 128, 128}, [&] {
          std::vector<double> s = call.slot(2), t = call.slot(0);
          s.insert(s.end(), t.begin(), t.end());
          return s;
        }());
        ASSERT_EQ(call.run(), KDA_OK) << call.message;
        const Outcome reference = oracle(p);
        EXPECT_WITHIN(compare_outputs(call.out.values(), reference.out.values(), p.lengths, 2, 128), limits(io).out);
        std::vector<double> states = call.slot(2), second = call.slot(0);
        states.insert(states.end(), second.begin(), second.end());
        EXPECT_WITHIN(compare_states(states, reference.state.values(), 2, 128 * 128),
                      limits(io).state + pool_rounding(pool));
        if (!kept.present()) {
          kept = call.out;
          kept_values = kept.values();
        }
        EXPECT_EQ(kept.values(), kept_values);
      }
    }
  }
}

TEST_P(StridesTest, F63_R14_HeadSizes) {
  struct Size {
    int64_t K, V;
  };
  for (const Size s :
       {Size{64, 64}, {128, 256}, {60, 60}, {100, 100}, {128, 512}, {1, 1}, {3, 7}, {256, 33}, {200, 1024}}) {
    if (on_device() && s.V > 256) continue;
    SCOPED_TRACE(testing::Message() << "K " << s.K << " V " << s.V);
    FieldInput i;
    i.lengths = {18, 3};
    i.heads = 2;
    i.key_dim = s.K;
    i.value_dim = s.V;
    i.state_scale = 0.5;
    i.io = KDA_FP32;
    const Problem dense = field_problem(i);
    Problem p = dense;  // poison behind each row
    const auto padded = [](const Tensor& x, int64_t n) { return x.copy(KDA_FP32, {2 * (n + 5), n + 5, 1}); };
    p.q = padded(dense.q, s.K);
    p.k = padded(dense.k, s.K);
    p.v = padded(dense.v, s.V);
    p.gate = padded(dense.gate, s.K);
    PrefillCall call(p, backend());
    call.out = Tensor(KDA_FP32, {21, 2, s.V}, {2 * (s.V + 5), s.V + 5, 1});
    call.final_state = Tensor(KDA_FP32, {2, 2, s.V, s.K});
    ASSERT_EQ(call.run(), KDA_OK) << call.message;
    const Outcome reference = oracle(dense);
    EXPECT_WITHIN(compare_outputs(call.out.values(), reference.out.values(), p.lengths, 2, s.V), 1e-5);
    EXPECT_WITHIN(compare_states(call.final_state.values(), reference.state.values(), 2, s.V * s.K), 1e-5);
    EXPECT_EQ(call.out.guard_report(), "");
    EXPECT_EQ(call.final_state.guard_report(), "");
  }
}

class DecodeLayoutTest : public DecodeBackendTest {};
KDA_FOR_BACKENDS(DecodeLayoutTest);

TEST_P(DecodeLayoutTest, F14_E09_G01_RowsOfTheStateAreValues) {
  for (const int64_t V : {128, 64}) {
    Problem p = ledger({1}, {5}, 2);
    p.spec.value_dim = V;
    p.v = Tensor::full(KDA_BF16, {1, 2, V}, 0);
    p.k.fill(0);
    DecodeCall call(p, backend());
    call.pool = Tensor::full(KDA_FP32, {1, 2, V, 128}, 0);
    for (int64_t v = 0; v < V; ++v) call.pool.set({0, 1, v, 5}, static_cast<double>(v + 1));
    const Tensor before = call.pool;
    ASSERT_EQ(call.run(), KDA_OK) << call.message;
    for (int64_t v = 0; v < V; ++v) EXPECT_EQ(call.out.get({0, 1, v}), v + 1);
    EXPECT_EQ(first_difference(call.pool, before), "");
  }
}

TEST_P(DecodeLayoutTest, F15_V08_ShortPromptThenDecode) {
  for (const int64_t T : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 63}) {
    const Problem all = ledger({T + 4}, iota(T + 4), 2);
    const Outcome reference = oracle(all);
    PrefillCall prompt(cut(all, 0, T), backend());
    prompt.use_pool(2, {1});
    ASSERT_EQ(prompt.run(), KDA_OK) << prompt.message;
    Tensor pool = prompt.pool;
    std::vector<double> out = prompt.out.values();
    for (int64_t t = T; t < T + 4; ++t) {
      DecodeCall step(cut(all, t, 1), backend());
      step.pool = pool;
      step.slots = Tensor::ints({1});
      ASSERT_EQ(step.run(), KDA_OK) << step.message;
      pool = step.pool;
      const std::vector<double> o = step.out.values();
      out.insert(out.end(), o.begin(), o.end());
    }
    expect_ledger(values(select(pool, 0, 1)), iota(T + 4));
    EXPECT_WITHIN(compare_outputs(out, reference.out.values(), {T + 4}, 2, 128), 1e-5);  // 0.5: exact in bf16
  }
}

}  // namespace kda::conformance::test

// Field cases of the CPU prefill about sequences, heads and layouts: borders, cuts, lengths, grouped heads,
// checkpoints. On every ISA of the machine.
#include <cmath>

#include "conformance/compare.h"
#include "conformance/random.h"
#include "conformance/rounding.h"
#include "unit/cpu/prefill_cases.h"

namespace kda::conformance::test {

TEST_P(FieldCases, F04_SequenceBorderInsideATile) {
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{63, 65}, {1, 63}, {15, 18}}) {
    FieldInput input;
    input.lengths = lengths;
    input.heads = slow() ? 2 : 16;
    input.io = KDA_FP32;
    input.state_scale = 1;
    Problem p = field_problem(input);
    const int64_t first = lengths[0], H = input.heads;
    for (int64_t t = 0; t < p.tokens(); ++t) {
      // 5 sigmoid(raw) = 0.01
      fill(narrow(p.gate, 0, t, 1), t < first ? 1000 : std::log(0.002 / 0.998));
    }
    const Outcome both = run(p);
    for (int64_t n = 0; n < 2; ++n) {
      const int64_t begin = n * first, length = lengths[static_cast<size_t>(n)];
      Problem alone = p;
      for (Tensor Problem::*m : {&Problem::q, &Problem::k, &Problem::v, &Problem::gate, &Problem::beta}) {
        Shape shape = (p.*m).shape();
        shape[0] = length;
        alone.*m = Tensor::of(KDA_FP32, shape, values(narrow(p.*m, 0, begin, length)));
      }
      alone.lengths = {length};
      alone.state = Tensor::of(KDA_FP32, {1, H, 128, 128}, values(narrow(p.state, 0, n, 1)));
      const Outcome one = run(alone);
      expect_same(narrow(both.out, 0, begin, length), one.out, "out");
      expect_same(narrow(both.state, 0, n, 1), one.state, "state");
      for (double x : one.out.values()) ASSERT_TRUE(std::isfinite(x));
    }
  }
}

TEST_P(FieldCases, F13_CuttingAPrompt) {
  if (slow()) return;
  FieldInput input;
  input.lengths = {4096};
  input.heads = 4;
  input.io = KDA_FP32;
  input.gate_scale = 4;
  input.beta_scale = 3;
  const Problem p = field_problem(input);
  const Outcome whole = run(p);
  const double states[] = {6.139464, 2.266581, 2.789367, 4.746525}, outs[] = {2.050551, 2.110841, 2.106733, 2.132000};
  for (int64_t h = 0; h < 4; ++h) {
    EXPECT_NEAR(head_norm(whole.state.values(), 4, 128 * 128, h) / states[h], 1, 1e-5);
    EXPECT_NEAR(head_norm(whole.out.values(), 4, 128, h) / outs[h], 1, 1e-5);
  }
  static const Outcome exact = oracle(p);
  kda_prefill_desc d = prefill_desc(p, "portable");
  d.initial_state = KDA_INITIAL_FLAGS;
  Plan plan = make_plan(d, isa_context(GetParam()));
  for (const std::vector<int64_t>& cuts :
       {std::vector<int64_t>{2048, 2048}, {1, 4095}, {63, 65, 3968}, std::vector<int64_t>(256, 16)}) {
    // Ranges of the one step, the state carried through slot 1.
    Tensor pool(KDA_FP32, {3, 4, 128, 128}), out(KDA_FP32, {4096, 4, 128});
    const Tensor slot = Tensor::ints({1});
    int64_t begin = 0;
    for (int64_t length : cuts) {
      const Tensor first = Tensor::ints({begin}), count = Tensor::ints({length}), flag = Tensor::flags({begin > 0});
      kda_prefill_args args = prefill_args(p);
      args.sequences.begin = first;
      args.sequences.length = count;
      args.state = pool;
      args.slots = slot;
      args.has_initial_state = flag;
      args.out = out;
      ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
      begin += length;
    }
    const kda_tensor state = narrow(pool, 0, 1, 1);
    if (cuts[0] == 2048) {
      expect_same(state, whole.state, "cut at 2048");
      expect_same(out, whole.out, "cut at 2048");
    }
    EXPECT_TRUE(compare_states(values(state), exact.state.values(), 4, 128 * 128).within(1e-5));
    EXPECT_TRUE(compare_outputs(out.values(), exact.out.values(), {4096}, 4, 128).within(1e-5));
  }
}

TEST_P(FieldCases, F14_VByKNotKByV) {
  for (int64_t T : {1, 65}) {
    for (int64_t V : {128, 64}) {
      Problem p = plain_problem({T}, 1, 128, V);
      p.spec.scale = 1;
      for (int64_t v = 0; v < V; ++v) p.state.set({0, 0, v, 5}, static_cast<double>(v + 1));
      for (int64_t t = 0; t < T; ++t) p.q.set({t, 0, 5}, 1);
      const Outcome r = run(p);
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t v = 0; v < V; ++v) ASSERT_EQ(r.out.get({t, 0, v}), static_cast<double>(v + 1));
      }
      expect_same(r.state, p.state, "state");
    }
  }
}

TEST_P(FieldCases, F15_ShortPromptsAbsorbEachTokenOnce) {
  for (int64_t T = 1; T <= 67; T += T == 17 ? 46 : 1) {
    const Outcome r = run(ledger({T}));
    for (int64_t k = 0; k < 128; ++k) expect_column(r.state, k, k < T ? 0.5 : 0, 1e-6);
    for (int64_t t = 0; t < T; ++t) ASSERT_NEAR(r.out.get({t, 0, 3}), 0.5, 1e-6);
  }
}

TEST_P(FieldCases, F16_GroupedValueHeads) {
  Problem p = plain_problem({1}, 2, 2, 2);
  p.spec.num_value_heads = 4;
  p.spec.scale = 1;
  p.v = Tensor::full(KDA_FP32, {1, 4, 2}, 0);
  p.gate = Tensor::full(KDA_FP32, {1, 4, 2}, 0);
  p.beta = Tensor::full(KDA_FP32, {1, 4}, 0.5);
  p.state = Tensor::full(KDA_FP32, {1, 4, 2, 2}, 0);
  for (int64_t hv = 0; hv < 4; ++hv) {
    p.state.set({0, hv, 0, 0}, static_cast<double>(hv + 1));
    p.state.set({0, hv, 1, 1}, static_cast<double>(hv + 1));
  }
  p.q.set({0, 0, 0}, 1);
  p.q.set({0, 1, 1}, 1);
  EXPECT_EQ(run(p).out.values(), (std::vector<double>{1, 0, 2, 0, 0, 3, 0, 4}));
  // Against q and k repeated for every value head.
  FieldInput input;
  input.lengths = {96};
  input.heads = 4;
  input.value_heads = 12;
  input.key_dim = input.value_dim = 32;
  input.io = KDA_FP32;
  input.state_scale = 1;
  const Problem grouped = field_problem(input);
  Problem repeated = grouped;
  repeated.spec.num_heads = 12;
  for (Tensor Problem::*m : {&Problem::q, &Problem::k}) {
    repeated.*m = Tensor(KDA_FP32, {96, 12, 32});
    for (int64_t h = 0; h < 12; ++h) {
      assign(select(repeated.*m, 1, h), values(select(grouped.*m, 1, h / 3)));
    }
  }
  const Outcome a = run(grouped), b = run(repeated);
  expect_same(a.out, b.out, "out");
  expect_same(a.state, b.state, "state");
}

TEST_P(FieldCases, F18_EmptySequencesKeepTheirState) {
  const std::vector<int64_t> lengths = {0, 5, 0, 0, 65, 0};
  Problem p = ledger(lengths);
  for (int64_t n = 0; n < 6; ++n) fill(select(p.state, 0, n), static_cast<double>(n + 1));
  for (kda_dtype pool : {KDA_FP32, KDA_BF16}) {
    const Outcome r = run(p, pool);
    for (int64_t n : {0, 2, 3, 5}) {
      for (double x : values(select(r.state, 0, n))) ASSERT_EQ(x, static_cast<double>(n + 1));
    }
  }
  Problem fresh = p;
  fresh.state = Tensor();
  const Outcome r = run(fresh);
  for (int64_t n : {0, 2, 3, 5}) {
    for (double x : values(select(r.state, 0, n))) ASSERT_EQ(x, 0);
  }
  const Problem none = ledger({0, 0});
  EXPECT_EQ(run(none).status, KDA_OK);
}

TEST_P(FieldCases, F22_NaNStaysInItsSequence) {
  FieldInput input;
  input.lengths = {5, 7, 9};
  input.heads = 2;
  input.io = KDA_FP32;
  input.state_scale = 1;
  const Problem clean = field_problem(input);
  const Outcome expected = run(clean);
  Problem p = clean;
  p.v.set({5 + 3, 1, 17}, kNaN);
  const Outcome r = run(p);
  for (int64_t n : {0, 2}) expect_same(select(r.state, 0, n), select(expected.state, 0, n), "state");
  expect_same(narrow(r.out, 0, 0, 8), narrow(expected.out, 0, 0, 8), "rows before the NaN");
  expect_same(narrow(r.out, 0, 12, 9), narrow(expected.out, 0, 12, 9), "rows of the next sequence");
  for (int64_t t = 8; t < 12; ++t) EXPECT_TRUE(std::isnan(r.out.get({t, 1, 17})));
  p = clean;
  fill(select(p.state, 0, 1), kNaN);
  const Outcome s = run(p);
  for (int64_t n : {0, 2}) expect_same(select(s.state, 0, n), select(expected.state, 0, n), "state");
  EXPECT_TRUE(std::isnan(s.state.get({1, 0, 0, 0})));
}

TEST_P(FieldCases, F59_CheckpointsOffTheGrid) {
  const Problem p = ledger({384, 384});
  kda_prefill_desc d = prefill_desc(p, "portable");
  d.max_checkpoints = 2;
  Plan plan = make_plan(d, isa_context(GetParam()));
  const std::vector<std::vector<double>> rows = {{16, 40, 128, 256}, {40, 384, 0, 128}};
  for (kda_dtype index : {KDA_INT32, KDA_INT64}) {
    for (const auto& row : rows) {
      const Tensor offsets = Tensor::of(index, {2, 2}, row), cu = Tensor::ints(p.offsets(), index);
      Tensor states = canary_pool(KDA_FP32, {4, 1, 128, 128});
      const Snapshot before(states);
      Tensor out(KDA_FP32, {768, 1, 128}), final(KDA_FP32, {2, 1, 128, 128});
      kda_prefill_args args = prefill_args(p);
      args.sequences.cu_seqlens = cu;
      args.state = p.state;
      args.final_state = final;
      args.out = out;
      args.checkpoint_offsets = offsets;
      args.checkpoint_states = reshape(states, {2, 2, 1, 128, 128});
      ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
      for (int64_t c = 0; c < 4; ++c) {
        const auto offset = static_cast<int64_t>(row[static_cast<size_t>(c)]);
        if (offset == 0) {
          EXPECT_EQ(before.slot_changes(states, c), "");
          continue;
        }
        expect_same(narrow(states, 0, c, 1), run(ledger({offset})).state, "offset " + std::to_string(offset));
      }
    }
  }
}

TEST_P(FieldCases, F63_HeadSizes) {
  const int64_t sizes[][2] = {{64, 64}, {128, 256}, {60, 60}, {100, 100}, {64, 512}, {1, 1}, {256, 1024}, {250, 3}};
  for (const auto& size : sizes) {
    if (slow() && size[0] * size[1] > 16384) continue;
    FieldInput input;
    input.lengths = {70};
    input.heads = 1;
    input.io = KDA_FP32;
    input.key_dim = size[0];
    input.value_dim = size[1];
    input.gate_scale = 4;
    input.state_scale = 1;
    const Problem p = field_problem(input);
    const Outcome exact = oracle(p), r = run(p);
    const Comparison out = compare_outputs(r.out.values(), exact.out.values(), p.lengths, 1, size[1]);
    const Comparison state = compare_states(r.state.values(), exact.state.values(), 1, size[0] * size[1]);
    EXPECT_TRUE(out.within(1e-5)) << size[0] << " x " << size[1] << ": " << out.text();
    EXPECT_TRUE(state.within(1e-5)) << size[0] << " x " << size[1] << ": " << state.text();
  }
}

}  // namespace kda::conformance::test

// Steps with chunk and recurrent rows, and prefill between two state copies (R-40..R-45, R-64, T-19).
#include "harness.h"

namespace kda::conformance::test {

class MixedStepTest : public DecodeBackendTest {
 protected:
  // Rows 0..2 verify, rows 3..72 are a prompt, row 73 verifies.
  static constexpr int64_t kRows = 74, kPrompt = 70;

  static Problem step() {
    FieldInput input;
    input.lengths = {kRows};
    input.heads = 2;
    input.gate_scale = 4;
    input.beta_scale = 3;
    return field_problem(input);
  }
  // The recurrent rows, packed.
  static Problem verify_rows(const Problem& all) {
    Problem p = cut(all, 0, 4);
    const Problem last = cut(all, kRows - 1, 1);
    p.lengths = {3, 1};
    for (Tensor Problem::*x : {&Problem::q, &Problem::k, &Problem::v, &Problem::gate, &Problem::beta})
      assign(narrow(p.*x, 0, 3, 1), (last.*x).values());
    return p;
  }
  PrefillCall prompt(const Problem& p) const {
    PrefillCall call(p, backend());
    call.desc.max_sequences = 1;
    call.slots = Tensor::ints({8});
    return call;
  }
  DecodeCall verify(const Problem& p) const {
    DecodeCall call(p, backend(), 4);
    call.desc.max_sequences = 2;
    call.slots = Tensor::of(KDA_INT32, {2, 4}, {0, 1, 2, 3, 4, 5, 6, 7});
    call.accepted = Tensor::ints({2, 3});
    return call;
  }
  // Both halves into one pool and the outputs that they were given.
  static void run_both(PrefillCall& chunk, DecodeCall& recurrent, const kda_tensor& chunk_out,
                       const kda_tensor& recurrent_out, const Tensor& pool, bool chunk_first) {
    kda_prefill_args a = chunk.args();
    kda_decode_args b = recurrent.args();
    a.state = b.state = pool;
    a.out = chunk_out;
    b.out = recurrent_out;
    Plan first = make_plan(chunk.desc), second = make_plan(recurrent.desc);
    if (chunk_first) {
      ASSERT_EQ(first.run(a), KDA_OK) << first.message();
    }
    ASSERT_EQ(second.run(b), KDA_OK) << second.message();
    if (!chunk_first) {
      ASSERT_EQ(first.run(a), KDA_OK) << first.message();
    }
  }
};
KDA_FOR_BACKENDS(MixedStepTest);

TEST_P(MixedStepTest, R40_R42_R43_R44_R64_RangesRowListsAndPackedHalvesAgree) {
  const Problem all = step(), packed = verify_rows(all), text = cut(all, 3, kPrompt);
  const Tensor start = canary_pool(KDA_FP32, {9, 2, 128, 128});
  const Shape shape = {kRows, 2, 128};

  // Ranges over the step's own rows, straight into the layer's buffer, in both orders.
  Tensor direct, direct_pool;
  for (const bool chunk_first : {true, false}) {
    PrefillCall chunk = prompt(all);
    chunk.begin = Tensor::ints({3});
    chunk.length = Tensor::ints({kPrompt});
    DecodeCall recurrent = verify(all);
    recurrent.begin = Tensor::ints({0, kRows - 1});
    recurrent.length = Tensor::ints({3, 1});
    const Tensor out(KDA_BF16, shape), pool = start;
    run_both(chunk, recurrent, out, out, pool, chunk_first);
    if (direct.present()) {
      EXPECT_EQ(first_difference(out, direct), "");
      EXPECT_EQ(first_difference(pool, direct_pool), "");
    }
    direct = out;
    direct_pool = pool;
  }

  // Packed halves through their row lists.
  PrefillCall chunk = prompt(text);
  DecodeCall recurrent = verify(packed);
  chunk.out_rows = Tensor::ints(iota(kPrompt, 3));
  recurrent.out_rows = Tensor::ints({0, 1, 2, kRows - 1}, KDA_INT64);
  {
    const Tensor out(KDA_BF16, shape), pool = start;
    run_both(chunk, recurrent, out, out, pool, false);
    EXPECT_EQ(first_difference(out, direct), "");
    EXPECT_EQ(first_difference(pool, direct_pool), "");
  }
  // A hole in a list: its row stays as it was, the others do not move.
  {
    std::vector<int64_t> list = iota(kPrompt, 3);
    list[5] = -1;
    PrefillCall holed = chunk;
    holed.out_rows = Tensor::ints(list);
    const Tensor out = Tensor::full(KDA_BF16, shape, 7), pool = start;
    run_both(holed, recurrent, out, out, pool, true);
    for (const double x : rows(out, 8, 1)) ASSERT_EQ(x, 7);
    EXPECT_EQ(first_difference(narrow(out, 0, 0, 8), narrow(direct, 0, 0, 8)), "");
    EXPECT_EQ(first_difference(narrow(out, 0, 9, kRows - 9), narrow(direct, 0, 9, kRows - 9)), "");
    EXPECT_EQ(first_difference(pool, direct_pool), "");
  }
  // Packed halves into buffers of their own, scattered by the caller.
  {
    chunk.out_rows = recurrent.out_rows = Tensor();
    const Tensor a(KDA_BF16, {kPrompt, 2, 128}), b(KDA_BF16, {4, 2, 128}), pool = start;
    run_both(chunk, recurrent, a, b, pool, true);
    EXPECT_EQ(first_difference(a, narrow(direct, 0, 3, kPrompt)), "");
    EXPECT_EQ(first_difference(narrow(b, 0, 0, 3), narrow(direct, 0, 0, 3)), "");
    EXPECT_EQ(first_difference(narrow(b, 0, 3, 1), narrow(direct, 0, kRows - 1, 1)), "");
    EXPECT_EQ(first_difference(pool, direct_pool), "");
  }
}

TEST_P(MixedStepTest, T19_R45_GatherPrefillScatterEqualsInPlace) {
  FieldInput input;
  input.lengths = {5, 3, 70, 2};
  input.heads = 2;
  input.beta_scale = 3;
  input.state_scale = 1;
  const Problem p = field_problem(input);
  const std::vector<int64_t> ids = {4, -1, 1, 3};  // sequence 1 has no slot, sequence 2 is fresh
  PrefillCall in_place(p, backend());
  in_place.use_pool(6, ids, KDA_FP32, 2 * 128 * 128 + 40, 24);
  in_place.desc.initial_state = KDA_INITIAL_FLAGS;
  in_place.flags = Tensor::flags({1, 1, 0, 1});
  const Tensor pool = in_place.pool;
  ASSERT_EQ(in_place.run(), KDA_OK) << in_place.message;

  auto desc = sized<kda_state_copy_desc>();
  desc.pool = pool;
  desc.max_selected = 4;
  const Plan copy(kda_state_copy_plan_create, cpu_context(), desc);
  ASSERT_TRUE(copy.ok()) << copy.message();
  const Tensor states(KDA_FP32, {4, 2, 128, 128}), ends(KDA_FP32, {4, 2, 128, 128});
  auto args = sized<kda_state_copy_args>();
  args.pool = pool;
  args.indices = in_place.slots;
  args.packed = states;
  args.has_initial_state = in_place.flags;
  ASSERT_EQ(kda_state_gather(copy.get(), &args, nullptr), KDA_OK) << kda_last_error();
  PrefillCall packed(p, backend());
  packed.p.state = states;
  packed.desc.initial_state = KDA_INITIAL_ALL;
  packed.final_state = ends;
  ASSERT_EQ(packed.run(), KDA_OK) << packed.message;
  args.packed = packed.final_state;
  args.has_initial_state = {};
  ASSERT_EQ(kda_state_scatter(copy.get(), &args, nullptr), KDA_OK) << kda_last_error();

  EXPECT_EQ(first_difference(pool, in_place.pool), "");
  EXPECT_EQ(pool.guard_report(), "");
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 5}, {8, 72}}) {
    EXPECT_EQ(first_difference(narrow(packed.out, 0, begin, count), narrow(in_place.out, 0, begin, count)), "");
  }
}

}  // namespace kda::conformance::test

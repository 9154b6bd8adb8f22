// Recover mode: verify_record, commit, folded commit (P-3, V-10, V-10b, W-4).
#include <cmath>
#include <cstring>

#include "harness.h"

namespace kda::conformance::test {
namespace {

Tensor row_of_ints(const std::vector<int64_t>& x) { return Tensor::ints(x); }

// Token rows `first[n] .. first[n] + lengths[n]` of a long problem, packed.
Problem gather(const Problem& all, const std::vector<int64_t>& first, const std::vector<int64_t>& lengths) {
  Problem p = cut(all, 0, 0);
  p.lengths = lengths;
  int64_t T = 0;
  for (int64_t n : lengths) T += n;
  for (auto [from, to] : {std::pair<const Tensor*, Tensor*>{&all.q, &p.q},
                          {&all.k, &p.k},
                          {&all.v, &p.v},
                          {&all.gate, &p.gate},
                          {&all.beta, &p.beta}}) {
    Shape shape = from->shape();
    shape[0] = T;
    *to = Tensor(from->dtype(), shape);
    int64_t row = 0;
    for (size_t n = 0; n < lengths.size(); ++n) {
      assign(narrow(*to, 0, row, lengths[n]), values(narrow(*from, 0, first[n], lengths[n])));
      row += lengths[n];
    }
  }
  return p;
}

}  // namespace

class RecordsTest : public DecodeBackendTest {
 protected:
  static constexpr int64_t kN = 3, kH = 2, kHV = 4, kWidth = 4;

  void SetUp() override {
    kda_decode_desc d = decode_desc(inputs(4), "auto", kWidth);
    d.mode = KDA_DECODE_RECORDS;
    require(KDA_OP_DECODE, &d);
    kda_commit_desc c = commit_desc(inputs(4), KDA_FP32);
    if (!IsSkipped()) require(KDA_OP_COMMIT, &c);
  }
  static Problem inputs(int64_t T) {
    FieldInput i;
    i.lengths = {T};
    i.heads = kH;
    i.value_heads = kHV;
    i.gate_scale = 4;
    i.beta_scale = 3;
    Problem p = field_problem(i);
    p.dt_bias.assign(uniform_vector(8, kHV * 128));
    for (int64_t h = 0; h < kHV; ++h) p.A_log.set({h}, 0.2 * static_cast<double>(h));
    return p;
  }
  kda_commit_desc commit_desc(const Problem& p, kda_dtype pool) const {
    kda_commit_desc d;
    kda_commit_desc_init(&d);
    d.attention = p.spec;
    d.attention.state_dtype = pool;
    d.backend = backend();
    d.max_sequences = kN;
    d.width = kWidth;
    return d;
  }
  DecodeCall recording(Problem p, kda_dtype pool, bool fold) const {
    DecodeCall call(std::move(p), backend(), kWidth);
    call.desc.mode = KDA_DECODE_RECORDS;
    call.desc.fold = fold;
    call.desc.attention.state_dtype = pool;
    return call;
  }
  // Records for `rows` rows, all poison but the counts.
  static void add_records(DecodeCall& call, int64_t count_rows) {
    const kda_dtype gate = call.p.gate.dtype();
    call.u = Tensor(KDA_FP32, {count_rows, kHV, kWidth, 128}, {kHV * kWidth * 136 + 8, kWidth * 136, 136, 1});
    call.kg = Tensor(gate, {count_rows, kHV, kWidth, 256});
    call.count = Tensor::full(KDA_INT32, {count_rows}, 0);
  }
  kda_status commit(DecodeCall& call, const std::vector<int64_t>& accepted, kda_dtype pool) {
    auto args = sized<kda_commit_args>();
    const Tensor c = Tensor::ints(accepted);
    args.A_log = call.p.A_log;
    args.dt_bias = call.p.dt_bias;
    args.state = call.pool;
    args.slots = call.slots;
    args.accepted = c;
    args.records = {call.u, call.kg, call.count, call.record_rows};
    Plan plan = make_plan(commit_desc(call.p, pool));
    const kda_status status = plan.run(args);
    call.message = plan.message();
    return status;
  }
};
KDA_FOR_BACKENDS(RecordsTest);

TEST_P(RecordsTest, P03_WhatIsRecorded) {
  const Problem all = inputs(6);
  DecodeCall call = recording(gather(all, {0, 2, 2}, {2, 0, 4}), KDA_FP32, false);
  call.pool = canary_pool(KDA_FP32, {5, kHV, 128, 128});
  call.slots = row_of_ints({3, 1, 0});
  add_records(call, 5);
  const Snapshot pool(call.pool), kg(call.kg);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(pool.changes_outside(call.pool), "");  // the committed state is read-only
  EXPECT_EQ(kg.changes_outside(call.kg, {3, 0}), "");
  EXPECT_EQ(call.u.guard_report(), "");
  EXPECT_EQ(call.count.values(), (std::vector<double>{4, 0, 0, 2, 0}));
  for (int64_t t = 0; t < 2; ++t) {
    for (int64_t h = 0; h < kHV; ++h) {
      // Record row 3 = slot of sequence 0: the key of its query head, then the raw gate, bit for bit.
      const kda_tensor record = select(select(select(call.kg, 0, 3), 0, h), 0, t);
      EXPECT_EQ(first_difference(narrow(record, 0, 0, 128), select(select(call.p.k, 0, t), 0, h / 2)), "");
      EXPECT_EQ(first_difference(narrow(record, 0, 128, 128), select(select(call.p.gate, 0, t), 0, h)), "");
    }
  }
  // u of the first token: beta (v - (St o e^g) k), seen through the oracle's state change.
  Problem one = cut(call.p, 0, 1);
  one.state = Tensor::of(KDA_FP32, {1, kHV, 128, 128}, call.slot(3));
  const Outcome after = oracle(one);
  DecodeCall replay = call;
  ASSERT_EQ(commit(replay, {1, 0, 0}, KDA_FP32), KDA_OK) << replay.message;
  EXPECT_WITHIN(compare_states(replay.slot(3), after.state.values(), kHV, 128 * 128), 1e-5);
}

TEST_P(RecordsTest, V10_CommitReplaysTheAcceptedTokens) {
  for (const kda_dtype pool : {exact_pool(), KDA_BF16}) {
    const Problem all = inputs(kN * kWidth);
    for (int64_t c = 0; c <= kWidth; ++c) {
      DecodeCall call = recording(gather(all, {0, 4, 8}, {4, 4, 4}), pool, false);
      call.pool = canary_pool(pool, {6, kHV, 128, 128});
      call.slots = row_of_ints({4, 2, 0});
      call.record_rows = Tensor::ints({1, 0, 2}, KDA_INT64);
      add_records(call, 3);
      const Tensor start = call.pool;
      const Snapshot before(call.pool);
      ASSERT_EQ(call.run(), KDA_OK) << call.message;
      ASSERT_EQ(commit(call, {c, 0, 4}, pool), KDA_OK) << call.message;
      EXPECT_EQ(before.changes_outside(call.pool, c > 0 ? std::vector<int64_t>{4, 0} : std::vector<int64_t>{0}), "");
      EXPECT_EQ(call.count.values(), (std::vector<double>{0, 0, 0}));
      // Against plain decode of the accepted tokens in one row of columns, whose state is rounded once as well.
      DecodeCall columns(gather(all, {0, 4, 8}, {c, 0, 4}), backend(), kWidth);
      columns.desc.attention.state_dtype = pool;
      columns.desc.store = KDA_STORE_FINAL;
      columns.pool = start;
      columns.slots = row_of_ints({4, 2, 0});
      ASSERT_EQ(columns.run(), KDA_OK) << columns.message;
      if (is_reference()) {  // the oracle keeps u in fp64 here and in fp32 in the records
        EXPECT_WITHIN(compare_flat(call.pool.values(), columns.pool.values()), 1e-7 + pool_rounding(pool));
      } else {
        EXPECT_EQ(first_difference(call.pool, columns.pool), "") << "c " << c;
      }
    }
  }
}

TEST_P(RecordsTest, V10_AcceptedOutOfRangeKeepsTheRecords) {
  const Problem all = inputs(8);
  DecodeCall call = recording(gather(all, {0, 2, 5}, {2, 3, 1}), KDA_FP32, false);
  call.pool = canary_pool(KDA_FP32, {4, kHV, 128, 128});
  call.slots = row_of_ints({0, 1, 2});
  add_records(call, 4);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  const Snapshot before(call.pool);
  ASSERT_EQ(commit(call, {3, -1, 2}, KDA_FP32), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.pool), "");
  EXPECT_EQ(call.count.values(), (std::vector<double>{2, 3, 1, 0}));
  ASSERT_EQ(commit(call, {2, 0, 1}, KDA_FP32), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.pool, {0, 2}), "");
  EXPECT_EQ(call.count.values(), (std::vector<double>{0, 0, 0, 0}));
  // Dead slots and rows behind the active count.
  call.slots = row_of_ints({-1, 9, 2});
  const Snapshot again(call.pool);
  ASSERT_EQ(commit(call, {0, 0, 0}, KDA_FP32), KDA_OK) << call.message;
  EXPECT_EQ(again.changes_outside(call.pool), "");
}

// W-4: commit moves the windows of the same slots by c, whatever the layout and the number of pools.
TEST_P(RecordsTest, W04_CommitMovesTheWindows) {
  const int64_t qk = kH * 128, v = kHV * 128, L = 3 + kWidth;
  for (const kda_conv_layout layout : {KDA_CONV_SD, KDA_CONV_DS}) {
    for (const int32_t parts : {1, 3}) {
      const Problem all = inputs(12);
      DecodeCall call = recording(gather(all, {0, 4, 8}, {4, 3, 4}), KDA_FP32, false);
      call.pool = canary_pool(KDA_FP32, {5, kHV, 128, 128});
      call.slots = row_of_ints({4, 1, 0});
      add_records(call, 5);
      ASSERT_EQ(call.run(), KDA_OK) << call.message;

      kda_commit_desc d = commit_desc(all, KDA_FP32);
      d.conv_width = 4;
      d.conv_parts = parts;
      d.conv_layout = layout;
      Tensor windows[3];
      auto args = sized<kda_commit_args>();
      for (int i = 0; i < parts; ++i) {
        const int64_t C = parts == 1 ? 2 * qk + v : i < 2 ? qk : v;
        windows[i] = canary_pool(KDA_BF16, layout == KDA_CONV_SD ? Shape{5, L, C} : Shape{5, C, L}, C * L + 10, 2);
        args.conv_state[i] = windows[i];
      }
      const Tensor before[3] = {windows[0], windows[1], windows[2]};
      const Tensor accepted = Tensor::ints({3, 0, 5}), active = Tensor::ints({3});  // row 2: more than was recorded
      args.A_log = call.p.A_log;
      args.dt_bias = call.p.dt_bias;
      args.state = call.pool;
      args.slots = call.slots;
      args.accepted = accepted;
      args.num_active = active;
      args.records = {call.u, call.kg, call.count, call.record_rows};
      Plan plan = make_plan(d);
      const Snapshot pool(call.pool);
      ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
      EXPECT_EQ(call.count.values(), (std::vector<double>{4, 0, 0, 0, 0}));
      EXPECT_EQ(pool.changes_outside(call.pool, {4}), "");
      const int dim = layout == KDA_CONV_SD ? 0 : 1;  // of the columns, in one slot
      for (int i = 0; i < parts; ++i) {
        EXPECT_EQ(Snapshot(before[i]).changes_outside(windows[i], {4}), "");
        for (int64_t column = 0; column < 3; ++column) {
          EXPECT_EQ(first_difference(select(select(windows[i], 0, 4), dim, column),
                                     select(select(before[i], 0, 4), dim, column + 3)),
                    "");
        }
      }
      // Rows behind the active count keep state, window and records.
      assign(active, {0});
      assign(accepted, {1, 1, 1});
      const Snapshot again(call.pool);
      ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
      EXPECT_EQ(again.changes_outside(call.pool), "");
      EXPECT_EQ(call.count.get({0}), 4);
    }
  }
}

// Folded commit equals commit followed by verify_record, bit for bit, over random steps.
TEST_P(RecordsTest, V10b_FoldEqualsCommitThenVerify) {
  for (const kda_dtype pool : {exact_pool(), KDA_BF16}) {
    const Problem all = inputs(64);
    Tensor apart_pool, fold_pool, apart_u, fold_u, apart_kg, fold_kg, apart_count, fold_count;
    std::vector<int64_t> lengths(static_cast<size_t>(kN), 0);
    for (int64_t round = 0; round < 12; ++round) {
      // Accepted counts of the previous windows; 1 where nothing was recorded (V-8), now and then none kept.
      std::vector<int64_t> accepted, next, first;
      for (int64_t n = 0; n < kN; ++n) {
        const uint64_t r = splitmix64(static_cast<uint64_t>(round * 31 + n));
        const int64_t had = lengths[static_cast<size_t>(n)];
        accepted.push_back(had == 0 ? 1 : static_cast<int64_t>(r % static_cast<uint64_t>(had + 1)));
        next.push_back(static_cast<int64_t>((r >> 8) % 5));
        first.push_back(static_cast<int64_t>((r >> 16) % 60));
      }
      const Problem p = gather(all, first, next);
      DecodeCall apart = recording(p, pool, false), fold = recording(p, pool, true);
      for (DecodeCall* c : {&apart, &fold}) {
        c->slots = row_of_ints({3, 0, 2});
        add_records(*c, 4);
      }
      if (round == 0) {
        apart.pool = fold.pool = canary_pool(pool, {4, kHV, 128, 128});
      } else {
        apart.pool = apart_pool, apart.u = apart_u, apart.kg = apart_kg, apart.count = apart_count;
        fold.pool = fold_pool, fold.u = fold_u, fold.kg = fold_kg, fold.count = fold_count;
      }
      ASSERT_EQ(commit(apart, accepted, pool), KDA_OK) << apart.message;
      ASSERT_EQ(apart.run(), KDA_OK) << apart.message;
      fold.accepted = Tensor::ints(accepted);
      ASSERT_EQ(fold.run(), KDA_OK) << fold.message;
      ASSERT_EQ(first_difference(apart.out, fold.out), "") << "round " << round;
      ASSERT_EQ(first_difference(apart.pool, fold.pool), "") << "round " << round;
      ASSERT_EQ(first_difference(apart.count, fold.count), "") << "round " << round;
      ASSERT_EQ(first_difference(apart.u, fold.u), "") << "round " << round;
      ASSERT_EQ(first_difference(apart.kg, fold.kg), "") << "round " << round;
      apart_pool = apart.pool, apart_u = apart.u, apart_kg = apart.kg, apart_count = apart.count;
      fold_pool = fold.pool, fold_u = fold.u, fold_kg = fold.kg, fold_count = fold.count;
      lengths = next;
    }
  }
}

TEST_P(RecordsTest, V10b_AcceptedOutOfRangeMakesTheRowInactive) {
  const Problem all = inputs(8);
  DecodeCall call = recording(gather(all, {0, 2, 5}, {2, 3, 1}), KDA_FP32, false);
  call.pool = canary_pool(KDA_FP32, {4, kHV, 128, 128});
  call.slots = row_of_ints({0, 1, 2});
  add_records(call, 4);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  DecodeCall fold = recording(gather(all, {1, 3, 6}, {1, 2, 2}), KDA_FP32, true);
  fold.pool = call.pool;
  fold.slots = call.slots;
  fold.u = call.u;
  fold.kg = call.kg;
  fold.count = call.count;
  fold.accepted = Tensor::ints({3, -1, 0});  // above the count, negative; row 2 drops its record
  const Snapshot pool(fold.pool), u(fold.u);
  ASSERT_EQ(fold.run(), KDA_OK) << fold.message;
  EXPECT_EQ(pool.changes_outside(fold.pool), "");
  EXPECT_EQ(u.changes_outside(fold.u, {2}), "");
  EXPECT_EQ(fold.count.values(), (std::vector<double>{2, 3, 2, 0}));
  for (const double x : rows(fold.out, 0, 3)) ASSERT_EQ(x, 0);
  EXPECT_NE(norm(rows(fold.out, 3, 2)), 0);
}

// The same tokens, acceptance and final state as columns mode: one ledger, both ways (V-9, V-10).
TEST_P(RecordsTest, F53_LedgerThroughFoldedSteps) {
  struct Step {
    std::vector<int64_t> tokens;
    int64_t accept;  // of these tokens
  };
  const std::vector<Step> list = {{{3, 4, 5, 70}, 3}, {{6}, 1}, {{7, 72, 73, 74}, 1}, {{8}, 1}, {{9}, 1}};
  Tensor pool = Tensor::full(KDA_FP32, {2, kHV, 128, 128}, 0);
  for (int64_t h = 0; h < kHV; ++h) {
    for (int64_t v = 0; v < 128; ++v) {
      for (int64_t c = 0; c < 3; ++c) pool.set({1, h, v, c}, 0.5);
    }
  }
  DecodeCall records = recording(ledger({1}, {0}, kHV), KDA_FP32, true);
  records.pool = pool;
  records.slots = Tensor::ints({1});
  add_records(records, 2);
  int64_t accepted = 1;
  for (const Step& s : list) {
    DecodeCall step = recording(ledger({static_cast<int64_t>(s.tokens.size())}, s.tokens, kHV), KDA_FP32, true);
    step.pool = records.pool;
    step.slots = records.slots;
    step.u = records.u;
    step.kg =
        records.kg.dtype() == step.p.gate.dtype() ? records.kg : Tensor(step.p.gate.dtype(), {2, kHV, kWidth, 256});
    step.count = records.count;
    step.accepted = Tensor::ints({accepted});
    ASSERT_EQ(step.run(), KDA_OK) << step.message;
    records = step;
    accepted = s.accept;
  }
  ASSERT_EQ(commit(records, {accepted}, KDA_FP32), KDA_OK) << records.message;
  expect_ledger(records.slot(1), iota(10));
}

}  // namespace kda::conformance::test

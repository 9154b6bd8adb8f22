// Decode and verify with a state per token: F53..F57, V-1..V-9, V-12, V-13.
#include <cmath>

#include "decode_fixture.h"

namespace kda::conformance::test {

class DecodeTest : public DecodeFixture {};
KDA_FOR_BACKENDS(DecodeTest);

TEST_P(DecodeTest, N09_V04_OneTokenAndWindowsAgainstTheOracle) {
  struct Rows {
    std::vector<int64_t> lengths;
    int64_t H, HV, K, V;
    int32_t width;
  };
  const Rows shapes[] = {{{1, 1, 1}, 2, 2, 128, 128, 1},
                         {{1, 0, 3, 5}, 2, 6, 128, 128, 5},
                         {{4}, 1, 1, 64, 32, 4},
                         {{2, 1}, 3, 3, 33, 7, 2},
                         {{16, 9}, 1, 2, 128, 128, 16}};
  for (const Rows& s : shapes) {
    const std::pair<kda_dtype, kda_dtype> kinds[] = {
        {KDA_BF16, KDA_FP32}, {KDA_FP32, KDA_FP32}, {KDA_BF16, KDA_BF16}, {KDA_FP16, KDA_FP16}};
    for (const auto& [io, pool] : kinds) {
      SCOPED_TRACE(testing::Message() << "width " << s.width << " K " << s.K << " io " << io << " pool " << pool);
      FieldInput input;
      input.lengths = s.lengths;
      input.heads = s.H;
      input.value_heads = s.HV;
      input.key_dim = s.K;
      input.value_dim = s.V;
      input.io = io;
      input.gate_scale = 4;
      input.beta_scale = 3;
      input.state_scale = 1;
      Problem p = field_problem(input);
      p.state = p.state.copy(pool).copy(KDA_FP32);
      const auto N = static_cast<int64_t>(s.lengths.size());
      DecodeCall call(p, backend(), s.width);
      call.desc.attention.state_dtype = pool;
      call.pool = canary_pool(pool, {N * s.width + 2, s.HV, s.V, s.K}, s.HV * s.V * s.K + 8, 16);
      Tensor table(KDA_INT32, {N, s.width});
      for (int64_t n = 0; n < N; ++n) {
        for (int64_t c = 0; c < s.width; ++c) table.set({n, c}, static_cast<double>(c * N + (N - 1 - n) + 1));
        assign(select(call.pool, 0, N - n), values(select(p.state, 0, n)));
      }
      call.slots = table;
      DecodeCall again = call;
      const Snapshot before(call.pool);
      ASSERT_EQ(call.run(), KDA_OK) << call.message;
      ASSERT_EQ(again.run(), KDA_OK) << again.message;
      EXPECT_EQ(first_difference(call.out, again.out), "");
      EXPECT_EQ(first_difference(call.pool, again.pool), "");
      EXPECT_EQ(call.out.guard_report(), "");

      const Outcome reference = oracle(p);
      const double rounding = io == KDA_BF16 ? 0x1p-8 : io == KDA_FP16 ? 0x1p-11 : 0;  // few values: no averaging
      EXPECT_WITHIN(compare_outputs(call.out.values(), reference.out.values(), s.lengths, s.HV, s.V),
                    1e-5 + rounding);
      std::vector<int64_t> written;
      int64_t begin = 0;
      for (int64_t n = 0; n < N; ++n) {
        const int64_t length = s.lengths[static_cast<size_t>(n)];
        for (int64_t t = 0; t < length; ++t) {
          written.push_back(static_cast<int64_t>(table.get({n, t})));
          Problem prefix = cut(p, begin, t + 1);
          prefix.state = state_of(p.state, n);
          EXPECT_WITHIN(compare_states(call.slot(written.back()), oracle(prefix).state.values(), s.HV, s.V * s.K),
                        1e-5 + pool_rounding(pool));
        }
        begin += length;
      }
      EXPECT_EQ(before.changes_outside(call.pool, written), "");  // V-4: columns >= qlen untouched
    }
  }
}

TEST_P(DecodeTest, V12_V02_V05_TheExampleOfTheSpecification) {
  // Slots a, b, c = 2, 0, 1. Prompt token 0 in a.
  Tensor pool = zero_pool(3);
  for (int64_t v = 0; v < 128; ++v) pool.set({2, 0, v, 0}, 0.5);
  const auto step = [&](const std::vector<int64_t>& tokens, int64_t accepted) {
    DecodeCall call(ledger({static_cast<int64_t>(tokens.size())}, tokens, 1), backend(), 3);
    call.pool = pool;
    call.slots = Tensor::of(KDA_INT32, {1, 3}, {2, 0, 1});
    call.accepted = Tensor::ints({accepted});
    ASSERT_EQ(call.run(), KDA_OK) << call.message;
    pool = call.pool;
  };
  const auto slot = [&](int64_t s) { return values(select(pool, 0, s)); };
  step({1, 2, 67}, 1);  // d1 = 2 will be kept, d2 = e_67 rejected
  expect_ledger(slot(2), {0, 1});
  expect_ledger(slot(0), {0, 1, 2});
  expect_ledger(slot(1), {0, 1, 2, 67});
  step({3, 68, 69}, 2);
  expect_ledger(slot(2), {0, 1, 2, 3});
  expect_ledger(slot(0), {0, 1, 2, 3, 68});
  step({4}, 1);  // no draft this step: the same operator, one token
  expect_ledger(slot(2), {0, 1, 2, 3, 4});
}

TEST_P(DecodeTest, F53_VerifyAndPlainStepsInTurn) {
  // Two requests, the second one step later. Steps: tokens and the accepted count that the *next* step uses.
  struct Step {
    std::vector<int64_t> tokens;
    int64_t accept;
  };
  const std::vector<Step> list = {{{3, 4, 5, 70}, 3}, {{6}, 1}, {{7, 72, 73, 74}, 1}, {{8}, 1}, {{9}, 1}};
  Tensor pool = zero_pool(8);
  const Tensor table = Tensor::of(KDA_INT32, {2, 4}, {0, 1, 2, 3, 4, 5, 6, 7});
  for (const int64_t s : {0, 4}) {
    for (int64_t v = 0; v < 128; ++v) {
      for (int64_t c = 0; c < 3; ++c) pool.set({s, 0, v, c}, 0.5);  // the 3-token prompt
    }
  }
  std::vector<int64_t> accepted = {1, 1};
  for (size_t now = 0; now <= list.size(); ++now) {
    std::vector<int64_t> lengths(2, 0), tokens;
    for (size_t r = 0; r < 2; ++r) {
      if (now < r || now - r >= list.size()) continue;
      const Step& s = list[now - r];
      lengths[r] = static_cast<int64_t>(s.tokens.size());
      tokens.insert(tokens.end(), s.tokens.begin(), s.tokens.end());
    }
    DecodeCall call(ledger(lengths, tokens, 1), backend(), 4);
    call.pool = pool;
    call.slots = table;
    call.accepted = Tensor::ints(accepted);
    ASSERT_EQ(call.run(), KDA_OK) << call.message;
    pool = call.pool;
    for (size_t r = 0; r < 2; ++r) {
      if (now >= r && now - r < list.size()) accepted[r] = list[now - r].accept;
    }
  }
  expect_ledger(values(select(pool, 0, 0)), iota(10));
  expect_ledger(values(select(pool, 0, 4)), iota(10));
}

TEST_P(DecodeTest, F54_V02_BaseTokenCounts) {
  for (int64_t accepted = 1; accepted <= 5; ++accepted) {
    Tensor pool = zero_pool(5);
    const Tensor table = Tensor::of(KDA_INT32, {1, 5}, {0, 1, 2, 3, 4});
    DecodeCall verify(ledger({5}, {0, 1, 2, 3, 4}, 1), backend(), 5);
    verify.pool = pool;
    verify.slots = table;
    ASSERT_EQ(verify.run(), KDA_OK) << verify.message;
    DecodeCall next(ledger({1}, {20}, 1), backend(), 5);
    next.pool = verify.pool;
    next.slots = table;
    next.accepted = Tensor::ints({accepted});
    ASSERT_EQ(next.run(), KDA_OK) << next.message;
    std::vector<int64_t> columns = iota(accepted);
    columns.push_back(20);
    expect_ledger(next.slot(0), columns);
  }
}

TEST_P(DecodeTest, F55_AcceptedOutOfRange) {
  for (const int64_t accepted : {0, 1, 4, 5, 6, 8, 100, -1}) {
    for (const int64_t length : {1, 3, 5}) {
      SCOPED_TRACE(testing::Message() << "accepted " << accepted << " length " << length);
      DecodeCall call(ledger({length}, iota(length, 10), 1), backend(), 5);
      call.pool = canary_pool(KDA_FP32, {7, 1, 128, 128});
      // The row of the state table lies between canary entries that name live slots.
      Tensor table = Tensor::of(KDA_INT32, {3, 5}, {6, 6, 6, 6, 6, 0, 1, 2, 3, 4, 6, 6, 6, 6, 6});
      call.accepted = Tensor::ints({accepted});
      kda_decode_args args = call.args();
      args.slots = narrow(table, 0, 1, 1);
      Plan plan = make_plan(call.desc);
      const Snapshot before(call.pool);
      ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
      EXPECT_EQ(before.slot_changes(call.pool, 6), "");
      if (accepted >= 1 && accepted <= 5) {
        EXPECT_EQ(before.changes_outside(call.pool, iota(length)), "");
        EXPECT_NE(before.slot_changes(call.pool, 0), "");
        continue;
      }
      EXPECT_EQ(before.changes_outside(call.pool), "");
      for (const double x : call.out.values()) ASSERT_EQ(x, 0);
      DecodeCall checked = call;
      checked.slots = Tensor::of(KDA_INT32, {1, 5}, {0, 1, 2, 3, 4});
      checked.desc.flags = KDA_PLAN_CHECKED;
      EXPECT_EQ(checked.run(), KDA_INVALID_ARGUMENT);
      EXPECT_NE(checked.message.find("accepted[0]"), std::string::npos) << checked.message;
    }
  }
}

TEST_P(DecodeTest, V06_TooManyTokensOrADeadStart) {
  DecodeCall call(ledger({4, 1, 1}, iota(6), 1), backend(), 3);
  call.pool = canary_pool(KDA_FP32, {9, 1, 128, 128});
  call.slots = Tensor::of(KDA_INT32, {3, 3}, {0, 1, 2, 3, -1, 5, 6, 7, -1});
  call.accepted = Tensor::ints({1, 2, 1});  // row 0: 4 tokens > width; row 1: starts from the dead column 1
  const Snapshot before(call.pool);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.pool, {6}), "");
  for (const double x : rows(call.out, 0, 5)) ASSERT_EQ(x, 0);
}

TEST_P(DecodeTest, V03_ADeadDestinationSkipsThatStoreOnly) {
  DecodeCall call(ledger({3}, iota(3), 1), backend(), 3);
  call.pool = zero_pool(3);
  call.slots = Tensor::of(KDA_INT64, {1, 3}, {0, -1, 2});
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  expect_ledger(call.slot(0), {0});
  expect_ledger(call.slot(1), {});
  expect_ledger(call.slot(2), iota(3));
}

TEST_P(DecodeTest, V03_StoreFinal) {
  DecodeCall call(ledger({7, 1}, iota(8), 1), backend(), 1);
  call.desc.store = KDA_STORE_FINAL;
  call.pool = zero_pool(3);
  call.slots = Tensor::ints({2, 0});
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  expect_ledger(call.slot(2), iota(7));
  expect_ledger(call.slot(0), {7});
  expect_ledger(call.slot(1), {});
}

TEST_P(DecodeTest, F56_V13_DraftWidths) {
  for (const int64_t N : {1, 3}) {
    for (const int64_t width : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16}) {
      std::vector<int64_t> lengths(static_cast<size_t>(N), width);
      std::vector<int64_t> tokens;
      for (int64_t n = 0; n < N; ++n) {
        for (int64_t t = 0; t < width; ++t) tokens.push_back(20 * n + t);
      }
      DecodeCall call(ledger(lengths, tokens, 1), backend(), static_cast<int32_t>(width));
      call.pool = zero_pool(N * width);
      std::vector<double> table;
      for (int64_t i = 0; i < N * width; ++i) table.push_back(static_cast<double>(i));
      call.slots = Tensor::of(KDA_INT32, {N, width}, table);
      ASSERT_EQ(call.run(), KDA_OK) << call.message;
      for (int64_t n = 0; n < N; ++n) expect_ledger(call.slot((n + 1) * width - 1), iota(width, 20 * n));
    }
  }
  EXPECT_GE(kda_max_verify(), 8);
  DecodeCall wide(ledger({1}, {0}, 1), backend(), kda_max_verify() + 1);
  wide.pool = zero_pool(1);
  EXPECT_EQ(wide.run(), KDA_UNSUPPORTED);
}

// Verify + accept equals decode of the accepted tokens; rule 4 is looked at in the pool itself.
TEST_P(DecodeTest, F57_VerifyAndAcceptanceEqualDecode) {
  const std::vector<int64_t> widths = {1, 5, 8};
  const int64_t N = 3, H = 2, rounds = 20, W = 8;
  for (const kda_dtype pool_dtype : {exact_pool(), KDA_BF16}) {
    const Problem all = inputs({N * rounds * W}, H);
    Tensor verify_pool = Tensor::full(pool_dtype, {N * W, H, 128, 128}, 0);
    Tensor plain_pool = Tensor::full(pool_dtype, {N, H, 128, 128}, 0);
    Tensor table(KDA_INT32, {N, W});
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t c = 0; c < W; ++c) table.set({n, c}, static_cast<double>(n * W + c));
    }
    std::vector<int64_t> accepted(static_cast<size_t>(N), 1);
    const uint32_t flags = pool_dtype == exact_pool() ? invariant() : 0;
    for (int64_t round = 0; round < rounds; ++round) {
      // Row n: widths[n] tokens out of its own stretch of the table.
      Problem p = inputs(widths, H);
      const auto gather = [&](const Tensor& from, Tensor& to) {
        int64_t row = 0;
        for (int64_t n = 0; n < N; ++n) {
          const int64_t first = (n * rounds + round) * W;
          assign(narrow(to, 0, row, widths[static_cast<size_t>(n)]),
                 rows(from, first, widths[static_cast<size_t>(n)]));
          row += widths[static_cast<size_t>(n)];
        }
      };
      gather(all.q, p.q);
      gather(all.k, p.k);
      gather(all.v, p.v);
      gather(all.gate, p.gate);
      gather(all.beta, p.beta);
      DecodeCall verify(p, backend(), W);
      verify.desc.attention.state_dtype = pool_dtype;
      verify.desc.flags = flags;
      verify.pool = verify_pool;
      verify.slots = table;
      verify.accepted = Tensor::ints(accepted);
      ASSERT_EQ(verify.run(), KDA_OK) << verify.message;
      verify_pool = verify.pool;

      int64_t row = 0;
      for (int64_t n = 0; n < N; ++n) {
        const int64_t width = widths[static_cast<size_t>(n)];
        const int64_t take =
            1 + static_cast<int64_t>(splitmix64(static_cast<uint64_t>(round * 7 + n)) % static_cast<uint64_t>(width));
        accepted[static_cast<size_t>(n)] = take;
        for (int64_t t = 0; t < take; ++t) {
          DecodeCall one(cut(p, row + t, 1), backend());
          one.desc.attention.state_dtype = pool_dtype;
          one.desc.flags = flags;
          one.pool = plain_pool;
          one.slots = Tensor::ints({n});
          ASSERT_EQ(one.run(), KDA_OK) << one.message;
          plain_pool = one.pool;
          const kda_tensor ours = select(verify_pool, 0, n * W + t), theirs = select(plain_pool, 0, n);
          if (pool_dtype == exact_pool()) {
            ASSERT_EQ(first_difference(ours, theirs), "") << "round " << round << " row " << n << " token " << t;
            ASSERT_EQ(first_difference(narrow(verify.out, 0, row + t, 1), one.out), "");
          } else {
            // One rounding a call against one a token: at most W roundings apart, and decay forgets older ones.
            ASSERT_TRUE(
                compare_flat(values(ours), values(theirs)).within(static_cast<double>(W) * pool_rounding(KDA_BF16)));
          }
        }
        row += width;
        // The accepted state is where both go on from.
        assign(select(plain_pool, 0, n), values(select(verify_pool, 0, n * W + take - 1)));
      }
    }
  }
}

}  // namespace kda::conformance::test

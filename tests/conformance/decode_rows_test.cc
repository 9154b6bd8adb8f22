// Rows of decode calls: slots, active counts, empty and fresh rows, layouts, output rows: F22, F35, F37, F42, F43,
// F50, F51, P-11, P-14, R-41, V-14.
#include <cmath>

#include "decode_fixture.h"

namespace kda::conformance::test {

class DecodeRowsTest : public DecodeFixture {};
KDA_FOR_BACKENDS(DecodeRowsTest);

TEST_P(DecodeRowsTest, F42_F43_P06_SlotRule) {
  const std::vector<int64_t> ids = {-1, 3, 5, INT32_MIN, 0};
  for (const int64_t null_slot : {-1, 0}) {
    DecodeCall call(ledger({1, 1, 1, 1, 1}, iota(5), 2), backend());
    call.pool = canary_pool(KDA_FP32, {5, 2, 128, 128});
    fill(select(call.pool, 0, 3), 0);
    fill(select(call.pool, 0, 0), 0);
    call.slots = Tensor::ints(ids);
    call.desc.null_slot = null_slot;
    const Snapshot before(call.pool);
    ASSERT_EQ(call.run(), KDA_OK) << call.message;
    EXPECT_EQ(before.changes_outside(call.pool, null_slot < 0 ? std::vector<int64_t>{3, 0} : std::vector<int64_t>{3}),
              "");
    expect_ledger(call.slot(3), {1});
    if (null_slot < 0) expect_ledger(call.slot(0), {4});
    for (const int64_t row : {0, 2, 3}) {
      for (const double x : rows(call.out, row, 1)) ASSERT_EQ(x, 0);
    }
  }
}

TEST_P(DecodeRowsTest, F51_P07_RowsBehindTheActiveCount) {
  DecodeCall call(ledger({1, 1, 1, 1, 1, 1, 1, 1}, iota(8), 1), backend());
  call.pool = zero_pool(7);
  call.slots = Tensor::ints({2, 4, 6, 1, 3, 2, 2, 2});
  call.active = Tensor::ints({5});
  call.out.fill(7);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  const int64_t ids[] = {2, 4, 6, 1, 3};
  for (int64_t n = 0; n < 5; ++n) expect_ledger(call.slot(ids[n]), {n});
  for (const double x : rows(call.out, 5, 3)) EXPECT_EQ(x, 7);
}

TEST_P(DecodeRowsTest, P14_RowsOfNoSequence) {
  const Problem p = inputs({1, 2});
  DecodeCall exact(p, backend(), 2);
  exact.pool = canary_pool(KDA_FP32, {4, 2, 128, 128});
  exact.slots = Tensor::of(KDA_INT32, {2, 2}, {0, 1, 2, 3});
  DecodeCall longer = exact;
  const auto with_tail = [](const Tensor& x) {
    Shape shape = x.shape();
    shape[0] += 3;
    Tensor t = Tensor::full(x.dtype(), shape, NAN);
    assign(narrow(t, 0, 0, x.shape()[0]), x.values());
    return t;
  };
  for (Tensor* x : {&longer.p.q, &longer.p.k, &longer.p.v, &longer.p.gate, &longer.p.beta}) *x = with_tail(*x);
  longer.desc.max_tokens = 6;
  longer.out = Tensor::full(KDA_BF16, {6, 2, 128}, 7);
  ASSERT_EQ(exact.run(), KDA_OK) << exact.message;
  ASSERT_EQ(longer.run(), KDA_OK) << longer.message;
  EXPECT_EQ(first_difference(exact.pool, longer.pool), "");
  EXPECT_EQ(first_difference(exact.out, narrow(longer.out, 0, 0, 3)), "");
  for (const double x : rows(longer.out, 3, 3)) ASSERT_EQ(x, 7);
}

TEST_P(DecodeRowsTest, F50_OneTokenRowsFreshAndNot) {
  DecodeCall call(ledger({1, 1}, {3, 3}, 1), backend());
  call.pool = zero_pool(2);
  for (const int64_t s : {0, 1}) {
    for (int64_t v = 0; v < 128; ++v) call.pool.set({s, 0, v, 9}, 0.5);
  }
  call.slots = Tensor::ints({0, 1});
  call.desc.initial_state = KDA_INITIAL_FLAGS;
  call.flags = Tensor::flags({0, 1});
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  expect_ledger(call.slot(0), {3});
  expect_ledger(call.slot(1), {3, 9});
}

TEST_P(DecodeRowsTest, P11_RowsOfNoToken) {
  DecodeCall call(ledger({0, 0, 1}, {5}, 1), backend(), 2);
  call.pool = canary_pool(KDA_BF16, {6, 1, 128, 128});
  call.desc.attention.state_dtype = KDA_BF16;
  call.slots = Tensor::of(KDA_INT32, {3, 2}, {0, 1, 2, 3, 4, 5});
  call.desc.initial_state = KDA_INITIAL_FLAGS;
  call.flags = Tensor::flags({1, 0, 1});
  call.accepted = Tensor::ints({2, 1, 1});
  const Snapshot before(call.pool);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.pool, {2, 4}), "");
  for (const double x : call.slot(2)) EXPECT_EQ(x, 0);
}

TEST_P(DecodeRowsTest, F22_NaNStaysInItsRow) {
  const Problem p = inputs({1, 1, 1});
  DecodeCall clean(p, backend()), dirty(p, backend());
  clean.pool = dirty.pool = canary_pool(KDA_FP32, {3, 2, 128, 128});
  dirty.pool.set({1, 0, 3, 3}, NAN);
  ASSERT_EQ(clean.run(), KDA_OK) << clean.message;
  ASSERT_EQ(dirty.run(), KDA_OK) << dirty.message;
  for (const int64_t n : {0, 2}) {
    EXPECT_EQ(first_difference(select(clean.pool, 0, n), select(dirty.pool, 0, n)), "");
    EXPECT_EQ(first_difference(select(clean.out, 0, n), select(dirty.out, 0, n)), "");
  }
  // The slot as fresh again: the bits of a clean one.
  for (DecodeCall* c : {&clean, &dirty}) {
    c->desc.initial_state = KDA_INITIAL_FLAGS;
    c->flags = Tensor::flags({1, 0, 1});
    ASSERT_EQ(c->run(), KDA_OK) << c->message;
  }
  EXPECT_EQ(first_difference(clean.pool, dirty.pool), "");
  EXPECT_EQ(first_difference(clean.out, dirty.out), "");
}

TEST_P(DecodeRowsTest, F35_PaddedPoolAndRowStridesOfTheTable) {
  const Problem p = inputs({2, 1}, 12);
  DecodeCall dense(p, backend(), 2), padded(p, backend(), 2);
  dense.pool = canary_pool(KDA_FP32, {5, 12, 128, 128});
  padded.pool = canary_pool(KDA_FP32, {5, 12, 128, 128}, 540672, 393216);
  dense.slots = Tensor::of(KDA_INT32, {2, 2}, {3, 0, 1, 4});
  padded.slots = dense.slots.copy(KDA_INT64, {9, 2}, 1);  // a strided block table
  const Snapshot before(padded.pool);
  ASSERT_EQ(dense.run(), KDA_OK) << dense.message;
  ASSERT_EQ(padded.run(), KDA_OK) << padded.message;
  EXPECT_EQ(first_difference(dense.out, padded.out), "");
  EXPECT_EQ(first_difference(dense.pool, padded.pool), "");
  EXPECT_EQ(before.changes_outside(padded.pool, {3, 0, 1}), "");
}

TEST_P(DecodeRowsTest, F37_ABlockTableWiderThanThePlan) {
  DecodeCall call(ledger({1, 1}, {5, 6}, 1), backend(), 2);
  call.pool = zero_pool(4);
  Tensor table = Tensor::full(KDA_INT32, {2, 9}, 9999);
  table.set({0, 0}, 2);
  table.set({0, 1}, 0);
  table.set({1, 0}, 3);
  table.set({1, 4}, 1);  // another block of the request, beyond the plan's width
  call.slots = table;
  call.accepted = Tensor::ints({1, 5});
  const Snapshot before(call.pool);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  expect_ledger(call.slot(2), {5});
  EXPECT_EQ(before.changes_outside(call.pool, {2}), "");  // accepted 5 > width 2: inactive
}

TEST_P(DecodeRowsTest, R41_OutputRowsAndRanges) {
  const Problem p = inputs({2, 1, 1});
  DecodeCall plain(p, backend(), 2), ranged(p, backend(), 2);
  plain.pool = ranged.pool = canary_pool(KDA_FP32, {6, 2, 128, 128});
  plain.slots = ranged.slots = Tensor::of(KDA_INT32, {3, 2}, {0, 1, 2, 3, 4, 5});
  ranged.begin = Tensor::ints({0, 2, 3}, KDA_INT64);
  ranged.length = Tensor::ints({2, 1, 1});
  ranged.out = Tensor::full(KDA_BF16, {7, 2, 128}, 7);
  ranged.out_rows = Tensor::ints({6, 0, -2, 3});
  ASSERT_EQ(plain.run(), KDA_OK) << plain.message;
  ASSERT_EQ(ranged.run(), KDA_OK) << ranged.message;
  EXPECT_EQ(first_difference(plain.pool, ranged.pool), "");
  for (const auto& [from, to] : {std::pair<int64_t, int64_t>{0, 6}, {1, 0}, {3, 3}}) {
    EXPECT_EQ(first_difference(select(plain.out, 0, from), select(ranged.out, 0, to)), "");
  }
  for (const int64_t row : {1, 2, 4, 5}) {
    for (const double x : rows(ranged.out, row, 1)) ASSERT_EQ(x, 7);
  }
}

TEST_P(DecodeRowsTest, V14_ValuesAreReadAtExecution) {
  DecodeCall call(ledger({1}, {7}, 1), backend(), 2);
  call.pool = zero_pool(4);
  call.slots = Tensor::of(KDA_INT32, {1, 2}, {0, 1});
  call.accepted = Tensor::ints({1});
  Plan plan = make_plan(call.desc);
  const kda_decode_args args = call.args();
  ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  expect_ledger(call.slot(0), {7});
  call.slots.assign({3, 0});  // same addresses, new values
  call.accepted.assign({2});
  ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  expect_ledger(call.slot(3), {}, {7});
}

}  // namespace kda::conformance::test

// Empty and fresh sequences, padding, bad offsets, active counts, confinement of NaN, output rows:
// F18, F20, F22, F41, F44, F51, P-5..P-15, Z-1..Z-6, R-31, R-41, R-64.
#include <cmath>

#include "harness.h"

namespace kda::conformance::test {

class SequencesTest : public BackendTest {
 protected:
  static Problem inputs(std::vector<int64_t> lengths, double state_scale = 0.5) {
    FieldInput i;
    i.lengths = std::move(lengths);
    i.heads = 2;
    i.gate_scale = 4;
    i.beta_scale = 3;
    i.state_scale = state_scale;
    return field_problem(i);
  }
};
KDA_FOR_BACKENDS(SequencesTest);

// An int32 vector of no entries, at no address.
static kda_tensor tensor_of_nothing() {
  kda_tensor t{};
  t.dtype = KDA_INT32;
  t.rank = 1;
  t.strides[0] = 1;
  return t;
}

TEST_P(SequencesTest, F18_Z03_EmptySequencesKeepTheirState) {
  const std::vector<int64_t> cu = {0, 0, 5, 5, 5, 70, 70};
  for (const kda_dtype dtype : {KDA_FP32, KDA_BF16}) {
    for (const bool initial : {true, false}) {
      Problem p = ledger({0, 5, 0, 0, 65, 0}, iota(70), 2);
      PrefillCall call(p, backend());
      call.use_pool(6, iota(6), dtype);
      for (int64_t n = 0; n < 6; ++n) fill(select(call.pool, 0, n), static_cast<double>(n + 1));
      call.desc.initial_state = initial ? KDA_INITIAL_ALL : KDA_INITIAL_NONE;
      call.offsets = Tensor::ints(cu);
      for (int repeat = 0; repeat < 3; ++repeat) {
        PrefillCall again = call;
        ASSERT_EQ(again.run(), KDA_OK) << again.message;
        for (const int64_t n : {0, 2, 3, 5}) {
          for (const double x : again.slot(n))
            ASSERT_EQ(x, initial ? static_cast<double>(n + 1) : 0) << "sequence " << n;
        }
        if (!initial) expect_ledger(again.slot(1), iota(5));
      }
    }
  }
}

TEST_P(SequencesTest, Z02_AllSequencesEmpty) {
  Problem p = ledger({0, 0}, {}, 2);
  PrefillCall call(p, backend());
  call.use_pool(3, {2, 0});
  call.desc.initial_state = KDA_INITIAL_FLAGS;
  call.flags = Tensor::flags({1, 0});
  const Snapshot before(call.pool);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.pool, {0}), "");
  for (const double x : call.slot(0)) EXPECT_EQ(x, 0);
}

TEST_P(SequencesTest, Z01_NoSequences) {
  Problem p = ledger({}, {}, 2);
  PrefillCall call(p, backend());
  call.use_pool(3, {});
  call.offsets = Tensor::ints({0});
  const Snapshot before(call.pool);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.pool), "");
}

// No sequences over rows that are there: ranges of no entries may have no memory.
TEST_P(SequencesTest, Z01_P12_NoSequencesAsRanges) {
  PrefillCall call(ledger({3}, iota(3), 2), backend());
  call.use_pool(3, {});
  call.slots = Tensor::ints({});
  const Tensor offsets = Tensor::ints({0});
  call.out.fill(7);
  const Snapshot pool(call.pool), out(call.out);
  kda_prefill_args args = call.args();
  args.sequences = {};
  args.sequences.begin = args.sequences.length = tensor_of_nothing();
  args.slots = tensor_of_nothing();
  Plan plan = make_plan(call.desc);
  ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  args.sequences = {};
  args.sequences.cu_seqlens = offsets;
  ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  EXPECT_EQ(pool.changes_outside(call.pool), "");
  EXPECT_EQ(out.changes_outside(call.out), "");
}

// Unbatched tensors of no rows and without offsets are one empty sequence; no tensor needs memory.
TEST_P(SequencesTest, Z02_G08_NoRowsWithoutOffsets) {
  for (const int64_t slot : {1, -1}) {
    PrefillCall call(ledger({}, {}, 2), backend());
    call.use_pool(3, {slot});
    call.desc.max_sequences = 1;
    call.desc.initial_state = KDA_INITIAL_FLAGS;
    call.flags = Tensor::flags({0});
    kda_prefill_args args = call.args();
    args.sequences = {};
    for (kda_tensor* t : {&args.q, &args.k, &args.v, &args.gate, &args.beta, &args.out}) t->data = nullptr;
    const Snapshot pool(call.pool);
    Plan plan = make_plan(call.desc);
    ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
    if (slot < 0) {
      EXPECT_EQ(pool.changes_outside(call.pool), "");
      continue;
    }
    EXPECT_EQ(pool.changes_outside(call.pool, {slot}), "");
    for (const double x : call.slot(slot)) ASSERT_EQ(x, 0);
  }
}

// Supplied chunk tables change no bit, exact or padded, whatever their dtypes.
TEST_P(SequencesTest, M20_SuppliedChunkTablesChangeNoBit) {
  const Problem p = inputs({70, 0, 128, 1});
  PrefillCall plain(p, backend()), given(p, backend());
  plain.final_state = given.final_state = Tensor(KDA_FP32, {4, 2, 128, 128});
  ASSERT_EQ(plain.run(), KDA_OK) << plain.message;
  given.desc.flags = KDA_PLAN_CHECKED;
  Plan plan = make_plan(given.desc);
  for (const kda_dtype dtype : {KDA_INT32, KDA_INT64}) {
    for (const int64_t rows : {5, 7}) {
      Tensor indices = Tensor::full(dtype, {rows, 2}, -1);
      indices.assign(rows == 5 ? std::vector<double>{0, 0, 0, 1, 2, 0, 2, 1, 3, 0}
                               : std::vector<double>{0, 0, 0, 1, 2, 0, 2, 1, 3, 0, -1, -1, -1, -1});
      const Tensor offsets = Tensor::ints({0, 2, 2, 4, 5}, dtype == KDA_INT32 ? KDA_INT64 : KDA_INT32);
      kda_prefill_args args = given.args();
      args.chunk_indices = indices;
      args.chunk_offsets = offsets;
      ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
      EXPECT_EQ(first_difference(plain.out, given.out), "");
      EXPECT_EQ(first_difference(plain.final_state, given.final_state), "");
    }
  }
}

TEST_P(SequencesTest, F20_RowsOfNoSequence) {
  Problem p = inputs({70});
  const Problem only = p;
  const auto longer = [](const Tensor& x) {
    Shape shape = x.shape();
    shape[0] = 96;
    Tensor t = Tensor::full(x.dtype(), shape, NAN);
    assign(narrow(t, 0, 0, 70), x.values());
    return t;
  };
  p.q = longer(p.q);
  p.k = longer(p.k);
  p.v = longer(p.v);
  p.gate = longer(p.gate);
  p.beta = longer(p.beta);
  PrefillCall reference(only, backend()), call(p, backend());
  reference.final_state = call.final_state = Tensor(KDA_FP32, {1, 2, 128, 128});
  call.out.fill(7);
  ASSERT_EQ(reference.run(), KDA_OK) << reference.message;
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(first_difference(narrow(call.out, 0, 0, 70), reference.out), "");
  EXPECT_EQ(first_difference(call.final_state, reference.final_state), "");
  for (const double x : rows(call.out, 70, 26)) EXPECT_EQ(x, 7);

  // An offset above the row count is clamped on the device (P-13) and reported in checked mode.
  PrefillCall beyond(only, backend());
  beyond.final_state = Tensor(KDA_FP32, {1, 2, 128, 128});
  beyond.offsets = Tensor::ints({0, 97});
  ASSERT_EQ(beyond.run(), KDA_OK) << beyond.message;
  EXPECT_EQ(first_difference(beyond.final_state, reference.final_state), "");
  beyond.desc.flags = KDA_PLAN_CHECKED;
  EXPECT_EQ(beyond.run(), KDA_INVALID_ARGUMENT);
  EXPECT_NE(beyond.message.find("97"), std::string::npos) << beyond.message;
}

TEST_P(SequencesTest, P13_BadOffsetsTouchNoRowOutside) {
  const Problem p = inputs({10, 10});
  const std::vector<std::vector<int64_t>> bad = {{0, -5, 20}, {0, 15, 5}, {0, 1 << 30, -(1 << 30)}};
  for (const std::vector<int64_t>& cu : bad) {
    PrefillCall call(p, backend());
    call.use_pool(4, {1, 2});
    call.offsets = Tensor::ints(cu);
    const Snapshot pool(call.pool);
    ASSERT_EQ(call.run(), KDA_OK) << call.message;
    EXPECT_EQ(call.out.guard_report(), "");
    EXPECT_EQ(pool.changes_outside(call.pool, {1, 2}), "");
  }
  PrefillCall ranges(p, backend());
  ranges.use_pool(4, {1, 2});
  ranges.begin = Tensor::ints({-3, 15}, KDA_INT64);
  ranges.length = Tensor::ints({10, int64_t{1} << 40}, KDA_INT64);
  ASSERT_EQ(ranges.run(), KDA_OK) << ranges.message;
  EXPECT_EQ(ranges.out.guard_report(), "");
}

TEST_P(SequencesTest, P12_RangesGiveTheBitsOfOffsets) {
  const std::vector<int64_t> lengths = {5, 0, 67, 1};
  const Problem p = inputs(lengths);
  PrefillCall a(p, backend()), b(p, backend());
  a.final_state = b.final_state = Tensor(KDA_FP32, {4, 2, 128, 128});
  b.begin = Tensor::ints({0, 5, 5, 72}, KDA_INT64);
  b.length = Tensor::ints(lengths, KDA_INT32);
  ASSERT_EQ(a.run(), KDA_OK) << a.message;
  ASSERT_EQ(b.run(), KDA_OK) << b.message;
  EXPECT_EQ(first_difference(a.out, b.out), "");
  EXPECT_EQ(first_difference(a.final_state, b.final_state), "");
}

TEST_P(SequencesTest, F22_P10_NaNStaysInItsSequence) {
  const std::vector<int64_t> lengths = {5, 7, 9};
  const Problem clean = inputs(lengths);
  const auto run = [&](const Problem& p) {
    PrefillCall call(p, backend());
    call.use_pool(4, {1, 2, 3});
    EXPECT_EQ(call.run(), KDA_OK) << call.message;
    return call;
  };
  const PrefillCall reference = run(clean);
  Problem dirty_value = clean;
  dirty_value.v.set({5 + 3, 0, 17}, NAN);
  dirty_value.v.set({5 + 3, 1, 17}, NAN);
  Problem dirty_state = clean;
  dirty_state.state.set({1, 0, 4, 4}, NAN);
  for (const Problem* p : {&dirty_value, &dirty_state}) {
    const PrefillCall call = run(*p);
    for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 5}, {12, 9}}) {
      EXPECT_EQ(first_difference(narrow(call.out, 0, begin, count), narrow(reference.out, 0, begin, count)), "");
    }
    for (const int64_t slot : {1, 3}) {
      EXPECT_EQ(first_difference(select(call.pool, 0, slot), select(reference.pool, 0, slot)), "");
    }
    if (p == &dirty_value) {
      EXPECT_EQ(first_difference(narrow(call.out, 0, 5, 3), narrow(reference.out, 0, 5, 3)), "");
      EXPECT_TRUE(std::isnan(call.out.get({8, 0, 17})));
    }
    bool nan = false;
    for (const double x : call.slot(2)) nan = nan || std::isnan(x);
    EXPECT_TRUE(nan);

    // The slot reused as fresh: the bits of a clean slot.
    PrefillCall reuse(clean, backend()), fresh(clean, backend());
    reuse.use_pool(4, {1, 2, 3});
    fresh.use_pool(4, {1, 2, 3});
    assign(select(reuse.pool, 0, 2), call.slot(2));
    for (PrefillCall* c : {&reuse, &fresh}) {
      c->desc.initial_state = KDA_INITIAL_FLAGS;
      c->flags = Tensor::flags({1, 0, 1});
      ASSERT_EQ(c->run(), KDA_OK) << c->message;
    }
    EXPECT_EQ(first_difference(reuse.out, fresh.out), "");
    EXPECT_EQ(first_difference(reuse.pool, fresh.pool), "");
  }
}

TEST_P(SequencesTest, F41_NothingCachedByAddress) {
  const Problem p = ledger({65, 5}, iota(70), 1);
  PrefillCall call(p, backend());
  call.use_pool(2, {0, 1});
  Plan plan = make_plan(call.desc);
  for (const int64_t cut_at : {65, 5, 64}) {
    // The same tensors and addresses, edited in place.
    const Tensor cu = Tensor::ints({0, cut_at, 70});
    assign(call.offsets, cu.values());
    ASSERT_EQ(plan.run(call.args()), KDA_OK) << plan.message();
    expect_ledger(call.slot(0), iota(cut_at));
    expect_ledger(call.slot(1), iota(70 - cut_at, cut_at));
  }
}

TEST_P(SequencesTest, F44_P10_FreshAndEmpty) {
  Problem p = ledger({0, 0, 0}, {}, 2);
  PrefillCall call(p, backend());
  call.use_pool(4, {1, 2, -1});
  call.desc.initial_state = KDA_INITIAL_FLAGS;
  call.flags = Tensor::flags({0, 1, 1});
  const Snapshot before(call.pool);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.pool, {1}), "");
  for (const double x : call.slot(1)) EXPECT_EQ(x, 0);
}

TEST_P(SequencesTest, P11_EmptyIntoAnotherSlotCopiesTheBits) {
  Problem p = ledger({0, 0}, {}, 2);
  PrefillCall call(p, backend());
  call.use_pool(4, {1, 2});
  call.desc.initial_state = KDA_INITIAL_ALL;
  call.write_slots = Tensor::ints({3, -1});
  const Snapshot before(call.pool);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.pool, {3}), "");
  EXPECT_EQ(first_difference(select(call.pool, 0, 3), select(call.pool, 0, 1)), "");
}

TEST_P(SequencesTest, F51_P07_RowsBehindTheActiveCount) {
  // A bucket of 8 sequences holding 5, stale indices and offsets behind.
  const Problem p = ledger({1, 1, 1, 1, 1, 1, 1, 1}, iota(8), 2);
  PrefillCall call(p, backend());
  call.use_pool(7, {2, 4, 6, 1, 3, 2, 2, 2});
  for (int64_t s = 0; s < 7; ++s) fill(select(call.pool, 0, s), 0);
  call.desc.initial_state = KDA_INITIAL_ALL;
  call.offsets = Tensor::ints({0, 1, 2, 3, 4, 5, 90, -7, 99});
  call.active = Tensor::ints({5});
  call.out.fill(7);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  const int64_t ids[] = {2, 4, 6, 1, 3};
  for (int64_t n = 0; n < 5; ++n) expect_ledger(call.slot(ids[n]), {n});
  for (const int64_t s : {0, 5}) expect_ledger(call.slot(s), {});
  for (const double x : rows(call.out, 5, 3)) EXPECT_EQ(x, 7);  // not looked at (P-7)
  // A duplicate among active rows is reported in checked mode.
  call.desc.flags = KDA_PLAN_CHECKED;
  call.slots = Tensor::ints({2, 2, 6, 1, 3, 2, 2, 2});
  EXPECT_EQ(call.run(), KDA_INVALID_ARGUMENT);
  EXPECT_NE(call.message.find("slot 2"), std::string::npos) << call.message;
}

TEST_P(SequencesTest, R41_OutputRows) {
  const Problem p = inputs({6, 4});
  PrefillCall plain(p, backend()), scattered(p, backend());
  plain.final_state = scattered.final_state = Tensor(KDA_FP32, {2, 2, 128, 128});
  ASSERT_EQ(plain.run(), KDA_OK) << plain.message;
  const std::vector<int64_t> to = {11, 3, 0, -1, 9, 12, 1, 10, int64_t{1} << 40, 5};
  scattered.out = Tensor::full(KDA_BF16, {12, 2, 128}, 7);
  scattered.out_rows = Tensor::ints(to, KDA_INT64);
  ASSERT_EQ(scattered.run(), KDA_OK) << scattered.message;
  std::vector<bool> written(12, false);
  for (size_t r = 0; r < to.size(); ++r) {
    if (to[r] < 0 || to[r] >= 12) continue;
    written[static_cast<size_t>(to[r])] = true;
    EXPECT_EQ(first_difference(narrow(scattered.out, 0, to[r], 1), narrow(plain.out, 0, static_cast<int64_t>(r), 1)),
              "");
  }
  for (int64_t r = 0; r < 12; ++r) {
    if (written[static_cast<size_t>(r)]) continue;
    for (const double x : rows(scattered.out, r, 1)) EXPECT_EQ(x, 7);
  }
  EXPECT_EQ(first_difference(plain.final_state, scattered.final_state), "");
  EXPECT_EQ(scattered.out.guard_report(), "");
}

TEST_P(SequencesTest, Z07_R63_BoundsAreChecked) {
  const Problem p = inputs({6, 4});
  PrefillCall call(p, backend());
  call.use_pool(4, {0, 1});
  const Snapshot before(call.pool);
  call.desc.max_tokens = 9;
  EXPECT_EQ(call.run(), KDA_INVALID_ARGUMENT);
  EXPECT_NE(call.message.find("9"), std::string::npos);
  EXPECT_NE(call.message.find("10"), std::string::npos);
  call.desc.max_tokens = 10;
  call.desc.max_sequences = 1;
  EXPECT_EQ(call.run(), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(before.changes_outside(call.pool), "");
}

TEST_P(SequencesTest, Z08_R35_WorkspaceOneByteShort) {
  const Problem p = inputs({6, 4});
  PrefillCall call(p, backend());
  call.use_pool(4, {0, 1});
  Plan plan = make_plan(call.desc);
  const size_t bytes = plan.workspace_bytes();
  if (bytes == 0) GTEST_SKIP() << "this candidate needs no workspace";
  std::vector<unsigned char> memory(bytes + 512);
  auto* base = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  const Snapshot before(call.pool);
  const kda_prefill_args args = call.args();
  EXPECT_EQ(kda_prefill_run(plan.get(), &args, {base, bytes - 1}, nullptr), KDA_WORKSPACE_TOO_SMALL);
  const std::string message = kda_last_error();
  EXPECT_NE(message.find(std::to_string(bytes)), std::string::npos) << message;
  EXPECT_NE(message.find(std::to_string(bytes - 1)), std::string::npos) << message;
  EXPECT_EQ(kda_prefill_run(plan.get(), &args, {base + 64, bytes}, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(before.changes_outside(call.pool), "");
}

TEST_P(SequencesTest, G09_OutputOverAnInputIsRefused) {
  Problem p = inputs({6});
  PrefillCall call(p, backend());
  kda_prefill_args args = call.args();
  args.out = args.v;
  Plan plan = make_plan(call.desc);
  EXPECT_EQ(plan.run(args), KDA_INVALID_ARGUMENT);
  EXPECT_NE(plan.message().find("out"), std::string::npos) << plan.message();
}

TEST_P(SequencesTest, F26_R32_R63_LengthsAtThePlansBounds) {
  // 127 sequences of 16, 32, 64, 16, ...: T and N exactly at the bounds; the guarded workspace is checked by Plan.
  std::vector<int64_t> lengths;
  for (int i = 0; i < 127; ++i) lengths.push_back(i % 3 == 0 ? 16 : i % 3 == 1 ? 32 : 64);
  FieldInput input;
  input.lengths = lengths;
  input.heads = 1;
  input.key_dim = input.value_dim = 32;
  input.beta_scale = 3;
  const Problem p = field_problem(input);
  PrefillOptions options;
  options.backend = backend();
  const Outcome r = prefill(p, options), reference = oracle(p);
  ASSERT_EQ(r.status, KDA_OK) << r.message;
  EXPECT_WITHIN(compare_outputs(r.out.values(), reference.out.values(), lengths, 1, 32), limits(KDA_BF16).out);
  EXPECT_WITHIN(compare_states(r.state.values(), reference.state.values(), 1, 32 * 32), limits(KDA_BF16).state);
}

}  // namespace kda::conformance::test

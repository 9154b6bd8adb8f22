// Slots, pools, flags, counts and checkpoints of the CPU prefill (P, K-1..K-6, F18..F24, F35..F51), on every ISA.
// The data are ledger tokens: token t is absorbed into column t of the state, which then reads 0.5 there.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>

#include "conformance/compare.h"
#include "unit/cpu/isa_contexts.h"

namespace kda::conformance::test {
namespace {

constexpr int64_t kK = 128, kV = 20;

struct StepSetup {
  std::vector<int64_t> lengths;
  int64_t heads = 2;
  kda_initial_state initial = KDA_INITIAL_ALL;
  int64_t null_slot = -1;
  int64_t max_checkpoints = 0;
  kda_dtype pool = KDA_FP32;
};

// One step of ledger tokens over a pool, all of it the test's to change before run().
class Step {
 public:
  Step(const StepSetup& s, const std::string& isa) : heads(s.heads) {
    cu_values = {0};
    for (int64_t n : s.lengths) cu_values.push_back(cu_values.back() + n);
    const int64_t T = cu_values.back();
    kda_prefill_desc d;
    kda_prefill_desc_init(&d);
    d.attention.num_heads = s.heads;
    d.attention.key_dim = kK;
    d.attention.value_dim = kV;
    d.attention.io_dtype = KDA_FP32;
    d.attention.state_dtype = s.pool;
    d.attention.gate_family = KDA_GATE_PLAIN;
    d.attention.beta_form = KDA_BETA_PLAIN;
    d.attention.no_qk_norm = 1;
    d.attention.scale = 1;
    d.backend = "portable";
    d.max_tokens = T;
    d.max_sequences = static_cast<int64_t>(s.lengths.size());
    d.initial_state = s.initial;
    d.null_slot = s.null_slot;
    d.max_checkpoints = s.max_checkpoints;
    plan = make_plan(d, isa_context(isa));
    EXPECT_TRUE(plan.ok()) << plan.message();
    k = Tensor::full(KDA_FP32, {T, heads, kK}, 0);
    for (size_t n = 0; n < s.lengths.size(); ++n) {
      for (int64_t t = 0; t < s.lengths[n]; ++t) {
        for (int64_t h = 0; h < heads; ++h) k.set({cu_values[n] + t, h, t % kK}, 1);
      }
    }
    q = k;
    v = Tensor::full(KDA_FP32, {T, heads, kV}, 1);
    gate = Tensor::full(KDA_FP32, {T, heads, kK}, 0);
    beta = Tensor::full(KDA_FP32, {T, heads}, 0.5);
    out = Tensor::full(KDA_FP32, {T, heads, kV}, 7);
    cu = Tensor::ints(cu_values);
  }

  void run() {
    auto args = sized<kda_prefill_args>();
    args.q = q;
    args.k = k;
    args.v = v;
    args.gate = gate;
    args.beta = beta;
    args.sequences.cu_seqlens = cu;
    args.sequences.num_active = num_active;
    args.state = pool;
    args.slots = slots;
    args.write_slots = write_slots;
    args.has_initial_state = flags;
    args.final_state = final_state;
    args.no_final_state = no_final_state;
    args.checkpoint_offsets = checkpoint_offsets;
    args.checkpoint_slots = checkpoint_slots;
    args.checkpoint_states = checkpoint_states;
    args.out = out;
    ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
  }

  // Rows of sequence n are `x` in every element.
  void expect_rows(int64_t n, double x) const {
    const int64_t begin = cu_values[static_cast<size_t>(n)], end = cu_values[static_cast<size_t>(n) + 1];
    for (double y : values(narrow(out, 0, begin, end - begin))) ASSERT_NEAR(y, x, 1e-6) << "sequence " << n;
  }

  int64_t heads;
  std::vector<int64_t> cu_values;
  Plan plan;
  Tensor q, k, v, gate, beta, out, cu, num_active, pool, slots, write_slots, flags, final_state;
  Tensor checkpoint_offsets, checkpoint_slots, checkpoint_states;
  int32_t no_final_state = 0;
};

// Every column of a state: 0.5 once absorbed, 0 never.
void expect_ledger(const kda_tensor& state, int64_t tokens) {
  for (int64_t c = 0; c < kK; ++c) {
    for (double x : values(narrow(state, state.rank - 1, c, 1))) {
      ASSERT_NEAR(x, c < tokens ? 0.5 : 0.0, 1e-6) << "column " << c << " after " << tokens << " tokens";
    }
  }
}

class Pools : public testing::TestWithParam<std::string> {};

}  // namespace

INSTANTIATE_TEST_SUITE_P(Isa, Pools, testing::ValuesIn(isas()), [](const auto& p) { return p.param; });

TEST_P(Pools, F42_DeadSlotsAreNotTouchedAndTheirRowsAreZero) {
  for (int64_t dead : {int64_t{-1}, int64_t{5}, int64_t{INT32_MIN}, int64_t{1} << 31}) {
    StepSetup setup{{3, 4}};
    setup.initial = KDA_INITIAL_FLAGS;
    Step s(setup, GetParam());
    s.pool = canary_pool(KDA_FP32, {5, 2, kV, kK});
    s.slots = Tensor::of(KDA_INT64, {2}, {static_cast<double>(dead), 3});
    s.flags = Tensor::flags({1, 0});
    const Snapshot before(s.pool);
    s.run();
    s.expect_rows(0, 0);
    s.expect_rows(1, 0.5);
    expect_ledger(select(s.pool, 0, 3), 4);
    EXPECT_EQ(before.changes_outside(s.pool, {3}), "");
  }
}

TEST_P(Pools, F43_SlotZeroIsOrdinaryUnlessItIsTheNullSlot) {
  for (kda_dtype dtype : {KDA_FP32, KDA_BF16}) {
    for (int64_t null_slot : {-1, 0}) {
      StepSetup setup{{1, 1, 1}};
      setup.null_slot = null_slot;
      setup.pool = dtype;
      Step s(setup, GetParam());
      s.pool = canary_pool(dtype, {2, 2, kV, kK});
      fill(select(s.pool, 0, 0), 0);
      s.slots = Tensor::ints({-1, 0, -1});
      const Snapshot before(s.pool);
      s.run();
      s.expect_rows(0, 0);
      s.expect_rows(2, 0);
      s.expect_rows(1, null_slot == 0 ? 0 : 0.5);
      if (null_slot == 0) {
        EXPECT_EQ(before.changes_outside(s.pool), "");
      } else {
        EXPECT_EQ(before.changes_outside(s.pool, {0}), "");
        expect_ledger(select(s.pool, 0, 0), 1);
      }
    }
  }
}

TEST_P(Pools, F44_FreshAndEmpty) {
  StepSetup setup{{0, 0, 0}};
  setup.initial = KDA_INITIAL_FLAGS;
  Step s(setup, GetParam());
  s.pool = canary_pool(KDA_FP32, {4, 2, kV, kK});
  s.slots = Tensor::ints({1, 2, -1});
  s.flags = Tensor::flags({0, 1, 0});
  const Snapshot before(s.pool);
  s.run();
  for (double x : values(select(s.pool, 0, 1))) ASSERT_EQ(x, 0);
  EXPECT_EQ(before.changes_outside(s.pool, {1}), "");
}

TEST_P(Pools, P11_AnEmptySequenceCarriesItsStateToItsWriteSlot) {
  for (kda_dtype dtype : {KDA_FP32, KDA_FP16}) {
    StepSetup setup{{0, 0}};
    setup.initial = KDA_INITIAL_FLAGS;
    setup.pool = dtype;
    Step s(setup, GetParam());
    s.pool = canary_pool(dtype, {6, 2, kV, kK});
    s.slots = Tensor::ints({1, 2});
    s.write_slots = Tensor::ints({4, 5});
    s.flags = Tensor::flags({1, 0});
    const Snapshot before(s.pool);
    s.run();
    EXPECT_TRUE(same_bits(select(s.pool, 0, 4), select(s.pool, 0, 1)));
    for (double x : values(select(s.pool, 0, 5))) ASSERT_EQ(x, 0);
    EXPECT_EQ(before.changes_outside(s.pool, {4, 5}), "");
    // Packed fp32 final states widen the pool's.
    s.write_slots = Tensor();
    s.final_state = Tensor(KDA_FP32, {2, 2, kV, kK});
    s.run();
    EXPECT_EQ(values(select(s.final_state, 0, 0)), values(select(s.pool, 0, 1)));
    for (double x : values(select(s.final_state, 0, 1))) ASSERT_EQ(x, 0);
  }
}

TEST_P(Pools, F51_RowsBehindTheActiveCountAreNotLookedAt) {
  StepSetup setup{{1, 1, 1, 1, 1, 1, 1, 1}};
  setup.initial = KDA_INITIAL_FLAGS;
  Step s(setup, GetParam());
  s.pool = canary_pool(KDA_FP32, {8, 2, kV, kK});
  s.slots = Tensor::ints({2, 4, 6, 1, 3, 2, 2, 2});
  s.flags = Tensor::flags({0, 0, 0, 0, 0, 0, 0, 0});
  s.num_active = Tensor::ints({5});
  const Snapshot before(s.pool);
  s.run();
  for (int64_t slot : {1, 2, 3, 4, 6}) expect_ledger(select(s.pool, 0, slot), 1);
  EXPECT_EQ(before.changes_outside(s.pool, {1, 2, 3, 4, 6}), "");
  for (int64_t n = 0; n < 8; ++n) s.expect_rows(n, n < 5 ? 0.5 : 7);
}

TEST_P(Pools, P08_WriteSlots) {
  StepSetup setup{{2, 3, 4}};
  setup.initial = KDA_INITIAL_FLAGS;
  Step s(setup, GetParam());
  s.pool = canary_pool(KDA_FP32, {6, 2, kV, kK});
  fill(select(s.pool, 0, 0), 0);
  fill(select(s.pool, 0, 1), 0);
  s.slots = Tensor::ints({0, 1, -1});        // the fresh one needs no read slot
  s.write_slots = Tensor::ints({4, -7, 5});  // the second stores nothing
  s.flags = Tensor::flags({1, 1, 0});
  const Snapshot before(s.pool);
  s.run();
  for (int64_t n = 0; n < 3; ++n) s.expect_rows(n, 0.5);
  expect_ledger(select(s.pool, 0, 4), 2);
  expect_ledger(select(s.pool, 0, 5), 4);
  EXPECT_EQ(before.changes_outside(s.pool, {4, 5}), "");
}

TEST_P(Pools, F20_MoreRowsThanOffsets) {
  StepSetup setup{{70, 26}};
  Step s(setup, GetParam());
  s.cu = Tensor::ints({0, 70});
  for (Tensor* x : {&s.q, &s.k, &s.v, &s.gate, &s.beta}) fill(narrow(*x, 0, 70, 26), std::nan(""));
  s.pool = Tensor::full(KDA_FP32, {1, 2, kV, kK}, 0);
  s.slots = Tensor::ints({0});
  s.run();
  s.expect_rows(0, 0.5);
  s.expect_rows(1, 7);
  expect_ledger(select(s.pool, 0, 0), 70);
  // Offsets above the row count are clamped (P-13).
  Step t({{70}}, GetParam());
  t.cu = Tensor::ints({0, 97});
  t.pool = Tensor::full(KDA_FP32, {1, 2, kV, kK}, 0);
  t.slots = Tensor::ints({0});
  t.run();
  expect_ledger(select(t.pool, 0, 0), 70);
}

TEST_P(Pools, F35_PaddedPool) {
  for (kda_dtype dtype : {KDA_FP32, KDA_BF16}) {
    StepSetup setup{{3, 5}};
    setup.pool = dtype;
    Step s(setup, GetParam());
    s.pool = canary_pool(dtype, {5, 2, kV, kK}, 2 * kV * kK + 1111, 999);
    fill(select(s.pool, 0, 3), 0);
    fill(select(s.pool, 0, 1), 0);
    s.slots = Tensor::ints({3, 1});
    const Snapshot before(s.pool);
    s.run();
    expect_ledger(select(s.pool, 0, 3), 3);
    expect_ledger(select(s.pool, 0, 1), 5);
    EXPECT_EQ(before.changes_outside(s.pool, {1, 3}), "");
    EXPECT_EQ(s.pool.guard_report(), "");
  }
}

TEST_P(Pools, F24_PoolOffsetsPast2To31) {
  // Slots 2^30 elements apart, in reserved memory of which a few pages are touched.
  const int64_t stride = int64_t{1} << 30, payload = 2 * kV * kK;
  const size_t bytes = static_cast<size_t>(3 * stride + payload) * sizeof(float);
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space";
  StepSetup setup{{2, 3}};
  Step s(setup, GetParam());
  auto args = sized<kda_prefill_args>();
  kda_tensor pool{};
  pool.data = memory;
  pool.dtype = KDA_FP32;
  pool.rank = 4;
  const int64_t shape[] = {4, 2, kV, kK}, strides[] = {stride, kV * kK, kK, 1};
  std::copy(shape, shape + 4, pool.shape);
  std::copy(strides, strides + 4, pool.strides);
  s.slots = Tensor::ints({3, 2});
  args.q = s.q;
  args.k = s.k;
  args.v = s.v;
  args.gate = s.gate;
  args.beta = s.beta;
  args.sequences.cu_seqlens = s.cu;
  args.state = pool;
  args.slots = s.slots;
  args.out = s.out;
  ASSERT_EQ(s.plan.run(args), KDA_OK) << s.plan.message();
  expect_ledger(select(pool, 0, 3), 2);
  expect_ledger(select(pool, 0, 2), 3);
  for (int64_t slot : {0, 1}) {
    for (double x : values(select(pool, 0, slot))) ASSERT_EQ(x, 0);
  }
  munmap(memory, bytes);
}

TEST_P(Pools, F58_InnerBoundariesIntoSlots) {
  const std::vector<int64_t> lengths = {0, 1, 63, 64, 65, 128, 130};
  StepSetup setup{lengths};
  setup.initial = KDA_INITIAL_NONE;
  setup.max_checkpoints = 2;
  Step s(setup, GetParam());
  s.pool = canary_pool(KDA_FP32, {30, 2, kV, kK});
  s.slots = Tensor::ints({0, 1, 2, 3, 4, 5, 6});
  std::vector<double> offsets, slots;
  std::vector<int64_t> written = {0, 1, 2, 3, 4, 5, 6};
  for (size_t n = 0; n < lengths.size(); ++n) {
    for (int64_t c = 1; c <= 2; ++c) {
      offsets.push_back(static_cast<double>(64 * c));
      slots.push_back(static_cast<double>(8 + 2 * static_cast<int64_t>(n) + c));
      if (64 * c <= lengths[n]) written.push_back(static_cast<int64_t>(slots.back()));
    }
  }
  s.checkpoint_offsets = Tensor::of(KDA_INT32, {7, 2}, offsets);
  s.checkpoint_slots = Tensor::of(KDA_INT64, {7, 2}, slots);
  const Snapshot before(s.pool);
  s.run();
  EXPECT_EQ(before.changes_outside(s.pool, written), "");
  for (size_t n = 0; n < lengths.size(); ++n) {
    for (int64_t c = 1; 64 * c <= lengths[n]; ++c) {
      expect_ledger(select(s.pool, 0, 8 + 2 * static_cast<int64_t>(n) + c), 64 * c);
    }
  }
  // Column 0 and 1 of the last final state are absorbed twice.
  EXPECT_NEAR(s.pool.get({6, 1, 5, 0}), 0.75, 1e-6);
  EXPECT_NEAR(s.pool.get({6, 1, 5, 1}), 0.75, 1e-6);
  EXPECT_NEAR(s.pool.get({6, 1, 5, 2}), 0.5, 1e-6);
}

TEST_P(Pools, K03_DeadCheckpointSlotsAreSkipped) {
  StepSetup setup{{20}};
  setup.initial = KDA_INITIAL_NONE;
  setup.max_checkpoints = 4;
  setup.null_slot = 0;
  Step s(setup, GetParam());
  s.pool = canary_pool(KDA_FP32, {5, 2, kV, kK});
  s.slots = Tensor::ints({1});
  s.checkpoint_offsets = Tensor::of(KDA_INT32, {1, 4}, {7, 7, 7, 7});
  s.checkpoint_slots = Tensor::of(KDA_INT32, {1, 4}, {-1, 0, 5, 3});
  const Snapshot before(s.pool);
  s.run();
  EXPECT_EQ(before.changes_outside(s.pool, {1, 3}), "");
  expect_ledger(select(s.pool, 0, 3), 7);
  expect_ledger(select(s.pool, 0, 1), 20);
}

TEST_P(Pools, R03_WithoutAFinalDestinationNoneIsWritten) {
  Step s({{9, 4}}, GetParam());
  s.pool = canary_pool(KDA_FP32, {3, 2, kV, kK});
  s.slots = Tensor::ints({0, 2});
  s.no_final_state = 1;
  const Snapshot before(s.pool);
  s.run();
  EXPECT_EQ(before.changes_outside(s.pool), "");
}

}  // namespace kda::conformance::test

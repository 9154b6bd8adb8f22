// Checkpoints inside a prefill: F58, F59, K-1..K-5, H-12.
#include "harness.h"

namespace kda::conformance::test {

class CheckpointsTest : public BackendTest {};
KDA_FOR_BACKENDS(CheckpointsTest);

TEST_P(CheckpointsTest, F58_K02_InnerBoundaries) {
  const std::vector<int64_t> lengths = {0, 1, 63, 64, 65, 128, 130};
  std::vector<int64_t> tokens;
  for (int64_t n : lengths) {
    for (int64_t t = 0; t < n; ++t) tokens.push_back(t);
  }
  PrefillCall call(ledger(lengths, tokens, 1), backend());
  call.use_pool(16, iota(7));
  call.desc.max_checkpoints = 2;
  call.checkpoint_offsets = Tensor(KDA_INT32, {7, 2});
  call.checkpoint_slots = Tensor(KDA_INT64, {7, 2});
  call.checkpoint_offsets.fill(0);
  call.checkpoint_slots.fill(-1);
  const auto ask = [&](int64_t n, int64_t c, int64_t offset, int64_t slot) {
    call.checkpoint_offsets.set({n, c}, static_cast<double>(offset));
    call.checkpoint_slots.set({n, c}, static_cast<double>(slot));
  };
  ask(3, 0, 64, 7);
  ask(4, 0, 64, 8);
  ask(5, 0, 64, 9);
  ask(5, 1, 128, 10);
  ask(6, 0, 64, 11);
  ask(6, 1, 128, 12);
  const Snapshot before(call.pool);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.pool, iota(13)), "");
  for (const int64_t s : {7, 8, 9, 11}) expect_ledger(call.slot(s), iota(64));
  for (const int64_t s : {10, 12}) expect_ledger(call.slot(s), iota(128));
  expect_ledger(call.slot(6), iota(126, 2), {0, 1});  // columns 0 and 1 twice

  // Asking for them changed no other bit (K-5).
  PrefillCall plain(call.p, backend());
  plain.use_pool(16, iota(7));
  ASSERT_EQ(plain.run(), KDA_OK) << plain.message;
  EXPECT_EQ(first_difference(plain.out, call.out), "");
  for (int64_t n = 0; n < 7; ++n) EXPECT_EQ(first_difference(select(plain.pool, 0, n), select(call.pool, 0, n)), "");

  // More columns than the plan allows are refused on the host (Z-7).
  call.desc.max_checkpoints = 1;
  EXPECT_EQ(call.run(), KDA_INVALID_ARGUMENT);
}

TEST_P(CheckpointsTest, F59_K02_K04_H12_EqualToTheRunThatEndsThere) {
  FieldInput input;
  input.lengths = {384, 100};
  input.heads = 2;
  input.gate_scale = 4;
  input.beta_scale = 3;
  input.state_scale = 0.5;
  const Problem p = field_problem(input);
  const std::vector<std::vector<int64_t>> offsets = {{16, 1}, {40, 100}, {128, 256}, {0, 384}, {383, 63}, {-1, 385}};
  for (const std::vector<int64_t>& asked : offsets) {
    for (const kda_dtype target : {KDA_FP32, KDA_BF16}) {
      const kda_dtype index = target == KDA_FP32 ? KDA_INT32 : KDA_INT64;
      SCOPED_TRACE(testing::Message() << "offsets " << asked[0] << ", " << asked[1] << " target " << target);
      PrefillCall call(p, backend());
      call.use_pool(4, {2, 0}, target);
      call.desc.max_checkpoints = 2;
      call.desc.initial_state = KDA_INITIAL_ALL;
      call.checkpoint_offsets = Tensor(index, {2, 2});
      call.checkpoint_offsets.assign({static_cast<double>(asked[0]), static_cast<double>(asked[1]),
                                      static_cast<double>(asked[1]), static_cast<double>(asked[0])});
      call.checkpoint_states = Tensor(target, {2, 2, 2, 128, 128});
      const PrefillCall start = call;
      ASSERT_EQ(call.run(), KDA_OK) << call.message;
      const int64_t lengths[] = {384, 100}, begins[] = {0, 384};
      for (int64_t n = 0; n < 2; ++n) {
        for (int64_t c = 0; c < 2; ++c) {
          const auto offset = static_cast<int64_t>(call.checkpoint_offsets.get({n, c}));
          const kda_tensor got = select(select(call.checkpoint_states, 0, n), 0, c);
          if (offset <= 0 || offset > lengths[n]) {
            // Nothing is written (K-3): the poison is still there.
            EXPECT_EQ(first_difference(got, Tensor(target, {2, 128, 128})), "");
            continue;
          }
          PrefillCall ending(cut(p, begins[n], offset), backend());
          ending.desc.attention.state_dtype = target;
          ending.desc.initial_state = KDA_INITIAL_ALL;
          ending.pool = start.pool;
          ending.slots = Tensor::ints({n == 0 ? 2 : 0});
          ASSERT_EQ(ending.run(), KDA_OK) << ending.message;
          EXPECT_EQ(first_difference(got, select(ending.pool, 0, n == 0 ? 2 : 0)), "") << "offset " << offset;
        }
      }
    }
  }
}

TEST_P(CheckpointsTest, K03_DeadDestinationsAndInactiveSequences) {
  PrefillCall call(ledger({4, 4, 4}, iota(12), 1), backend());
  call.use_pool(6, {0, -1, 2});
  call.desc.max_checkpoints = 1;
  call.desc.null_slot = 5;
  call.checkpoint_offsets = Tensor::of(KDA_INT32, {3, 1}, {2, 2, 3});
  call.checkpoint_slots = Tensor::of(KDA_INT32, {3, 1}, {5, 3, 4});  // null slot; of an inactive sequence; live
  const Snapshot before(call.pool);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.pool, {0, 2, 4}), "");
  expect_ledger(call.slot(4), {8, 9, 10});
  // Checked mode reports an offset past the end.
  call.desc.flags = KDA_PLAN_CHECKED;
  call.checkpoint_offsets.set({2, 0}, 5);
  EXPECT_EQ(call.run(), KDA_INVALID_ARGUMENT);
}

TEST_P(CheckpointsTest, K01_OffsetsAndDestinationGoTogether) {
  PrefillCall call(ledger({4}, iota(4), 1), backend());
  call.use_pool(3, {0});
  call.desc.max_checkpoints = 1;
  call.checkpoint_offsets = Tensor::of(KDA_INT32, {1, 1}, {2});
  EXPECT_EQ(call.run(), KDA_INVALID_ARGUMENT);
  call.checkpoint_slots = Tensor::of(KDA_INT32, {1, 1}, {1});
  call.checkpoint_states = Tensor(KDA_FP32, {1, 1, 1, 128, 128});
  EXPECT_EQ(call.run(), KDA_INVALID_ARGUMENT);
  call.checkpoint_offsets = Tensor();
  call.checkpoint_states = Tensor();
  EXPECT_EQ(call.run(), KDA_INVALID_ARGUMENT);
}

TEST_P(CheckpointsTest, F60_WarmEqualsCold) {
  // The restore itself is the pool manager's; here its bits: 130 tokens cold, or from the state after 128.
  FieldInput input;
  input.lengths = {130};
  input.heads = 2;
  input.gate_scale = 4;
  input.beta_scale = 3;
  const Problem p = field_problem(input);
  PrefillCall cold(p, backend());
  cold.desc.flags = invariant();
  cold.use_pool(3, {0}, exact_pool());
  cold.desc.max_checkpoints = 1;
  cold.checkpoint_offsets = Tensor::of(KDA_INT64, {1, 1}, {128});
  cold.checkpoint_slots = Tensor::of(KDA_INT32, {1, 1}, {1});
  ASSERT_EQ(cold.run(), KDA_OK) << cold.message;
  PrefillCall warm(cut(p, 128, 2), backend());
  warm.desc.flags = invariant();
  warm.desc.attention.state_dtype = exact_pool();
  warm.desc.initial_state = KDA_INITIAL_ALL;
  warm.pool = cold.pool;
  warm.slots = Tensor::ints({1});
  ASSERT_EQ(warm.run(), KDA_OK) << warm.message;
  EXPECT_EQ(first_difference(select(warm.pool, 0, 1), select(cold.pool, 0, 0)), "");
  EXPECT_EQ(first_difference(warm.out, narrow(cold.out, 0, 128, 2)), "");
}

}  // namespace kda::conformance::test

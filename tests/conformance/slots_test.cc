// The slot rule and pools: F24, F37, F42, F43, P-1, P-4..P-10.
#include <sys/mman.h>

#include "harness.h"

namespace kda::conformance::test {

class SlotsTest : public BackendTest {};
KDA_FOR_BACKENDS(SlotsTest);

namespace {

// Expects that every output row of the token is zero.
void expect_zero_row(const Tensor& out, int64_t row) {
  for (const double x : rows(out, row, 1)) ASSERT_EQ(x, 0) << "row " << row;
}

}  // namespace

TEST_P(SlotsTest, F42_NegativeAndTooLargeSlots) {
  const int64_t bad[] = {-1, 5, INT32_MIN, int64_t{1} << 31};
  for (const int64_t index : bad) {
    for (const kda_dtype dtype : {KDA_INT32, KDA_INT64}) {
      if (dtype == KDA_INT32 && index != static_cast<int32_t>(index)) continue;
      const Problem p = ledger({1, 1}, {0, 1}, 2);
      PrefillCall call(p, backend());
      call.use_pool(5, {index, 3});
      call.slots = Tensor::ints({index, 3}, dtype);
      call.desc.initial_state = KDA_INITIAL_ALL;
      const Snapshot before(call.pool);
      ASSERT_EQ(call.run(), KDA_OK) << call.message;
      EXPECT_EQ(before.changes_outside(call.pool, {3}), "");
      EXPECT_NE(before.slot_changes(call.pool, 3), "");
      expect_zero_row(call.out, 0);
      // The same sequence as fresh: its write slot is dead, so it is inactive as well (P-8).
      call.desc.initial_state = KDA_INITIAL_NONE;
      call.out.poison();
      ASSERT_EQ(call.run(), KDA_OK) << call.message;
      EXPECT_EQ(before.changes_outside(call.pool, {3}), "");
      expect_zero_row(call.out, 0);
    }
  }
}

TEST_P(SlotsTest, F43_P06_SlotZero) {
  for (const kda_dtype dtype : {KDA_FP32, KDA_BF16}) {
    for (const int64_t null_slot : {-1, 0}) {
      PrefillCall call(ledger({1, 1, 1}, {0, 1, 2}, 2), backend());
      call.use_pool(3, {-1, 0, -1}, dtype);
      call.desc.null_slot = null_slot;
      call.desc.initial_state = KDA_INITIAL_ALL;
      fill(select(call.pool, 0, 0), 0);
      const Snapshot before(call.pool);
      ASSERT_EQ(call.run(), KDA_OK) << call.message;
      expect_zero_row(call.out, 0);
      expect_zero_row(call.out, 2);
      if (null_slot < 0) {
        expect_ledger(call.slot(0), {1});
        EXPECT_EQ(before.changes_outside(call.pool, {0}), "");
      } else {
        expect_zero_row(call.out, 1);
        EXPECT_EQ(before.changes_outside(call.pool), "");
      }
    }
  }
}

TEST_P(SlotsTest, P08_WriteSlots) {
  const Problem p = ledger({2, 2, 2}, iota(6), 1);
  PrefillCall call(p, backend());
  call.use_pool(6, {0, 1, -1});
  for (int64_t s = 0; s < 6; ++s) fill(select(call.pool, 0, s), 0);
  call.write_slots = Tensor::ints({4, -1, 5}, KDA_INT64);
  call.desc.initial_state = KDA_INITIAL_FLAGS;
  call.flags = Tensor::flags({1, 1, 0});
  const Snapshot before(call.pool);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  // 0: read 0, written to 4. 1: computed, not stored. 2: fresh, so that its dead read slot does not matter.
  EXPECT_EQ(before.changes_outside(call.pool, {4, 5}), "");
  expect_ledger(call.slot(4), {0, 1});
  expect_ledger(call.slot(5), {4, 5});
  EXPECT_EQ(call.out.get({3, 0, 0}), 0.5);
  EXPECT_EQ(call.out.get({5, 0, 0}), 0.5);
}

TEST_P(SlotsTest, P09_G03_FlagsAnyNonzeroByte) {
  PrefillCall call(ledger({1, 1, 1}, {7, 7, 7}, 1), backend());
  call.use_pool(3, {2, 1, 0});
  for (int64_t s = 0; s < 3; ++s) {
    fill(select(call.pool, 0, s), 0);
    for (int64_t v = 0; v < 128; ++v) call.pool.set({s, 0, v, 9}, 0.5);
  }
  call.desc.initial_state = KDA_INITIAL_FLAGS;
  call.flags = Tensor::flags({1, 0, 2});
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  expect_ledger(call.slot(2), {7, 9});
  expect_ledger(call.slot(1), {7});
  expect_ledger(call.slot(0), {7, 9});
  call.flags = Tensor();
  const Snapshot before(call.pool);
  EXPECT_EQ(call.run(), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(before.changes_outside(call.pool), "");
}

TEST_P(SlotsTest, F37_IndexAsATableColumn) {
  const std::vector<int64_t> ids = {4, 2, 7};
  for (const kda_dtype dtype : {KDA_INT32, KDA_INT64}) {
    PrefillCall reference(ledger({1, 2, 3}, iota(6), 1), backend());
    reference.use_pool(8, ids);
    PrefillCall call = reference;
    ASSERT_EQ(reference.run(), KDA_OK) << reference.message;
    // table[:, 0] of [3, 9]: stride 9, the other columns hold 9999.
    Tensor table = Tensor::full(dtype, {3, 9}, 9999);
    for (int64_t n = 0; n < 3; ++n) table.set({n, 0}, static_cast<double>(ids[static_cast<size_t>(n)]));
    Plan plan = make_plan(call.desc);
    for (const bool matrix : {false, true}) {
      PrefillCall strided = call;
      kda_prefill_args args = strided.args();
      args.slots = matrix ? narrow(table, 1, 0, 1) : select(table, 1, 0);  // [N, 1] or [N]
      ASSERT_EQ(plan.run(args), KDA_OK) << plan.message();
      EXPECT_EQ(first_difference(strided.pool, reference.pool), "");
      EXPECT_EQ(first_difference(strided.out, reference.out), "");
    }
  }
}

TEST_P(SlotsTest, R03_ResultsAreWhatWasAskedFor) {
  const Problem p = ledger({3, 2}, iota(5), 1);
  PrefillCall call(p, backend());
  call.use_pool(4, {1, 2});
  call.no_final_state = true;
  const Snapshot before(call.pool);
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.pool), "");
  call.no_final_state = false;
  call.final_state = Tensor(KDA_FP32, {2, 1, 128, 128});
  call.desc.initial_state = KDA_INITIAL_NONE;
  ASSERT_EQ(call.run(), KDA_OK) << call.message;
  EXPECT_EQ(before.changes_outside(call.pool), "");  // the packed tensor takes them instead
  expect_ledger(values(select(call.final_state, 0, 1)), {3, 4});
}

// A sparse pool of many GiB of address space: only touched pages cost memory.
class SparsePool {
 public:
  explicit SparsePool(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~SparsePool() {
    if (ok()) munmap(data_, bytes_);
  }
  bool ok() const { return data_ != MAP_FAILED; }
  float* at(int64_t element) const { return static_cast<float*>(data_) + element; }

 private:
  size_t bytes_;
  void* data_;
};

TEST_P(SlotsTest, F24_PoolOffsetsPast2To31) {
  if (on_device()) GTEST_SKIP() << "a pool of this size does not travel: tests/cuda has a pool of the device's own";
  // HV 1, K = V = 128: a slot stride of 2^20 elements puts slot 2048 at element 2^31 and slot 512 at byte 2^31.
  const int64_t stride = int64_t{1} << 20, slots = 4100;
  const SparsePool memory(slots * stride * 4);
  if (!memory.ok()) GTEST_SKIP() << "no address space of " << slots * stride * 4 << " bytes";
  const kda_tensor pool = {
      memory.at(0), KDA_FP32, {KDA_CPU, 0}, 4, {slots, 1, 128, 128}, {stride, 128 * 128, 128, 1}};
  const auto prefill_into = [&](int64_t slot, kda_dtype index) {
    PrefillCall call(ledger({2}, {3, 4}, 1), backend());
    call.slots = Tensor::ints({slot}, index);
    call.desc.initial_state = KDA_INITIAL_ALL;
    kda_prefill_args args = call.args();
    args.state = pool;
    Plan plan = make_plan(call.desc);
    EXPECT_EQ(plan.run(args), KDA_OK) << plan.message();
  };
  const auto decode_into = [&](int64_t slot, kda_dtype index) {
    DecodeCall call(ledger({2}, {3, 4}, 1), backend());
    call.desc.store = KDA_STORE_FINAL;
    call.slots = Tensor::ints({slot}, index);
    kda_decode_args args = call.args();
    args.state = pool;
    Plan plan = make_plan(call.desc);
    EXPECT_EQ(plan.run(args), KDA_OK) << plan.message();
  };
  for (const int64_t slot : {511, 512, 1024, 2047, 2048, 4096}) {
    for (const kda_dtype index : {KDA_INT32, KDA_INT64}) {
      for (const bool decode : {false, true}) {
        for (int64_t i = 0; i < 128 * 128; ++i) *memory.at(slot * stride + i) = 0;
        // Where a 32-bit byte offset would land: a mark that must stay, in front of where the ledger would appear.
        const int64_t wrapped = static_cast<int64_t>(static_cast<uint32_t>(slot * stride * 4)) / 4;
        if (wrapped != slot * stride) *memory.at(wrapped + 3) = 42;
        if (decode) decode_into(slot, index);
        else prefill_into(slot, index);
        std::vector<double> state;
        for (int64_t i = 0; i < 128 * 128; ++i) state.push_back(static_cast<double>(*memory.at(slot * stride + i)));
        expect_ledger(state, {3, 4});
        if (wrapped != slot * stride) {
          EXPECT_EQ(*memory.at(wrapped + 3), 42);
        }
      }
    }
  }
}

}  // namespace kda::conformance::test

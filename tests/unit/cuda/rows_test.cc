// The kernels' row rules (cuda/kernels/common/rows.h) against core/rows.h, on random and on bad index values (P-5..P-13,
// V-2, V-6, V-10): the same text for the host and for the device.
#include "core/rows.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cuda/host/views.h"

namespace kda::cuda {
namespace {

constexpr int64_t kSlots = 5, kWidth = 3, kTokens = 12;

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool coin() { return below(2) == 1; }
  // Mostly near the valid range, at times far outside.
  int64_t index(int64_t most) {
    const int64_t wild[] = {-1, INT32_MIN, INT32_MAX, most, most + 1, int64_t{1} << 31, INT64_MAX};
    return below(6) == 0 ? wild[below(7)] : below(most + 1) - (below(8) == 0 ? 1 : 0);
  }
  // int32 or int64 vector or table, any stride.
  kda_tensor table(std::vector<int64_t>& memory, int64_t rows, int64_t columns, int64_t most, int rank) {
    const bool wide = coin();
    const int64_t stride = columns + below(3);
    memory.assign(static_cast<size_t>(rows * stride + 1), 0);
    kda_tensor t{};
    t.data = memory.data();
    t.dtype = wide ? KDA_INT64 : KDA_INT32;
    t.rank = rank;
    t.shape[0] = rows, t.shape[1] = columns;
    t.strides[0] = stride, t.strides[1] = 1;
    for (int64_t i = 0; i < rows * stride; ++i) {
      const int64_t x = index(most);
      if (wide) memory[static_cast<size_t>(i)] = x;
      else reinterpret_cast<int32_t*>(memory.data())[i] = static_cast<int32_t>(x);
    }
    return t;
  }

 private:
  std::mt19937_64 random_;
};

// One random call; the memory behind its tensors.
struct Call {
  kda_decode_desc desc{};
  kda_decode_args args{};
  std::vector<int64_t> cu, begin, length, slots, write, record_rows, out_rows;
  std::vector<int32_t> accepted, count, active;
  std::vector<uint8_t> flags;
  int64_t n = 0;

  explicit Call(uint64_t seed) {
    Draw d(seed);
    n = 1 + d.below(4);
    args.state.shape[0] = kSlots;
    args.state.strides[0] = 4;
    args.state.rank = 4;
    args.state.dtype = KDA_FP32;
    args.q.rank = 3;
    args.q.dtype = KDA_FP32;
    args.q.shape[0] = kTokens;
    const int64_t form = d.below(3);
    if (form == 0) args.sequences.cu_seqlens = d.table(cu, n + 1, 1, kTokens, 1);
    if (form == 1) args.sequences.begin = d.table(begin, n, 1, kTokens, 1), args.sequences.length = d.table(length, n, 1, 4, 1);
    if (form == 2) args.q.rank = 4, args.q.shape[0] = n, args.q.shape[1] = d.below(4);
    if (d.coin()) active = {static_cast<int32_t>(d.index(n))}, args.sequences.num_active = vector(active);
    const int rank = d.coin() ? 2 : 1;
    if (d.below(5) != 0) args.slots = d.table(slots, n, rank == 2 ? kWidth + d.below(2) : 1, kSlots, rank);
    if (present(args.slots) && d.below(3) == 0) args.write_slots = d.table(write, n, rank == 2 ? kWidth : 1, kSlots, rank);
    for (int64_t i = 0; i < n; ++i) {
      accepted.push_back(static_cast<int32_t>(d.index(kWidth)));
      flags.push_back(static_cast<uint8_t>(d.below(3)));
    }
    if (d.coin()) args.accepted = vector(accepted);
    desc.width = kWidth;
    desc.null_slot = d.below(3) - 1;
    desc.initial_state = static_cast<kda_initial_state>(1 + d.below(3));
    desc.store = d.coin() ? KDA_STORE_FINAL : KDA_STORE_PER_TOKEN;
    if (desc.initial_state == KDA_INITIAL_FLAGS) {
      args.has_initial_state.data = flags.data();
      args.has_initial_state.dtype = KDA_BOOL;
      args.has_initial_state.rank = 1;
      args.has_initial_state.shape[0] = n;
      args.has_initial_state.strides[0] = 1;
    }
    if (d.coin()) {
      desc.mode = KDA_DECODE_RECORDS;
      desc.store = KDA_STORE_PER_TOKEN;
      desc.fold = d.coin() && present(args.accepted);
      const int64_t rows = kSlots + d.below(2);
      for (int64_t i = 0; i < rows; ++i) count.push_back(static_cast<int32_t>(d.index(kWidth)));
      args.records.count = vector(count);
      args.records.u.dtype = KDA_FP32;
      if (d.coin()) args.records.record_rows = d.table(record_rows, n, 1, rows, 1);
    }
  }

  static kda_tensor vector(std::vector<int32_t>& x) {
    kda_tensor t{};
    t.data = x.data();
    t.dtype = KDA_INT32;
    t.rank = 1;
    t.shape[0] = static_cast<int64_t>(x.size());
    t.strides[0] = 1;
    return t;
  }
};

TEST(CudaRows, DecodeRowsAreThoseOfTheHost) {
  int active = 0, rows = 0;
  for (uint64_t seed = 0; seed < 20000; ++seed) {
    const Call c(seed);
    const SequenceTable table(c.args.sequences, c.args.q, 3);
    const SequenceRef sequences = to_sequences(c.args.sequences, c.args.q, 3);
    ASSERT_EQ(sequences.count, table.count());
    ASSERT_EQ(active_sequences(sequences), table.active()) << seed;
    cuda::DecodeRule rule;
    rule.slots = to_slots(c.args.slots, c.args.write_slots, c.args.has_initial_state, kSlots, c.desc.null_slot,
                          c.desc.initial_state);
    rule.accepted = int32_data(c.args.accepted);
    rule.accepted_stride = stride_of(c.args.accepted);
    rule.width = c.desc.width;
    rule.records = c.desc.mode == KDA_DECODE_RECORDS;
    rule.per_token = c.desc.store == KDA_STORE_PER_TOKEN;
    rule.fold = c.desc.fold;
    const RecordRef records = to_records(c.args.records);
    for (int64_t n = 0; n < table.active(); ++n, ++rows) {
      const kda::DecodeRow wanted = kda::decode_row(c.desc, c.args, table, n);
      const cuda::DecodeRow got = cuda::decode_row(rule, records, sequences, n);
      ASSERT_EQ(got.active, wanted.active) << "seed " << seed << " row " << n;
      ASSERT_EQ(got.span.begin, wanted.span.begin) << seed;
      ASSERT_EQ(got.span.length, wanted.span.length) << seed;
      ASSERT_EQ(got.span.batch, wanted.span.batch) << seed;
      if (!wanted.active) continue;
      ++active;
      ASSERT_EQ(got.fresh, wanted.fresh) << seed;
      ASSERT_EQ(got.start_slot, wanted.start_slot) << seed;
      ASSERT_EQ(got.record, wanted.record) << seed;
      ASSERT_EQ(got.commit, wanted.commit) << seed;
      for (int64_t t = 0; t < kWidth; ++t) {
        ASSERT_EQ(cuda::store_slot(rule.slots, n, t), kda::store_slot(c.desc, c.args, n, t)) << seed;
      }
    }
  }
  EXPECT_GT(active, rows / 10);  // the draw is worth something
  EXPECT_LT(active, rows * 9 / 10);
}

TEST(CudaRows, ConvRowsAreThoseOfTheHost) {
  int active = 0;
  for (uint64_t seed = 0; seed < 20000; ++seed) {
    const Call c(seed);
    kda_tensor x = c.args.q;  // [T, channels]
    x.rank -= 1;
    const SequenceTable table(c.args.sequences, x, 2);
    const SequenceRef sequences = to_sequences(c.args.sequences, x, 2);
    for (const kda_conv_mode mode : {KDA_CONV_PREFILL, KDA_CONV_COLUMNS, KDA_CONV_RECORDS}) {
      const bool fold = mode == KDA_CONV_RECORDS && c.desc.fold;
      const bool has_pool = mode != KDA_CONV_PREFILL || seed % 3 != 0;
      kda_tensor pool = c.args.state;
      if (!has_pool) pool.dtype = KDA_DTYPE_NONE;
      const kda::ConvRule wanted_rule{mode, c.desc.store == KDA_STORE_FINAL, fold, kWidth, c.desc.initial_state, c.desc.null_slot};
      const ConvInputs in{pool, c.args.slots, c.args.write_slots, c.args.has_initial_state, c.args.accepted,
                          c.args.records.count, c.args.records.record_rows};
      cuda::ConvRule rule;
      rule.slots = to_slots(c.args.slots, c.args.write_slots, c.args.has_initial_state, has_pool ? kSlots : 0,
                            c.desc.null_slot, c.desc.initial_state);
      rule.accepted = int32_data(c.args.accepted);
      rule.accepted_stride = stride_of(c.args.accepted);
      rule.mode = static_cast<ConvMode>(mode);
      rule.final_window = wanted_rule.final_window;
      rule.fold = fold;
      rule.width = kWidth;
      const RecordRef records = to_records(c.args.records);
      for (int64_t n = 0; n < table.active(); ++n) {
        const kda::ConvRow wanted = kda::conv_row(wanted_rule, in, table, n);
        const cuda::ConvRow got = cuda::conv_row(rule, records, has_pool, sequences, n);
        ASSERT_EQ(got.active, wanted.active) << "seed " << seed << " mode " << mode << " row " << n;
        if (!wanted.active) continue;
        ++active;
        ASSERT_EQ(got.fresh, wanted.fresh) << seed;
        ASSERT_EQ(got.write_slot, wanted.write_slot) << seed;
        if (!wanted.fresh) {
          ASSERT_EQ(got.read_slot, wanted.read_slot) << seed;
        }
        ASSERT_EQ(got.offset, wanted.offset) << seed;
        ASSERT_EQ(got.span.length, wanted.span.length) << seed;
      }
    }
  }
  EXPECT_GT(active, 10000);
}

}  // namespace
}  // namespace kda::cuda

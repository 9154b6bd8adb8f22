// Checked mode (G-7): values that normal mode passes over are reported by argument, position and value, in every
// operator that has them, and nothing is written.
#include <gtest/gtest.h>

#include <functional>

#include "conformance/api.h"
#include "conformance/tensor.h"

namespace kda::conformance::test {
namespace {

constexpr int64_t K = 4, V = 4, W = 3, kSlots = 6, kChannels = 2 * K + V;

kda_attention_spec attention() {
  kda_attention_spec a{};
  a.num_heads = 1;
  a.key_dim = K;
  a.value_dim = V;
  a.io_dtype = KDA_FP32;
  a.gate_family = KDA_GATE_SOFTPLUS;
  return a;
}

// Two sequences of one and two tokens, with every vector that a case may spoil.
class CheckedMode : public testing::TestWithParam<const char*> {
 protected:
  Tensor cu = Tensor::ints({0, 1, 3}), active = Tensor::ints({2});
  Tensor q = Tensor::full(KDA_FP32, {3, 1, K}, 0.5), v = Tensor::full(KDA_FP32, {3, 1, V}, 0.5);
  Tensor gate = Tensor::full(KDA_FP32, {3, 1, K}, -1), beta = Tensor::full(KDA_FP32, {3, 1}, 0);
  Tensor A_log = Tensor::full(KDA_FP32, {1}, 0);
  Tensor pool = canary_pool(KDA_FP32, {kSlots, 1, V, K});
  Tensor slots = Tensor::ints({0, 1}), write_slots = Tensor::ints({2, 3}), accepted = Tensor::ints({1, 1});
  Tensor table = Tensor::of(KDA_INT32, {2, 3}, {0, 1, 9999, 2, 3, 9999});  // wider than the plan (F37)
  Tensor offsets = Tensor::of(KDA_INT32, {2, 1}, {1, 2}), places = Tensor::of(KDA_INT32, {2, 1}, {4, 5});
  Tensor indices = Tensor::of(KDA_INT32, {2, 2}, {0, 0, 1, 0}), before = Tensor::ints({0, 1, 2}, KDA_INT64);
  Tensor u = Tensor::full(KDA_FP32, {kSlots, 1, 2, V}, 0), kg = Tensor::full(KDA_FP32, {kSlots, 1, 2, 2 * K}, 0);
  Tensor count = Tensor::ints({1, 2, 0, 0, 0, 0}), record_rows = Tensor::ints({0, 1});
  Tensor x = Tensor::full(KDA_FP32, {3, kChannels}, 0.5), weight = Tensor::full(KDA_FP32, {kChannels, W}, 0.5);
  Tensor windows = canary_pool(KDA_FP32, {kSlots, W + 1, kChannels}), y = Tensor(KDA_FP32, {3, kChannels});
  Tensor out = Tensor(KDA_FP32, {3, 1, V}), out_rows = Tensor::ints({2, 1, 0});

  template <class Desc>
  Desc described() {
    Desc d = sized<Desc>();
    d.backend = GetParam();
    d.max_sequences = 2;
    d.null_slot = -1;
    return d;
  }
  template <class Args>
  void fill(Args& a) {
    a.q = a.k = q;
    a.v = v;
    a.gate = gate;
    a.beta = beta;
    a.A_log = A_log;
    a.sequences.cu_seqlens = cu;
    a.sequences.num_active = active;
    a.state = pool;
    a.out = out;
    a.out_rows = out_rows;
  }

  // The good call passes; with `vector` holding `values` it passes in normal mode and is reported in checked mode.
  template <class Desc, class Args>
  void reported(Desc desc, const Args& args, Tensor& vector, const std::vector<double>& values,
                const std::string& message) {
    SCOPED_TRACE(message);
    desc.flags = KDA_PLAN_CHECKED;
    Plan checked = make_plan(desc);
    const Tensor pool_now = pool, windows_now = windows, count_now = count;
    const std::vector<double> good = vector.values();
    ASSERT_EQ(checked.run(args), KDA_OK) << checked.message();
    pool.assign(pool_now.values());
    windows.assign(windows_now.values());
    count.assign(count_now.values());
    vector.assign(values);
    const Snapshot before_pool(pool), before_windows(windows), before_out(out), before_count(count);
    EXPECT_EQ(checked.run(args), KDA_INVALID_ARGUMENT);
    EXPECT_NE(checked.message().find(message), std::string::npos) << checked.message();
    EXPECT_EQ(before_pool.changes_outside(pool), "");
    EXPECT_EQ(before_windows.changes_outside(windows), "");
    EXPECT_EQ(before_out.changes_outside(out), "");
    EXPECT_EQ(before_count.changes_outside(count), "");
    desc.flags = 0;
    Plan normal = make_plan(desc);
    EXPECT_EQ(normal.run(args), KDA_OK) << normal.message();
    vector.assign(good);
    pool.assign(pool_now.values());
    windows.assign(windows_now.values());
    count.assign(count_now.values());
  }
};
INSTANTIATE_TEST_SUITE_P(Backend, CheckedMode, testing::Values("portable", "reference"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(CheckedMode, G07_P08_K03_M20_Prefill) {
  auto d = described<kda_prefill_desc>();
  d.attention = attention();
  d.max_tokens = 3;
  d.initial_state = KDA_INITIAL_ALL;
  d.max_checkpoints = 1;
  auto a = sized<kda_prefill_args>();
  fill(a);
  a.slots = slots;
  a.write_slots = write_slots;
  a.checkpoint_offsets = offsets;
  a.checkpoint_slots = places;
  a.chunk_indices = indices;
  a.chunk_offsets = before;
  reported(d, a, cu, {0, 2, 1}, "cu_seqlens[2]: wanted >= cu_seqlens[1] = 2, got 1");
  reported(d, a, active, {3}, "num_active: wanted 0 to 2, got 3");
  reported(d, a, slots, {0, 6}, "slots[1, 0]: wanted a slot below 6 or a negative one, got 6");
  reported(d, a, write_slots, {7, 3}, "write_slots[0, 0]: wanted a slot below 6");
  reported(d, a, write_slots, {3, 3}, "write_slots: wanted distinct live slots, got slot 3 in rows 0 and 1");
  reported(d, a, write_slots, {1, 3},
           "write_slots: wanted slots that no other sequence reads, got slot 1 written by row 0 and read by row 1");
  reported(d, a, offsets, {1, 3}, "checkpoint_offsets[1, 0]: wanted at most the sequence's length 2, got 3");
  reported(d, a, places, {4, 6}, "checkpoint_slots[1, 0]: wanted a slot below 6");
  reported(d, a, places, {4, 4}, "checkpoint_slots: wanted distinct live slots, got slot 4 in rows 0 and 1");
  reported(d, a, places, {3, 5}, "wanted distinct live slots, got slot 3 in rows 0 and 1");  // a final state's slot
  reported(d, a, places, {1, 5}, "checkpoint_slots: wanted slots that no other sequence reads, got slot 1");
  reported(d, a, before, {0, 2, 2}, "chunk_offsets[1]: wanted 1, got 2");
  reported(d, a, before, {0, 1, 3}, "chunk_offsets[2]: wanted 2, got 3");
  reported(d, a, indices, {0, 0, 1, 1}, "chunk_indices[1]: wanted (1, 0), got (1, 1)");
  reported(d, a, out_rows, {2, 2, 0}, "out_rows: wanted distinct rows, got row 2 at positions 0 and 1");
}

TEST_P(CheckedMode, G07_DeadRowsAndRowsBehindTheActiveCountSayNothing) {
  auto d = described<kda_prefill_desc>();
  d.attention = attention();
  d.max_tokens = 3;
  d.initial_state = KDA_INITIAL_ALL;
  d.flags = KDA_PLAN_CHECKED;
  auto a = sized<kda_prefill_args>();
  fill(a);
  a.slots = slots;
  Plan plan = make_plan(d);
  slots.assign({-1, -1});
  EXPECT_EQ(plan.run(a), KDA_OK) << plan.message();
  slots.assign({2, 2});
  active.assign({1});
  EXPECT_EQ(plan.run(a), KDA_OK) << plan.message();
}

TEST_P(CheckedMode, G07_V06_P08_DecodeColumns) {
  auto d = described<kda_decode_desc>();
  d.attention = attention();
  d.max_tokens = 3;
  d.width = 2;
  auto a = sized<kda_decode_args>();
  fill(a);
  a.slots = table;
  a.accepted = accepted;
  reported(d, a, accepted, {1, 0}, "accepted[1]: wanted 1 to 2, got 0");
  reported(d, a, accepted, {3, 1},
           "accepted[0]: wanted 1 to 2, got 3");  // the table's third column is not the plan's
  reported(d, a, cu, {0, 0, 3}, "sequences: wanted at most width = 2 tokens in row 1, got 3");
  reported(d, a, table, {0, 1, 9, 0, 3, 9}, "slots: wanted distinct live slots, got slot 0 in rows 0 and 1");
  reported(d, a, table, {0, 1, 9, 2, 6, 9}, "slots[1, 1]: wanted a slot below 6");
  reported(d, a, table, {0, 1, 9, 2, 2, 9}, "slots: wanted distinct live slots, got slot 2 in rows 1 and 1");
  // Row 0 has one token: its second column is not written, and may name any slot.
  table.assign({0, 3, 9, 2, 3, 9});
  d.flags = KDA_PLAN_CHECKED;
  Plan plan = make_plan(d);
  EXPECT_EQ(plan.run(a), KDA_OK) << plan.message();
}

TEST_P(CheckedMode, G07_V10_FoldAndCommit) {
  auto d = described<kda_decode_desc>();
  d.attention = attention();
  d.max_tokens = 3;
  d.width = 2;
  d.mode = KDA_DECODE_RECORDS;
  d.fold = 1;
  auto a = sized<kda_decode_args>();
  fill(a);
  a.slots = slots;
  a.accepted = accepted;
  a.records = {u, kg, count, record_rows};
  reported(d, a, accepted, {1, 3}, "accepted[1]: wanted 0 to the 2 recorded tokens, got 3");
  reported(d, a, accepted, {-1, 1}, "accepted[0]: wanted 0 to the 1 recorded tokens, got -1");
  reported(d, a, count, {1, 7, 0, 0, 0, 0}, "records.count[1]: wanted 0 to 2, got 7");
  reported(d, a, record_rows, {0, 9}, "records.record_rows[1, 0]: wanted a slot below 6");
  reported(d, a, record_rows, {1, 1}, "records.record_rows: wanted distinct live slots, got slot 1 in rows 0 and 1");
  reported(d, a, cu, {0, 0, 3}, "sequences: wanted at most width = 2 tokens in row 1, got 3");

  auto c = described<kda_commit_desc>();
  c.attention = attention();
  c.width = 2;
  auto b = sized<kda_commit_args>();
  b.A_log = A_log;
  b.state = pool;
  b.slots = slots;
  b.accepted = accepted;
  b.num_active = active;
  b.records = a.records;
  reported(c, b, accepted, {2, 1}, "accepted[0]: wanted 0 to the 1 recorded tokens, got 2");
  reported(c, b, count, {1, -1, 0, 0, 0, 0}, "records.count[1]: wanted 0 to 2, got -1");
  reported(c, b, slots, {4, 4}, "slots: wanted distinct live slots, got slot 4 in rows 0 and 1");
  reported(c, b, active, {-1}, "num_active: wanted 0 to 2, got -1");
}

TEST_P(CheckedMode, G07_W03_W04_K03_Conv) {
  auto d = described<kda_conv_desc>();
  d.mode = KDA_CONV_COLUMNS;
  d.width = W;
  d.parts = 1;
  d.channels[0] = kChannels;
  d.io_dtype = KDA_FP32;
  d.layout = KDA_CONV_SD;
  d.verify_width = 2;
  d.max_tokens = 3;
  auto a = sized<kda_conv_args>();
  a.x[0] = x;
  a.weight[0] = weight;
  a.sequences.cu_seqlens = cu;
  a.sequences.num_active = active;
  a.state[0] = windows;
  a.slots = slots;
  a.accepted = accepted;
  a.out[0] = y;
  a.out_rows = out_rows;
  reported(d, a, accepted, {1, 3}, "accepted[1]: wanted 1 to 2, got 3");
  reported(d, a, cu, {0, 0, 3}, "sequences: wanted at most width = 2 tokens in row 1, got 3");
  reported(d, a, slots, {1, 1}, "slots: wanted distinct live slots, got slot 1 in rows 0 and 1");
  reported(d, a, out_rows, {0, 1, 0}, "out_rows: wanted distinct rows, got row 0 at positions 0 and 2");
  d.mode = KDA_CONV_RECORDS;
  d.fold = 1;
  a.record_count = count;
  reported(d, a, accepted, {2, 1}, "accepted[0]: wanted 0 to the 1 recorded tokens, got 2");
  d.mode = KDA_CONV_PREFILL;
  d.fold = 0;
  d.initial_state = KDA_INITIAL_ALL;
  d.max_checkpoints = 1;
  a.accepted = a.record_count = {};
  a.checkpoint_offsets = offsets;
  a.checkpoint_slots = places;
  reported(d, a, offsets, {1, 3}, "checkpoint_offsets[1, 0]: wanted at most the sequence's length 2, got 3");
  reported(d, a, places, {4, 4}, "checkpoint_slots: wanted distinct live slots, got slot 4 in rows 0 and 1");
}

}  // namespace
}  // namespace kda::conformance::test

// Host checks (spec G-6, G-8, G-9, R-31, Z-7, Z-8): each bad argument is refused by name and nothing is written.
#include <gtest/gtest.h>

#include <functional>

#include "conformance/api.h"
#include "conformance/distributions.h"
#include "conformance/tensor.h"

namespace kda::conformance::test {
namespace {

// One valid prefill over a pool; each case spoils one thing.
class PrefillRefusals : public ::testing::Test {
 protected:
  PrefillRefusals() {
    FieldInput input;
    input.lengths = {3, 2};
    input.heads = 2;
    input.value_heads = 4;
    input.key_dim = input.value_dim = 8;
    problem_ = field_problem(input);
    desc_ = prefill_desc(problem_, "reference");
    desc_.initial_state = KDA_INITIAL_FLAGS;
    desc_.max_tokens = 5;
    desc_.max_sequences = 2;
    desc_.max_checkpoints = 2;
    args_ = prefill_args(problem_);
    args_.sequences.cu_seqlens = cu_;
    args_.state = pool_;
    args_.slots = slots_;
    args_.has_initial_state = flags_;
    args_.out = out_;
  }

  void refused(kda_status status, std::initializer_list<const char*> words, const std::function<void()>& spoil) {
    const kda_prefill_args good = args_;
    const Snapshot pool(pool_), out(out_);
    spoil();
    Plan plan = make_plan(desc_);
    ASSERT_TRUE(plan.ok()) << plan.message();
    EXPECT_EQ(plan.run(args_), status) << plan.message();
    for (const char* word : words)
      EXPECT_NE(plan.message().find(word), std::string::npos) << word << " in: " << plan.message();
    EXPECT_EQ(pool.changes_outside(pool_), "");
    EXPECT_EQ(out.changes_outside(out_), "");
    args_ = good;
  }

  Problem problem_;
  kda_prefill_desc desc_{};
  kda_prefill_args args_{};
  Tensor cu_ = Tensor::ints({0, 3, 5});
  Tensor pool_ = canary_pool(KDA_FP32, {4, 4, 8, 8});
  Tensor slots_ = Tensor::ints({2, 0});
  Tensor flags_ = Tensor::flags({1, 0});
  Tensor out_ = Tensor(KDA_BF16, {5, 4, 8});
};

TEST_F(PrefillRefusals, TheUnspoiledCallIsAccepted) {
  Plan plan = make_plan(desc_);
  EXPECT_EQ(plan.run(args_), KDA_OK) << plan.message();
}

TEST_F(PrefillRefusals, G06_R52_ShapesDtypesAndPresence) {
  refused(KDA_INVALID_ARGUMENT, {"k", "[5, 2, 8]"}, [&] { args_.k.shape[1] = 3; });
  refused(KDA_INVALID_ARGUMENT, {"v", "bf16", "fp32"}, [&] { args_.v.dtype = KDA_FP32; });
  refused(KDA_INVALID_ARGUMENT, {"gate", "rank"}, [&] { args_.gate.rank = 9; });
  refused(KDA_INVALID_ARGUMENT, {"gate", "[5, 4, 8]"}, [&] { args_.gate.rank = 2; });
  refused(KDA_INVALID_ARGUMENT, {"out", "none"}, [&] { args_.out = {}; });
  refused(KDA_INVALID_ARGUMENT, {"q", "NULL"}, [&] { args_.q.data = nullptr; });
  refused(KDA_INVALID_ARGUMENT, {"q", "cpu", "cuda"}, [&] { args_.q.device.type = KDA_CUDA; });
  refused(KDA_INVALID_ARGUMENT, {"q", ">= 0"}, [&] { args_.q.shape[0] = -1; });
  refused(KDA_INVALID_ARGUMENT, {"v", "2^63"}, [&] { args_.v.shape[1] = INT64_MAX / 2; });
  refused(KDA_INVALID_ARGUMENT, {"q", "aligned"}, [&] { args_.q.data = static_cast<char*>(args_.q.data) + 1; });
}

TEST_F(PrefillRefusals, G08_InnerDimensionsMustBeDense) {
  refused(KDA_INVALID_ARGUMENT, {"v", "dense"}, [&] { args_.v.strides[2] = 2; });
  refused(KDA_INVALID_ARGUMENT, {"state", "dense"}, [&] { args_.state.strides[1] += 8; });
  refused(KDA_INVALID_ARGUMENT, {"state", "overlap"}, [&] { args_.state.strides[0] = 8; });
}

TEST_F(PrefillRefusals, G09_OutputsApartFromInputs) {
  refused(KDA_INVALID_ARGUMENT, {"out", "v"}, [&] { args_.out.data = args_.v.data; });
  refused(KDA_INVALID_ARGUMENT, {"final_state", "state"}, [&] { args_.final_state = narrow(args_.state, 0, 1, 2); });
}

TEST_F(PrefillRefusals, G09_RowsThatInterleaveInOneBufferAreAccepted) {
  // out and v as column blocks of one projection buffer.
  Tensor both = Tensor(KDA_BF16, {5, 8, 8});
  both.fill(0.5);
  args_.v = narrow(both, 1, 0, 4);
  args_.out = narrow(both, 1, 4, 4);
  Plan plan = make_plan(desc_);
  EXPECT_EQ(plan.run(args_), KDA_OK) << plan.message();
}

TEST_F(PrefillRefusals, F39_ParametersOfTheWrongSize) {
  Tensor short_bias = Tensor::full(KDA_FP32, {4}, 0);
  refused(KDA_INVALID_ARGUMENT, {"dt_bias", "32", "4"}, [&] { args_.dt_bias = short_bias; });
  refused(KDA_INVALID_ARGUMENT, {"A_log", "4", "2"}, [&] { args_.A_log = Tensor::full(KDA_FP32, {2}, 0); });
}

TEST_F(PrefillRefusals, P09_FlagsMustBeThere) {
  refused(KDA_INVALID_ARGUMENT, {"has_initial_state"}, [&] { args_.has_initial_state = {}; });
  refused(KDA_INVALID_ARGUMENT, {"has_initial_state", "bool"}, [&] { args_.has_initial_state.dtype = KDA_INT8; });
}

TEST_F(PrefillRefusals, K01_OffsetsAndDestinationTogether) {
  Tensor offsets = Tensor::full(KDA_INT32, {2, 1}, 1), wide = Tensor::full(KDA_INT32, {2, 3}, 1);
  refused(KDA_INVALID_ARGUMENT, {"checkpoint_offsets", "alone"}, [&] { args_.checkpoint_offsets = offsets; });
  refused(KDA_INVALID_ARGUMENT, {"checkpoint_offsets", "alone"}, [&] {
    args_.checkpoint_offsets = {};
    args_.checkpoint_slots = offsets;
  });
  refused(KDA_INVALID_ARGUMENT, {"checkpoint_slots", "[2, 1]"}, [&] {  // F58: destination list too short
    args_.checkpoint_offsets = offsets;
    args_.checkpoint_slots = narrow(wide.view(), 1, 0, 2);
  });
  refused(KDA_INVALID_ARGUMENT, {"max_checkpoints = 2", "3"}, [&] {
    args_.checkpoint_offsets = wide;
    args_.checkpoint_slots = wide;
  });
}

TEST_F(PrefillRefusals, M20_ChunkTablesBothOrNeither) {
  refused(KDA_INVALID_ARGUMENT, {"chunk_indices"}, [&] { args_.chunk_offsets = Tensor::ints({0, 1, 2}, KDA_INT64); });
}

TEST_F(PrefillRefusals, P12_OneFormOfSequences) {
  Tensor begin = Tensor::ints({0, 3});
  refused(KDA_INVALID_ARGUMENT, {"sequences", "both"}, [&] { args_.sequences.begin = begin; });
  refused(KDA_INVALID_ARGUMENT, {"sequences", "begin and length"}, [&] {
    args_.sequences.cu_seqlens = {};
    args_.sequences.begin = begin;
  });
}

TEST_F(PrefillRefusals, R31_R63_BoundsWithBothNumbers) {
  desc_.max_tokens = 4;
  refused(KDA_INVALID_ARGUMENT, {"max_tokens = 4", "5"}, [] {});
  desc_.max_tokens = 5;
  desc_.max_sequences = 1;
  refused(KDA_INVALID_ARGUMENT, {"max_sequences = 1", "2"}, [] {});
}

TEST_F(PrefillRefusals, StructSizeIsChecked) {
  refused(KDA_INVALID_ARGUMENT, {"args.struct_size"}, [&] { args_.struct_size = 0; });
}

TEST_F(PrefillRefusals, G07_Z13_CheckedModeReportsDeviceValues) {
  desc_.flags = KDA_PLAN_CHECKED;
  refused(KDA_INVALID_ARGUMENT, {"slots", "2", "0", "1"}, [&] { slots_.assign({2, 2}); });  // Z-13, both rows
  slots_.assign({2, 0});
  refused(KDA_INVALID_ARGUMENT, {"slots", "below 4", "9"}, [&] { slots_.assign({9, 0}); });
  slots_.assign({2, 0});
  refused(KDA_INVALID_ARGUMENT, {"cu_seqlens[1]", "6"}, [&] { cu_.assign({0, 6, 6}); });
  cu_.assign({0, 3, 5});
  Tensor offsets = Tensor::full(KDA_INT32, {2, 1}, 3);
  refused(KDA_INVALID_ARGUMENT, {"checkpoint_offsets[1, 0]", "3"}, [&] {  // K-3
    args_.checkpoint_offsets = offsets;
    args_.checkpoint_slots = offsets;
  });
}

TEST(DecodeRefusals, F56_WidthsAboveTheLimitAreRefusedBeforeLaunch) {
  FieldInput input;
  input.lengths = {1};
  input.heads = 1;
  const Problem p = field_problem(input);
  EXPECT_EQ(kda_max_verify(), 16);
  EXPECT_TRUE(make_plan(decode_desc(p, "reference", 16)).ok());
  const Plan wide = make_plan(decode_desc(p, "reference", 17));
  EXPECT_EQ(wide.status(), KDA_UNSUPPORTED);
  EXPECT_NE(wide.message().find("16"), std::string::npos);
  EXPECT_NE(wide.message().find("17"), std::string::npos);
}

TEST(Refusals, E08_HeadsMustDivide) {
  kda_prefill_desc d;
  kda_prefill_desc_init(&d);
  d.attention.num_heads = 5;
  d.attention.num_value_heads = 12;
  d.attention.key_dim = d.attention.value_dim = 128;
  d.attention.gate_family = KDA_GATE_SOFTPLUS;
  const Plan plan = make_plan(d);
  EXPECT_EQ(plan.status(), KDA_INVALID_ARGUMENT);
  EXPECT_NE(plan.message().find("5"), std::string::npos);
  EXPECT_NE(plan.message().find("12"), std::string::npos);
}

TEST(Refusals, F36_ConvPoolsOfOtherSlotCounts) {
  kda_conv_desc d;
  kda_conv_desc_init(&d);
  d.mode = KDA_CONV_COLUMNS;
  d.backend = "reference";
  d.width = 4;
  d.parts = 3;
  d.layout = KDA_CONV_SD;
  d.io_dtype = KDA_FP32;
  for (int64_t& c : d.channels) c = 2;
  d.max_tokens = d.max_sequences = 1;
  Plan plan = make_plan(d);
  ASSERT_TRUE(plan.ok()) << plan.message();
  auto args = sized<kda_conv_args>();
  Tensor x[3], weight[3], state[3], out[3];
  for (int i = 0; i < 3; ++i) {
    x[i] = Tensor::full(KDA_FP32, {1, 2}, 1);
    weight[i] = Tensor::full(KDA_FP32, {2, 4}, 1);
    state[i] = Tensor::full(KDA_FP32, {i == 2 ? 4 : 5, 3, 2}, 0);
    out[i] = Tensor(KDA_FP32, {1, 2});
    args.x[i] = x[i];
    args.weight[i] = weight[i];
    args.state[i] = state[i];
    args.out[i] = out[i];
  }
  const Tensor slots = Tensor::ints({1});
  args.slots = slots;
  EXPECT_EQ(plan.run(args), KDA_INVALID_ARGUMENT);
  EXPECT_NE(plan.message().find("5 slots"), std::string::npos) << plan.message();
}

TEST(Library, VersionsAndNames) {
  EXPECT_EQ(kda_version(), uint32_t{(KDA_VERSION_MAJOR << 16) | (KDA_VERSION_MINOR << 8) | KDA_VERSION_PATCH});
  EXPECT_STREQ(kda_status_name(KDA_FAILED_PRECONDITION), "FAILED_PRECONDITION");
  EXPECT_STREQ(kda_status_name(static_cast<kda_status>(99)), "UNKNOWN");
  EXPECT_NE(std::string(kda_cpu_isas()).find("portable"), std::string::npos);
  kda_plan_destroy(nullptr);
  kda_context_destroy(nullptr);
}

}  // namespace
}  // namespace kda::conformance::test

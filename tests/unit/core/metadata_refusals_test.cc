// What a metadata plan refuses, and what it makes of bad device values (spec G-6, M-19, M-27).
#include "metadata_fixture.h"

namespace kda::conformance::test {
namespace {

TEST(Metadata, M27_AboveCapacityIsRefusedWithBothNumbersAndNothingWritten) {
  const auto desc = metadata_desc(8, 3);
  const Plan plan = metadata_plan(desc);
  const auto refused = [&](StepInput s, const char* text) {
    Tables t(desc, KDA_INT32);
    StepViews v(s);
    int32_t counts[8] = {7, 7, 7, 7, 7, 7, 7, 7};
    v.args.tables = t.views();
    v.args.host_counts = counts;
    EXPECT_EQ(run(plan, v.args), KDA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(kda_last_error()).find(text), std::string::npos) << kda_last_error();
    for (const auto& e : t.entries) EXPECT_TRUE(e.table.untouched()) << e.name;
    EXPECT_EQ(counts[0], 7);
  };
  refused(StepInput::of({1, 1, 1, 1}, 1), "max_sequences = 3 rows, got 4");
  refused(StepInput::of({9}, 1), "max_tokens = 8, got 9");
  StepInput negative = StepInput::of({1}, 1);
  negative.tokens = -1;
  refused(negative, "num_tokens");
}

TEST(Metadata, G06_EveryWrongViewIsRefusedAndNothingIsWritten) {
  KDA_HOST_MEMORY_ONLY();
  auto desc = metadata_desc(16, 4, 2);
  const Plan plan = metadata_plan(desc);
  StepInput s = StepInput::of({1, 3, 5}, 2);
  s.drafts = {-1, -1, -1};
  s.accepted = {1, 1, 1};
  s.active = 3;
  const struct {
    const char* text;
    void (*spoil)(kda_metadata_args&);
  } cases[] = {
      {"query_start_loc", [](kda_metadata_args& a) { a.step.query_start_loc = {}; }},
      {"query_start_loc", [](kda_metadata_args& a) { a.step.query_start_loc.dtype = KDA_BOOL; }},
      {"query_start_loc", [](kda_metadata_args& a) { a.step.query_start_loc.shape[0] = 0; }},
      {"query_start_loc", [](kda_metadata_args& a) { a.step.query_start_loc.strides[0] = 0; }},
      {"query_start_loc", [](kda_metadata_args& a) { a.step.query_start_loc.device.type = KDA_CUDA; }},
      {"query_start_loc", [](kda_metadata_args& a) { a.step.query_start_loc.data = nullptr; }},
      {"computed", [](kda_metadata_args& a) { a.step.computed.shape[0] = 2; }},
      {"computed", [](kda_metadata_args& a) { a.step.computed.dtype = KDA_INT64; }},
      {"computed or has_state, got neither", [](kda_metadata_args& a) { a.step.computed = {}; }},
      {"computed or has_state, got both", [](kda_metadata_args& a) { a.step.has_state = a.step.prefilling; }},
      {"prefilling", [](kda_metadata_args& a) { a.step.prefilling.dtype = KDA_UINT8; }},
      {"drafts", [](kda_metadata_args& a) { a.step.drafts.shape[0] = 4; }},
      {"num_active", [](kda_metadata_args& a) { a.step.num_active.dtype = KDA_INT64; }},
      {"accepted", [](kda_metadata_args& a) { a.accepted.dtype = KDA_INT64; }},
      {"slot_table", [](kda_metadata_args& a) { a.slot_table.shape[1] = 1; }},
      {"slot_table", [](kda_metadata_args& a) { a.slot_table = {}; }},
      {"slot_table", [](kda_metadata_args& a) { a.slot_table.shape[0] = 2; }},
      {"chunk_indices, chunk_offsets", [](kda_metadata_args& a) { a.tables.chunk_offsets = {}; }},
      {"prefill_query_start_loc", [](kda_metadata_args& a) { a.tables.prefill_query_start_loc = {}; }},
      {"apart from", [](kda_metadata_args& a) { a.tables.decode_rows = a.tables.spec_rows; }},
      {"apart from drafts", [](kda_metadata_args& a) { a.tables.counts.data = a.step.drafts.data; }},
      {"host.query_start_loc[0]",
       [](kda_metadata_args& a) {
         a.host = a.step;
         a.host.query_start_loc.data = static_cast<int32_t*>(a.step.query_start_loc.data) + 1;
         a.host.query_start_loc.shape[0] = 4;
       }},
      {"host.drafts",
       [](kda_metadata_args& a) {
         a.host = a.step;
         a.host.drafts = {};
       }},
  };
  for (const auto& c : cases) {
    Tables t(desc, KDA_INT32);
    StepViews v(s);
    v.args.tables = t.views();
    c.spoil(v.args);
    EXPECT_EQ(run(plan, v.args), KDA_INVALID_ARGUMENT) << c.text;
    EXPECT_NE(std::string(kda_last_error()).find(c.text), std::string::npos) << c.text << ": " << kda_last_error();
    for (const auto& e : t.entries) EXPECT_TRUE(e.table.untouched()) << c.text << " " << e.name;
  }
  // Each table alone: wrong dtype, one row short, not dense.
  Tables t(desc, KDA_INT32);
  for (const auto& e : t.entries) {
    for (int fault = 0; fault < 3; ++fault) {
      StepViews v(s);
      v.args.tables = t.views();
      kda_tensor& view = v.args.tables.*e.member;
      if (fault == 0) view.dtype = KDA_FP32;
      if (fault == 1) view.shape[0] -= std::string(e.name) == "spec_token_indx" ? 9 : 1;
      if (fault == 2) view.strides[0] += 1;
      EXPECT_EQ(run(plan, v.args), KDA_INVALID_ARGUMENT) << e.name << " " << fault;
      EXPECT_NE(std::string(kda_last_error()).find(e.name), std::string::npos) << e.name << ": " << kda_last_error();
    }
  }
  for (const auto& e : t.entries) EXPECT_TRUE(e.table.untouched()) << e.name;
}

TEST(Metadata, M19_BadOffsetsAreClampedAndOverflowNoTable) {
  const Ints offsets[] = {{0, 65, 70},           {0, -5, 70}, {0, 200, 70, 9}, {-3, 4, 2, 9},
                          {0, 70, 0, 70, 0, 70}, {5, 5, 5},   {70, 0, 70},     {0, INT32_MAX, INT32_MIN, 3},
                          {0, 5, 3, 8}};
  for (const Ints& cu : offsets) {
    for (kda_dtype dtype : {KDA_INT32, KDA_INT64}) {
      StepInput s;
      s.cu = cu;
      s.tokens = 70;
      s.offset = dtype;
      s.computed.assign(cu.size() - 1, 0);
      s.prefilling.assign(cu.size() - 1, 1);
      s.slots.assign(cu.size() - 1, 3);
      const auto desc = metadata_desc(70, static_cast<int64_t>(cu.size()) - 1);
      const Plan plan = metadata_plan(desc);
      Tables t(desc, dtype);
      StepViews v(s);
      v.args.tables = t.views();
      ASSERT_EQ(run(plan, v.args), KDA_OK);
      for (const auto& e : t.entries) EXPECT_TRUE(e.table.guards_intact()) << e.name;
      const Ints counts = t["counts"], rows = t["prefill_rows"], lengths = t["prefill_length"],
                 begins = t["prefill_begin"];
      EXPECT_LE(counts[KDA_COUNT_ACTUAL_TOKENS], 70);
      for (size_t i = 0; i < static_cast<size_t>(counts[0]); ++i) {
        EXPECT_GE(begins[i], 0);
        EXPECT_LE(begins[i] + lengths[i], 70);
      }
      for (int64_t token : t["non_spec_token_indx"]) EXPECT_TRUE(token >= -1 && token < 70);
      const Ints chunks = t["chunk_indices"];
      for (size_t r = 0; r < chunks.size(); r += 2) {
        if (chunks[r] < 0) continue;
        ASSERT_LT(chunks[r], counts[0]);
        EXPECT_LT(chunks[r + 1] * 64, lengths[static_cast<size_t>(chunks[r])]);
      }
      auto checked_desc = desc;
      checked_desc.flags = KDA_PLAN_CHECKED;
      const Plan checked = metadata_plan(checked_desc);
      const bool good = cu == Ints{0, 65, 70};
      EXPECT_EQ(run(checked, v.args), good ? KDA_OK : KDA_INVALID_ARGUMENT);
    }
  }
}

TEST(Metadata, DescriptionsAreChecked) {
  const struct {
    kda_status status;
    const char* text;
    void (*spoil)(kda_metadata_desc&);
  } cases[] = {
      {KDA_INVALID_ARGUMENT, "mode", [](kda_metadata_desc& d) { d.mode = static_cast<kda_metadata_mode>(5); }},
      {KDA_INVALID_ARGUMENT, "max_tokens", [](kda_metadata_desc& d) { d.max_tokens = -1; }},
      {KDA_INVALID_ARGUMENT, "max_sequences", [](kda_metadata_desc& d) { d.max_sequences = -1; }},
      {KDA_INVALID_ARGUMENT, "max_sequences", [](kda_metadata_desc& d) { d.max_sequences = int64_t{1} << 31; }},
      {KDA_INVALID_ARGUMENT, "width", [](kda_metadata_desc& d) { d.width = -1; }},
      {KDA_UNSUPPORTED, "width", [](kda_metadata_desc& d) { d.width = 17; }},
      {KDA_INVALID_ARGUMENT, "chunk", [](kda_metadata_desc& d) { d.chunk = -64; }},
      {KDA_INVALID_ARGUMENT, "null_slot", [](kda_metadata_desc& d) { d.null_slot = int64_t{1} << 40; }},
      {KDA_INVALID_ARGUMENT, "flags", [](kda_metadata_desc& d) { d.flags = 0x80; }},
      {KDA_INVALID_ARGUMENT, "hook", [](kda_metadata_desc& d) { d.hook = "device"; }},
      {KDA_NOT_FOUND, "LIBKDA_CPU", [](kda_metadata_desc& d) { d.backend = "libkda_cpu"; }},
      {KDA_INVALID_ARGUMENT, "struct_size", [](kda_metadata_desc& d) { d.struct_size = 0; }},
  };
  for (const auto& c : cases) {
    auto desc = metadata_desc(8, 4);
    c.spoil(desc);
    const Plan plan = metadata_plan(desc);
    EXPECT_EQ(plan.status(), c.status) << c.text;
    EXPECT_NE(plan.message().find(c.text), std::string::npos) << plan.message();
  }
  const Plan plan = metadata_plan(metadata_desc(8, 4));
  EXPECT_EQ(plan.backend(), on_device() ? "LIBKDA_CUDA" : "LIBKDA_CPU");
  EXPECT_EQ(kda_plan_operator(plan.get()), KDA_OP_METADATA);
}

}  // namespace
}  // namespace kda::conformance::test

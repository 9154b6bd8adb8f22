// Step tables (spec M-1..M-13, M-27..M-32, K-6) through the C ABI on the CPU, and, in tests/cuda, on a device.
#include <random>

#include "metadata_fixture.h"
#include "support/serving_guard.h"

namespace kda::conformance::test {
namespace {

void expect_tables(const Tables& tables, const Expected& expected) {
  for (const auto& [name, values] : expected) EXPECT_EQ(tables[name], values) << name;
  for (const auto& e : tables.entries) EXPECT_TRUE(e.table.guards_intact()) << e.name;
}

// Runs a step and compares every table with the definition.
void check_step(const kda_metadata_desc& desc, const StepInput& s, bool host = false) {
  const Plan plan = metadata_plan(desc);
  ASSERT_TRUE(plan.ok()) << plan.message();
  Tables tables(desc, s.offset);
  StepViews views(s, host);
  views.args.tables = tables.views();
  int32_t counts[8];
  const bool counted = host || !on_device();  // a device's counts need the host's copy (M-12)
  if (counted) views.args.host_counts = counts;
  ASSERT_EQ(run(plan, views.args), KDA_OK) << kda_last_error();
  const Expected expected = model_step(desc, s);
  expect_tables(tables, expected);
  if (counted) {
    EXPECT_EQ(Ints(counts, counts + 8), expected[0].second);
  }
}

// The worked example.
StepInput worked_example() {
  StepInput s = StepInput::of({1, 3, 5, 3}, 3);
  s.drafts = {-1, 2, -1, 2};
  s.prefilling = {0, 0, 1, 0};
  s.accepted = {3, 1, 1, 2};
  return s;
}

TEST(Metadata, M13_M07_M08_WorkedExampleByDrafts) {
  const StepInput s = worked_example();
  const auto desc = metadata_desc(16, 6, 3, KDA_METADATA_BY_DRAFTS);
  const Plan plan = metadata_plan(desc);
  ASSERT_TRUE(plan.ok()) << plan.message();
  Tables t(desc, KDA_INT32);
  StepViews v(s);
  v.args.tables = t.views();
  ASSERT_EQ(run(plan, v.args), KDA_OK) << kda_last_error();
  EXPECT_EQ(t.head("spec_sequence_masks", 4), (Ints{0, 1, 0, 1}));
  EXPECT_EQ(t.head("non_spec_token_indx", 7), (Ints{0, 4, 5, 6, 7, 8, -1}));
  EXPECT_EQ(t.head("spec_token_indx", 7), (Ints{1, 2, 3, 9, 10, 11, -1}));
  EXPECT_EQ(t.head("non_spec_query_start_loc", 4), (Ints{0, 1, 6, 6}));
  EXPECT_EQ(t.head("spec_query_start_loc", 4), (Ints{0, 3, 6, 6}));
  EXPECT_EQ(t.head("prefill_slots", 3), (Ints{100, 106, -1}));
  EXPECT_EQ(t.head("spec_slots", 7), (Ints{103, 104, 105, 109, 110, 111, -1}));
  EXPECT_EQ(t.head("num_accepted", 3), (Ints{1, 2, 1}));
  EXPECT_EQ(t.head("has_initial_state", 2), (Ints{1, 1}));
  EXPECT_EQ(t["counts"], (Ints{2, 6, 0, 0, 2, 6, 12, 2}));
  // Were row 2 a decode of length 1, it would be 2 decodes, 0 prefills.
  StepInput decode = StepInput::of({1, 3, 1, 3}, 3);
  decode.drafts = s.drafts;
  StepViews w(decode);
  w.args.tables = t.views();
  ASSERT_EQ(run(plan, w.args), KDA_OK);
  EXPECT_EQ(t["counts"], (Ints{0, 0, 2, 2, 2, 6, 8, 0}));
}

TEST(Metadata, M13_M07_M08_M11_WorkedExampleByRole) {
  const StepInput s = worked_example();
  const auto desc = metadata_desc(16, 6, 3);
  const Plan plan = metadata_plan(desc);
  Tables t(desc, KDA_INT32);
  StepViews v(s);
  v.args.tables = t.views();
  ASSERT_EQ(run(plan, v.args), KDA_OK) << kda_last_error();
  EXPECT_EQ(t.head("spec_sequence_masks", 4), (Ints{1, 1, 0, 1}));
  EXPECT_EQ(t.head("non_spec_token_indx", 6), (Ints{4, 5, 6, 7, 8, -1}));
  EXPECT_EQ(t.head("spec_token_indx", 8), (Ints{0, 1, 2, 3, 9, 10, 11, -1}));
  EXPECT_EQ(t.head("non_spec_query_start_loc", 3), (Ints{0, 5, 5}));
  EXPECT_EQ(t.head("spec_query_start_loc", 5), (Ints{0, 1, 4, 7, 7}));
  EXPECT_EQ(t.head("prefill_slots", 2), (Ints{106, -1}));
  EXPECT_EQ(t.head("spec_slots", 9), (Ints{100, 101, 102, 103, 104, 105, 109, 110, 111}));
  EXPECT_EQ(t.head("num_accepted", 4), (Ints{3, 1, 2, 1}));
  EXPECT_EQ(t["counts"], (Ints{1, 5, 0, 0, 3, 7, 12, 1}));
  EXPECT_EQ(t.head("prefill_rows", 2), (Ints{2, -1}));
  EXPECT_EQ(t.head("prefill_begin", 2), (Ints{4, 0}));
  EXPECT_EQ(t.head("prefill_length", 2), (Ints{5, 0}));
  EXPECT_EQ(t.head("spec_rows", 4), (Ints{0, 1, 3, -1}));
}

TEST(Metadata, M32_M01_M04_M09_M11_M08_RandomStepsEqualTheDefinition) {
  std::mt19937_64 random(20260404);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int round = 0; round < 400; ++round) {
    const auto width = static_cast<int32_t>(1 + below(4));
    const bool by_drafts = below(2) == 0;
    Ints lengths;
    const int64_t n = below(12);
    Ints drafts;
    for (int64_t i = 0; i < n; ++i) {
      drafts.push_back(below(2) == 0 ? -1 : below(width));
      const int64_t choice = below(6);
      int64_t length = choice == 0 ? 0 : choice < 4 ? 1 + below(width) : 1 + below(200);
      if (by_drafts && drafts.back() >= 0 && length > 0) length = 1 + drafts.back();
      lengths.push_back(length);
    }
    StepInput s = StepInput::of(lengths, width);
    if (below(3) != 0 || by_drafts) s.drafts = drafts;
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      s.computed[i] = below(4) == 0 ? 0 : 1 + below(5000);
      s.prefilling[i] = below(4) == 0;
      if (by_drafts && drafts[i] >= 0) s.computed[i] = 7, s.prefilling[i] = 0;
    }
    if (below(2) == 0) {
      for (int64_t i = 0; i < n; ++i) s.accepted.push_back(1 + below(width));
    }
    s.tokens += below(3);  // rows of no sequence
    s.offset = below(2) == 0 ? KDA_INT32 : KDA_INT64;
    s.slot = below(2) == 0 ? KDA_INT32 : KDA_INT64;
    s.slot_stride = width + below(3);
    if (below(4) == 0) s.active = below(n + 1);
    auto desc = metadata_desc(s.tokens + below(40), n + below(5), width,
                              by_drafts ? KDA_METADATA_BY_DRAFTS : KDA_METADATA_BY_ROLE);
    desc.chunk = static_cast<int32_t>(16 << below(3));
    desc.null_slot = below(2) - 1;
    SCOPED_TRACE("round " + std::to_string(round));
    check_step(desc, s, below(2) == 0);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Metadata, M32_M07_V07_RowsWithoutDraftsStaySpecWithTheirCounts) {
  StepInput s = StepInput::of({1, 1, 1}, 4);
  s.accepted = {4, 2, 1};
  for (bool absent : {true, false}) {
    s.drafts = absent ? Ints{} : Ints{-1, -1, -1};
    const auto desc = metadata_desc(4, 4, 4);
    const Plan plan = metadata_plan(desc);
    Tables t(desc, KDA_INT32);
    StepViews v(s);
    v.args.tables = t.views();
    ASSERT_EQ(run(plan, v.args), KDA_OK);
    EXPECT_EQ(t["counts"], (Ints{0, 0, 0, 0, 3, 3, 3, 0}));
    EXPECT_EQ(t["num_accepted"], (Ints{4, 2, 1, 1}));
    EXPECT_EQ(t.head("spec_slots", 4), (Ints{100, 101, 102, 103}));
  }
}

TEST(Metadata, F50_M03_M05_M04_AFreshOneTokenRowIsAChunkRow) {
  StepInput s = StepInput::of({1, 1, 0}, 1);
  s.computed = {0, 9, 9};
  for (uint32_t flags : {0u, KDA_PLAN_BATCH_INVARIANT}) {
    auto desc = metadata_desc(4, 4);
    desc.flags = flags;
    const Plan plan = metadata_plan(desc);
    Tables t(desc, KDA_INT32);
    StepViews v(s);
    v.args.tables = t.views();
    ASSERT_EQ(run(plan, v.args), KDA_OK);
    EXPECT_EQ(t["counts"], (Ints{1, 1, 1, 1, 0, 0, 2, 1}));  // the empty row is neither
    EXPECT_EQ(t.head("prefill_rows", 2), (Ints{0, -1}));
    EXPECT_EQ(t.head("has_initial_state", 1), (Ints{0}));
    EXPECT_EQ(t.head("decode_rows", 2), (Ints{1, -1}));
  }
  // Under vLLM's rule as well: it makes all plain rows prefills.
  const auto desc = metadata_desc(4, 4, 1, KDA_METADATA_BY_DRAFTS);
  const Plan plan = metadata_plan(desc);
  Tables t(desc, KDA_INT32);
  StepViews v(s);
  v.args.tables = t.views();
  ASSERT_EQ(run(plan, v.args), KDA_OK);
  EXPECT_EQ(t["counts"], (Ints{2, 2, 0, 0, 0, 0, 2, 2}));
  // A one-token row of a prompt that is still prefilling is a chunk row with a state.
  s.computed = {5, 9, 9};
  s.prefilling = {1, 0, 0};
  check_step(metadata_desc(4, 4), s);
}

TEST(Metadata, M06_RecurrentRowsKeepOutOfTheChunkGroup) {
  // F32's step: 953 one-token rows beside one prompt.
  Ints lengths(953, 1);
  lengths.push_back(7239);
  StepInput s = StepInput::of(lengths, 1);
  s.computed.back() = 0;
  s.prefilling.back() = 1;
  const auto desc = metadata_desc(8192, 1024);
  const Plan plan = metadata_plan(desc);
  Tables t(desc, KDA_INT32);
  StepViews v(s);
  v.args.tables = t.views();
  ASSERT_EQ(run(plan, v.args), KDA_OK);
  EXPECT_EQ(t["counts"], (Ints{1, 7239, 953, 953, 0, 0, 8192, 114}));
  EXPECT_EQ(t.head("prefill_begin", 1), (Ints{953}));
}

TEST(Metadata, P07_F51_RowsBehindTheActiveCountAreNotLookedAt) {
  StepInput s = StepInput::of({1, 1, 1, 1, 1, 1, 1, 1}, 1);
  s.slots = {2, 4, 6, 1, 3, 2, 2, 2};
  s.active = 5;
  auto desc = metadata_desc(8, 8);
  check_step(desc, s);
  // Whatever they hold.
  s.cu = {0, 1, 2, 3, 4, 5, -7, INT32_MAX, 2};
  s.computed = {1, 1, 1, 1, 1, INT32_MIN, 0, 0};
  const Plan plan = metadata_plan(desc);
  Tables t(desc, KDA_INT32);
  StepViews v(s);
  v.args.tables = t.views();
  ASSERT_EQ(run(plan, v.args), KDA_OK);
  EXPECT_EQ(t["decode_rows"], (Ints{0, 1, 2, 3, 4, -1, -1, -1}));
  EXPECT_EQ(t["decode_slots"], (Ints{2, 4, 6, 1, 3, -1, -1, -1}));
  // A count outside [0, N] is clamped; checked mode reports it.
  for (int32_t active : {-3, 99}) {
    Tensor count = Tensor::ints({active}, KDA_INT32);
    s.cu = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    s.computed.assign(8, 1);
    s.active = -1;
    StepViews w(s);
    w.args.step.num_active = count.view();
    w.args.tables = t.views();
    ASSERT_EQ(run(plan, w.args), KDA_OK);
    EXPECT_EQ(t["counts"][KDA_COUNT_DECODES], active < 0 ? 0 : 8);
    desc.flags = KDA_PLAN_CHECKED;
    const Plan checked = metadata_plan(desc);
    EXPECT_EQ(run(checked, w.args), KDA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(kda_last_error()).find("num_active"), std::string::npos) << kda_last_error();
  }
}

TEST(Metadata, F55_AcceptedCountsAreHandedOnAsTheyAre) {
  for (int64_t accepted : {0, 1, 4, 5, 6, 8, 100, -1}) {
    for (int64_t length : {1, 3, 5}) {
      StepInput s = StepInput::of({length, 2}, 5);
      s.accepted = {accepted, 3};
      auto desc = metadata_desc(16, 3, 5);
      check_step(desc, s);
      desc.flags = KDA_PLAN_CHECKED;
      const Plan checked = metadata_plan(desc);
      Tables t(desc, KDA_INT32);
      StepViews v(s);
      v.args.tables = t.views();
      const bool good = accepted >= 1 && accepted <= 5;
      EXPECT_EQ(run(checked, v.args), good ? KDA_OK : KDA_INVALID_ARGUMENT);
      if (!good) {
        EXPECT_NE(std::string(kda_last_error())
                      .find("accepted[0]: wanted a value in [1, 5], got " + std::to_string(accepted)),
                  std::string::npos);
        for (const auto& e : t.entries) EXPECT_TRUE(e.table.untouched()) << e.name;
      }
    }
  }
}

TEST(Metadata, F37_SlotsFromAColumnOfAWideTable) {
  StepInput s = StepInput::of({1, 1, 1}, 1);
  s.slots = {4, 2, 7};
  s.slot_stride = 9;
  for (kda_dtype dtype : {KDA_INT32, KDA_INT64}) {
    s.slot = dtype;
    check_step(metadata_desc(4, 4), s);  // [N, 1]
    const auto desc = metadata_desc(4, 4);
    const Plan plan = metadata_plan(desc);
    Tables t(desc, KDA_INT32);
    StepViews v(s);
    v.args.slot_table = select(v.args.slot_table, 1, 0);  // [N], stride 9
    v.args.tables = t.views();
    ASSERT_EQ(run(plan, v.args), KDA_OK) << kda_last_error();
    EXPECT_EQ(t["decode_slots"], (Ints{4, 2, 7, -1}));
  }
}

TEST(Metadata, F42_SlotsThatNoInt32HoldsAreDead) {
  StepInput s = StepInput::of({1, 1, 1, 1}, 1);
  s.slot = KDA_INT64;
  s.slots = {int64_t{1} << 31, 3, -(int64_t{1} << 31) - 1, (int64_t{1} << 32) + 3};
  auto desc = metadata_desc(4, 4);
  desc.null_slot = 0;
  const Plan plan = metadata_plan(desc);
  Tables t(desc, KDA_INT32);
  StepViews v(s);
  v.args.tables = t.views();
  ASSERT_EQ(run(plan, v.args), KDA_OK);
  EXPECT_EQ(t["decode_slots"], (Ints{-1, 3, -1, -1}));
}

TEST(Metadata, F43_F45_SlotZeroIsOrdinaryAndPaddingCarriesTheNullSlot) {
  StepInput s = StepInput::of({1, 0, 1}, 1);
  s.slots = {0, 5, 3};
  for (int64_t null_slot : {-1, 0}) {
    auto desc = metadata_desc(4, 16);
    desc.null_slot = null_slot;
    check_step(desc, s);
  }
}

TEST(Metadata, M09_ColumnsFromTokenPositions) {
  int64_t column = 77;
  EXPECT_EQ(kda_block_column(1, 16, 3, &column), KDA_OK);
  EXPECT_EQ(column, 0);
  EXPECT_EQ(kda_block_column(16, 16, 3, &column), KDA_OK);
  EXPECT_EQ(column, 0);
  EXPECT_EQ(kda_block_column(17, 16, 3, &column), KDA_OK);
  EXPECT_EQ(column, 1);
  EXPECT_EQ(kda_block_column(48, 16, 3, &column), KDA_OK);
  EXPECT_EQ(column, 2);
  EXPECT_EQ(kda_block_column(49, 16, 3, &column), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(column, 2);
  EXPECT_NE(std::string(kda_last_error()).find("width 3, got 3"), std::string::npos) << kda_last_error();
  EXPECT_EQ(kda_block_column(0, 16, 3, &column), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_block_column(5, 0, 3, &column), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_block_column(5, 4, 3, nullptr), KDA_INVALID_ARGUMENT);
}

TEST(Metadata, K06_CheckpointCounts) {
  const int64_t lengths[] = {63, 64, 65, 128, 130}, wanted[] = {0, 1, 1, 2, 2};
  int64_t count = -1;
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(kda_checkpoint_count(0, lengths[i], 64, &count), KDA_OK);
    EXPECT_EQ(count, wanted[i]);
  }
  // By counting boundaries in (computed, computed + n].
  for (int64_t computed = 0; computed < 40; ++computed) {
    for (int64_t n = 0; n < 40; ++n) {
      int64_t boundaries = 0;
      for (int64_t b = computed + 1; b <= computed + n; ++b) boundaries += b % 16 == 0;
      ASSERT_EQ(kda_checkpoint_count(computed, n, 16, &count), KDA_OK);
      ASSERT_EQ(count, boundaries) << computed << " " << n;
    }
  }
  EXPECT_EQ(kda_checkpoint_count(-1, 1, 16, &count), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_checkpoint_count(1, -1, 16, &count), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_checkpoint_count(1, 1, 0, &count), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_checkpoint_count(INT64_MAX, 1, 16, &count), KDA_INVALID_ARGUMENT);
}

TEST(Metadata, M32_StagingGrowsAndShrinksThroughOneBuffer) {
  const auto desc = metadata_desc(64, 8, 2);
  const Plan plan = metadata_plan(desc);
  Tables tables(desc, KDA_INT32);  // not poisoned between steps: the last step's values are there
  std::mt19937 random(5);
  for (int step = 0; step < 60; ++step) {
    Ints lengths(random() % 9);
    for (auto& l : lengths) l = static_cast<int64_t>(random() % 8);
    StepInput s = StepInput::of(lengths, 2);
    for (auto& p : s.prefilling) p = random() % 2;
    StepViews v(s);
    v.args.tables = tables.views();
    ASSERT_EQ(run(plan, v.args), KDA_OK);
    expect_tables(tables, model_step(desc, s));
  }
}

TEST(Metadata, M10_EveryTableMayBeAbsent) {
  const auto desc = metadata_desc(16, 4, 2);
  const Plan plan = metadata_plan(desc);
  const StepInput s = StepInput::of({1, 3, 5}, 2);
  const Expected expected = model_step(desc, s);
  Tables all(desc, KDA_INT32);
  for (const auto& only : all.entries) {
    Tables t(desc, KDA_INT32);
    StepViews v(s);
    const kda_step_tables views = t.views();
    v.args.tables.*only.member = views.*only.member;
    if (std::string(only.name).rfind("chunk_", 0) == 0) {
      v.args.tables.chunk_indices = views.chunk_indices;
      v.args.tables.chunk_offsets = views.chunk_offsets;
      v.args.tables.prefill_query_start_loc = views.prefill_query_start_loc;
    }
    ASSERT_EQ(run(plan, v.args), KDA_OK) << only.name << ": " << kda_last_error();
    for (const auto& [name, values] : expected) {
      EXPECT_TRUE(name != only.name || t[name] == values) << name;
    }
  }
}

TEST(Metadata, M28_CaptureDummiesGiveAFullGroupAndSmallerStepsPadIt) {
  // One captured build serves any step of at most as many rows: the tables' shapes never change.
  const auto desc = metadata_desc(12, 4, 3, KDA_METADATA_BY_DRAFTS);
  const Plan plan = metadata_plan(desc);
  Tables t(desc, KDA_INT32);
  StepInput dummies = StepInput::of({3, 3, 3, 3}, 3);
  dummies.drafts = {2, 2, 2, 2};
  dummies.accepted = {3, 3, 3, 3};
  StepInput fewer = StepInput::of({3, 2, 0, 0}, 3);
  fewer.drafts = {2, 1, -1, -1};
  fewer.accepted = {2, 1, 1, 1};
  for (const StepInput& s : {dummies, fewer}) {
    StepViews v(s);
    v.args.tables = t.views();
    ASSERT_EQ(run(plan, v.args), KDA_OK);
    expect_tables(t, model_step(desc, s));
  }
  EXPECT_EQ(t["spec_length"], (Ints{3, 2, 0, 0}));
  EXPECT_EQ(t["num_accepted"], (Ints{2, 1, 1, 1}));
  EXPECT_EQ(t["spec_sequence_masks"], (Ints{1, 1, 0, 0}));
  EXPECT_EQ(t.head("spec_query_start_loc", 5), (Ints{0, 3, 5, 5, 5}));
}

TEST(Metadata, M12_HostCountsComeFromTheHostCopyOrTheCpuItself) {
  check_step(metadata_desc(16, 4, 3), worked_example(), false);
  check_step(metadata_desc(16, 4, 3), worked_example(), true);
}

TEST(Metadata, M18_NoRowsAndAllEmptyRows) {
  check_step(metadata_desc(8, 4, 2), StepInput::of({}, 2));
  check_step(metadata_desc(8, 4, 2), StepInput::of({0, 0, 0}, 2));
  check_step(metadata_desc(0, 0, 1), StepInput::of({}, 1));
}

TEST(Metadata, M31_ThousandBuildsAllocateNothing) {
  KDA_HOST_MEMORY_ONLY();
  const auto desc = metadata_desc(512, 64, 3);
  const Plan plan = metadata_plan(desc);
  Tables t(desc, KDA_INT32);
  std::vector<std::unique_ptr<StepViews>> steps;
  for (int64_t n = 0; n < 50; ++n) {
    Ints lengths;
    for (int64_t i = 0; i < n; ++i) lengths.push_back(i * 7 % 11);
    StepInput s = StepInput::of(lengths, 3);
    for (size_t i = 0; i < s.prefilling.size(); ++i) s.prefilling[i] = i % 3 == 0;
    steps.push_back(std::make_unique<StepViews>(s, n % 2 == 0));
    steps.back()->args.tables = t.views();
  }
  int failures = 0;
  {
    const ServingGuard guard;
    for (int call = 0; call < 1000; ++call)
      failures += run(plan, steps[static_cast<size_t>(call % 50)]->args) != KDA_OK;
    EXPECT_EQ(guard.calls().total(), 0) << guard.calls().text();
  }
  EXPECT_EQ(failures, 0) << kda_last_error();
}

TEST(Metadata, F41_M21_M31_ValuesAreReadAnewAtTheSameAddress) {
  const auto desc = metadata_desc(70, 2);
  const Plan plan = metadata_plan(desc);
  Tables t(desc, KDA_INT32);
  StepInput s = StepInput::of({65, 5}, 1);
  s.computed = {0, 0};
  StepViews v(s);
  v.args.tables = t.views();
  auto* cu = static_cast<int32_t*>(v.args.step.query_start_loc.data);
  const auto chunks = [&] {
    EXPECT_EQ(run(plan, v.args), KDA_OK);
    Ints c = t["chunk_indices"];
    c.resize(2 * static_cast<size_t>(t["counts"][KDA_COUNT_CHUNKS]));
    t.poison();
    return c;
  };
  EXPECT_EQ(chunks(), (Ints{0, 0, 0, 1, 1, 0}));
  cu[1] = 5;
  EXPECT_EQ(chunks(), (Ints{0, 0, 1, 0, 1, 1}));
  cu[1] = 64, v.args.num_tokens = 70;
  EXPECT_EQ(chunks(), (Ints{0, 0, 1, 0}));
}

}  // namespace
}  // namespace kda::conformance::test

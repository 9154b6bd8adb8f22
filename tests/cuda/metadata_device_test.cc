// Metadata on a device beyond the contract tests of tests/unit/core (built into the same program): large steps and
// bad offsets against the CPU backend, whose tables are the core's definition; graphs; the hooks (spec M-17..M-23,
// M-28, M-31, M-33).
#include <random>

#include "device_copy.h"
#include "unit/core/metadata_fixture.h"

namespace kda::conformance::test {
namespace {

kda_status run_on_cpu(const Plan& plan, kda_metadata_args args) {
  return kda_metadata_run(plan.get(), &args, kda_workspace{}, nullptr);
}

// Both backends' tables of one step, chunk tables included.
void expect_as_on_the_cpu(const kda_metadata_desc& desc, const StepInput& s, bool host = false) {
  const Plan here = metadata_plan(desc), there = metadata_plan(desc, cpu_context());
  ASSERT_TRUE(here.ok()) << here.message();
  EXPECT_EQ(here.backend(), "LIBKDA_CUDA");
  Tables tables(desc, s.offset), wanted(desc, s.offset);
  StepViews views(s, host);
  views.args.tables = wanted.views();
  ASSERT_EQ(run_on_cpu(there, views.args), KDA_OK) << kda_last_error();
  views.args.tables = tables.views();
  ASSERT_EQ(run(here, views.args), KDA_OK) << kda_last_error();
  for (size_t i = 0; i < tables.entries.size(); ++i) {
    EXPECT_TRUE(tables.entries[i].table.guards_intact()) << tables.entries[i].name;
    EXPECT_TRUE(tables.entries[i].table.values() == wanted.entries[i].table.values()) << tables.entries[i].name;
  }
}

TEST(MetadataDevice, M18_M30_LargeStepsEqualTheDefinition) {
  std::mt19937_64 random(18);
  for (const int64_t n : {1, 31, 64, 65, 511, 512, 513, 1000, 4096, 32768, 70000}) {
    for (const auto mode : {KDA_METADATA_BY_ROLE, KDA_METADATA_BY_DRAFTS}) {
      for (const int32_t width : {1, 4}) {
        const StepInput s = random_step(random, n, width, n > 5000 ? 20 : 300);
        auto desc = metadata_desc(s.tokens + 100, n + static_cast<int64_t>(random() % 70), width, mode);
        desc.chunk = static_cast<int32_t>(16 << random() % 3);
        SCOPED_TRACE("N " + std::to_string(n) + " mode " + std::to_string(mode) + " width " + std::to_string(width));
        expect_as_on_the_cpu(desc, s);
      }
    }
  }
}

TEST(MetadataDevice, M07_ByDraftsWithNothingButDecodesAndDrafts) {
  StepInput s = StepInput::of(Ints(700, 1), 3);
  s.drafts.assign(700, -1);
  for (size_t i = 0; i < 700; i += 3) s.drafts[i] = 0;
  expect_as_on_the_cpu(metadata_desc(1000, 900, 3, KDA_METADATA_BY_DRAFTS), s);
  s.prefilling[650] = 1;  // one row makes all of the rest prefills
  expect_as_on_the_cpu(metadata_desc(1000, 900, 3, KDA_METADATA_BY_DRAFTS), s);
}

TEST(MetadataDevice, M19_BadOffsetsGiveTheDefinitionsTables) {
  std::mt19937_64 random(19);
  for (int round = 0; round < 120; ++round) {
    const auto n = static_cast<int64_t>(round < 100 ? random() % 12 : 600 + random() % 1500);
    StepInput s = random_step(random, n, 2, 40);
    s.tokens = static_cast<int64_t>(random() % 300);
    for (auto& x : s.cu) {
      if (random() % 3 == 0) x = static_cast<int64_t>(random() % 600) - 150;
    }
    if (round % 7 == 0 && n > 0) s.cu[static_cast<size_t>(n) / 2] = s.offset == KDA_INT64 ? INT64_MAX : INT32_MAX;
    if (round % 5 == 0) s.active = static_cast<int64_t>(random() % static_cast<uint64_t>(n + 1));
    const auto mode = round % 2 ? KDA_METADATA_BY_DRAFTS : KDA_METADATA_BY_ROLE;
    SCOPED_TRACE(round);
    expect_as_on_the_cpu(metadata_desc(400, n + 3, 2, mode), s);
    if (HasFailure()) return;
  }
}

TEST(MetadataDevice, M23_TheHostHookGivesTheSameTables) {
  std::mt19937_64 random(23);
  for (const int64_t n : {0, 1, 40, 4096, 9000}) {  // several pieces at 9000
    StepInput s = random_step(random, n, 1, 30);
    auto desc = metadata_desc(s.tokens + 5, n + 2);
    const Plan there = metadata_plan(desc, cpu_context());
    desc.hook = "host";
    const Plan here = metadata_plan(desc);
    Tables tables(desc, s.offset), wanted(desc, s.offset);
    StepViews views(s, true);
    views.args.tables = wanted.views();
    ASSERT_EQ(run_on_cpu(there, views.args), KDA_OK);
    views.args.tables = tables.views();
    ASSERT_EQ(run(here, views.args), KDA_OK) << kda_last_error();
    for (const char* name : {"chunk_indices", "chunk_offsets", "counts"})
      EXPECT_TRUE(tables[name] == wanted[name]) << name << n;
    StepViews without(s);
    without.args.tables = tables.views();
    EXPECT_EQ(run(here, without.args), KDA_INVALID_ARGUMENT);
  }
}

struct Seen {
  int calls = 0;
  kda_chunk_request last{};
};

TEST(MetadataDevice, M22_M33_AnOverrideIsCalledOnceAndChangesChunkTablesOnly) {
  const auto hook = [](void* user, const kda_chunk_request* r) {
    auto& seen = *static_cast<Seen*>(user);
    ++seen.calls;
    seen.last = *r;
    return cudaMemsetAsync(r->chunk_offsets.data, 0x11, static_cast<size_t>(r->chunk_offsets.shape[0]) * 8,
                           static_cast<cudaStream_t>(r->stream)) == cudaSuccess
               ? KDA_OK
               : KDA_DEVICE_ERROR;
  };
  Seen seen;
  StepInput s = StepInput::of({70, 2, 0, 1, 130}, 3);
  s.prefilling = {1, 0, 0, 0, 0};
  auto desc = metadata_desc(256, 6, 3);
  desc.chunk_hook = hook;
  desc.chunk_user = &seen;
  const Plan plan = metadata_plan(desc);
  ASSERT_TRUE(plan.ok()) << plan.message();
  for (const bool host : {false, true}) {
    Tables t(desc, KDA_INT32);
    StepViews v(s, host);
    v.args.tables = t.views();
    seen.calls = 0;
    ASSERT_EQ(run(plan, v.args), KDA_OK) << kda_last_error();
    EXPECT_EQ(seen.calls, 1);
    EXPECT_EQ(seen.last.device.type, KDA_CUDA);
    EXPECT_EQ(seen.last.num_sequences, host ? 2 : 5);  // bounded without host lengths (M-17)
    EXPECT_EQ(present(seen.last.cu_seqlens_host), host);
    for (const auto& [name, values] : model_step(desc, s)) {
      if (name == "chunk_offsets") {
        EXPECT_EQ(t[name], Ints(values.size(), 0x1111111111111111));
      } else if (name != "chunk_indices") {
        EXPECT_EQ(t[name], values) << name;
      }
    }
  }
}

// A step in device memory of its own, to be captured.
class CapturedStep {
 public:
  CapturedStep(const kda_metadata_desc& desc, const StepInput& s)
      : tables(desc, s.offset), views(s), args(with_tables(views.args, tables)), mirror(memory, list(args), 0) {}
  static kda_metadata_args with_tables(kda_metadata_args a, const Tables& t) {
    a.tables = t.views();
    return a;
  }
  static std::vector<kda_tensor*> list(kda_metadata_args& a) {
    std::vector<kda_tensor*> out{&a.step.query_start_loc, &a.step.computed,   &a.step.has_state, &a.step.prefilling,
                                 &a.step.drafts,          &a.step.num_active, &a.accepted,       &a.slot_table};
    auto* tables = reinterpret_cast<kda_tensor*>(&a.tables);
    for (size_t i = 0; i < sizeof(a.tables) / sizeof(kda_tensor); ++i) out.push_back(tables + i);
    return out;
  }
  // The captured tensors' new values.
  void assign(const StepInput& s) {
    const StepViews now(s);
    const auto copy = [](const kda_tensor& to, const kda_tensor& from) {
      const ByteRange range = byte_range(from);
      if (range.first < range.last) std::memcpy(to.data, from.data, range.last - range.first);
    };
    copy(views.args.step.query_start_loc, now.args.step.query_start_loc);
    copy(views.args.step.computed, now.args.step.computed);
    copy(views.args.step.prefilling, now.args.step.prefilling);
    copy(views.args.step.drafts, now.args.step.drafts);
    copy(views.args.accepted, now.args.accepted);
    copy(views.args.slot_table, now.args.slot_table);
  }
  Tables tables;
  StepViews views;
  kda_metadata_args args;
  cuda_test::Memory memory;
  conformance::Mirror mirror;
};

TEST(MetadataDevice, M02_M28_M31_F52_ACapturedBuildFollowsTheDevice) {
  std::mt19937_64 random(28);
  for (const auto mode : {KDA_METADATA_BY_ROLE, KDA_METADATA_BY_DRAFTS}) {
    const int64_t n = 200, tokens = 4000;
    StepInput s = random_step(random, n, 3, 20);
    s.offset = KDA_INT32, s.slot = KDA_INT64, s.slot_stride = 4;
    const auto fit = [&](StepInput x) {
      x.offset = KDA_INT32, x.slot = KDA_INT64, x.slot_stride = 4;
      for (auto& c : x.cu) c = std::min(c, tokens);
      x.tokens = tokens;
      return x;
    };
    const auto desc = metadata_desc(tokens, n, 3, mode);
    const Plan plan = metadata_plan(desc), there = metadata_plan(desc, cpu_context());
    CapturedStep step(desc, fit(s));
    const CapturedCalls graph([&](cudaStream_t stream) {
      ASSERT_EQ(kda_metadata_run(plan.get(), &step.args, kda_workspace{}, stream), KDA_OK) << kda_last_error();
    });
    EXPECT_EQ(graph.nodes(), 1u);  // one launch, no copy of any kind
    for (int replay = 0; replay < 60; ++replay) {
      const StepInput now = fit(random_step(random, n, 3, 20));
      step.assign(now);
      step.tables.poison();
      ASSERT_TRUE(step.mirror.refresh());
      graph.replay();
      ASSERT_EQ(step.mirror.back(), "");
      Tables wanted(desc, now.offset);
      StepViews views(now);
      views.args.tables = wanted.views();
      ASSERT_EQ(run_on_cpu(there, views.args), KDA_OK);
      for (size_t i = 0; i < wanted.entries.size(); ++i) {
        ASSERT_TRUE(step.tables.entries[i].table.values() == wanted.entries[i].table.values())
            << wanted.entries[i].name << " in replay " << replay;
      }
    }
  }
}

}  // namespace
}  // namespace kda::conformance::test

// The rounds of kda bench on a device, on a context of the CPU: modes, order, ratios. Never times.
#include "bench/device_rounds.h"

#include <gtest/gtest.h>

#include <kda/kda.hpp>
#include <set>

#include "bench/targets.h"
#include "bench/workload.h"

namespace kda::bench {
namespace {

struct Counted {
  int calls = 0;
  std::set<int64_t> numbers;
  Variant variant(const char* label) {
    return {label, [this](int64_t i, void*) { ++calls, numbers.insert(i); }, 100, Unit::kByte, "", 100};
  }
};

TEST(DeviceRounds, U02_EveryRoundRunsAllVariantsInAShuffledOrder) {
  const Context context(1);
  Counted a, b, c;
  RoundOptions options;
  options.rounds = 20;
  options.warmup = 1;
  const DeviceRounds rounds =
      run_device_rounds(context.get(), {a.variant("a"), b.variant("b"), c.variant("c")}, options);
  // The CPU has no graphs: the other three modes (U-4), and the call before the rounds.
  EXPECT_EQ(a.calls, 1 + 3 * 21);
  EXPECT_EQ(rounds.samples.size(), 3u * 3 * 20);
  EXPECT_TRUE(rounds.seconds("a", Mode::kGraph).empty());
  EXPECT_EQ(rounds.seconds("b", Mode::kWall).size(), 20u);
  std::set<int> places;
  for (const DeviceSample& s : rounds.samples) {
    if (s.variant == 0) places.insert(s.order);
  }
  EXPECT_EQ(places, (std::set<int>{0, 1, 2}));
  EXPECT_GT(a.numbers.size(), 60u) << "calls that follow one another must not use the same memory";
  EXPECT_EQ(rounds.ratios("a", {"b", "c"}, Mode::kWall).size(), 20u);
}

TEST(DeviceRounds, U04_CallsOfAGraph) {
  EXPECT_EQ(calls_of(0), 100);
  EXPECT_EQ(calls_of(1), 100);
  EXPECT_EQ(calls_of(1e12), 4);
}

TEST(DeviceRounds, U04_OnlyTheModesAskedFor) {
  const Context context(1);
  Counted a;
  RoundOptions options;
  options.rounds = 3, options.warmup = 0;
  const DeviceRounds rounds = run_device_rounds(context.get(), {a.variant("a")}, options, {Mode::kWall});
  EXPECT_EQ(rounds.samples.size(), 3u);
  EXPECT_EQ(rounds.seconds("a", Mode::kWall).size(), 3u);
}

TEST(DeviceReport, LimitsCountFloorsAndMicroseconds) {
  Workload w;
  w.name = "made up", w.backend = "none";
  w.variants = {{"first", {}, 1, Unit::kByte, "", 1000}, {"second", {}, 1, Unit::kByte, "", 1000}};
  DeviceRounds rounds;
  rounds.variants = w.variants;
  rounds.variants.push_back({"copy rate: memcpy", {}, 1000, Unit::kByte, "", 1000});
  rounds.calls = {1, 1, 1};
  // 1,000 bytes take 1 us at the copy rate, 3 us in the first variant and 2 us in the second.
  rounds.samples = {{0, 0, 0, Mode::kGraph, 3e-6}, {0, 1, 1, Mode::kGraph, 2e-6}, {0, 2, 2, Mode::kGraph, 1e-6}};
  EXPECT_TRUE(meets(w, rounds, {}));
  EXPECT_TRUE(meets(w, rounds, {3.001, 0, ""}));
  EXPECT_FALSE(meets(w, rounds, {2.9, 0, ""}));
  EXPECT_TRUE(meets(w, rounds, {0, 2.1, "second"}));
  EXPECT_FALSE(meets(w, rounds, {0, 1.9, "second"}));
  EXPECT_TRUE(meets(w, rounds, {1, 1.1, "second"}));
  const Json j = device_json(w, rounds, {1, 1.5, "second"});
  EXPECT_DOUBLE_EQ(j["limit"]["limit_us"], 2.5);
  EXPECT_TRUE(j["limit"]["met"]);
  for (DeviceSample& s : rounds.samples) s.mode = Mode::kEvent;
  EXPECT_TRUE(meets(w, rounds, {0, 0.1, ""})) << "limits are of graphs alone";
}

TEST(Targets, NamesAreUniqueAndFiltered) {
  std::set<std::string> names;
  for (const Target& t : targets()) {
    EXPECT_TRUE(names.insert(t.name).second) << t.name;
    EXPECT_FALSE(t.limit.none()) << t.name;
  }
  EXPECT_EQ(targets("decode_step H=96").size(), 3u);
  EXPECT_TRUE(targets("no such name").empty());
}

TEST(DeviceRounds, FailuresLeave) {
  const Context context(1);
  const Variant broken{"broken", [](int64_t, void*) { throw Error(KDA_DEVICE_ERROR, "broken"); }};
  EXPECT_THROW((void)run_device_rounds(context.get(), {broken}, {}), Error);
}

// Right before fast (U-7): rows that a copy gets wrong end the bench; here they are right.
TEST(Workloads, U07_CopiesAreCheckedBeforeTheyAreTimed) {
  const Context context(1);
  const Setting setting{context, Workers(context)};
  CopyShape shape;
  shape.rows = 5;
  shape.heads = 1;
  for (const bool flags : {false, true}) {
    shape.flags = flags;
    shape.index = flags ? KDA_INT64 : KDA_INT32;
    const Workload w = copy(setting, shape);
    for (const Variant& v : w.variants) v.call(1, nullptr);
    EXPECT_EQ(w.variants.size(), 6u);
  }
}

}  // namespace
}  // namespace kda::bench

// The history of a run, and the pictures of the report.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "serve/charts.h"
#include "serve/history.h"

namespace kda::serve {
namespace {

Interval step_at(int64_t i) {
  Interval x;
  x.begin_s = static_cast<double>(i), x.end_s = static_cast<double>(i + 1);
  x.steps = 1, x.prefilled = i, x.decoded = 2 * i;
  x.used_slots = i % 7;
  return x;
}

TEST(History, KeepsSumsAndShapeInABoundedNumberOfIntervals) {
  for (const int64_t steps : {0, 1, 255, 256, 257, 512, 513, 100'000}) {
    SCOPED_TRACE(steps);
    History h;
    for (int64_t i = 0; i < steps; ++i) h.add(step_at(i));
    const auto& all = h.intervals();
    EXPECT_LE(all.size(), History::kMost);
    EXPECT_GE(static_cast<int64_t>(all.size()), std::min<int64_t>(steps, History::kMost / 2));
    Interval sum;
    double end = 0;
    for (const Interval& x : all) {
      EXPECT_EQ(x.begin_s, end);
      end = x.end_s;
      sum.append(x);
      EXPECT_TRUE(&x == &all.back() || x.steps == all.front().steps);
    }
    EXPECT_EQ(end, static_cast<double>(steps));
    EXPECT_EQ(sum.steps, steps);
    EXPECT_EQ(sum.prefilled, steps * (steps - 1) / 2);
    EXPECT_EQ(sum.decoded, steps * (steps - 1));
    EXPECT_EQ(sum.used_slots, std::min<int64_t>(std::max<int64_t>(steps - 1, 0), 6));
  }
}

TEST(Charts, EscapesWhatIsNotMarkup) { EXPECT_EQ(escaped("<a b=\"c\">&'"), "&lt;a b=&quot;c&quot;&gt;&amp;&#39;"); }

TEST(Charts, NumbersForPeople) {
  EXPECT_EQ(short_number(0), "0");
  EXPECT_EQ(short_number(0.25), "0.25");
  EXPECT_EQ(short_number(8192), "8192");
  EXPECT_EQ(short_number(51'234), "51.2 k");
  EXPECT_EQ(short_number(5.2e6), "5.2 M");
  EXPECT_EQ(short_number(1.7e-3), "0.0017");
  EXPECT_EQ(short_number(std::numeric_limits<double>::infinity()), "inf");
  EXPECT_EQ(short_number(std::nan("")), "?");
}

size_t count(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

TEST(Charts, ABarForEveryValueThatIsNotZero) {
  const std::string svg = bars_over_time("label", "tokens", {0, 1, 2, 4},
                                         {{"x", "a", {1, 0, 3}}, {"y", "b", {2, 2, 2}}}, {{"limit <1>", 7}});
  EXPECT_EQ(count(svg, "<rect"), 5u);
  EXPECT_EQ(count(svg, "limit &lt;1&gt;"), 1u);
  EXPECT_EQ(bars_over_time("label", "tokens", {}, {{"x", "a", {}}}), "");
  // Nothing happened in no time: no division by either.
  const std::string still = bars_over_time("label", "tokens", {1, 1}, {{"x", "a", {0}}});
  EXPECT_EQ(count(still, "nan") + count(still, "inf"), 0u);
}

TEST(Charts, HistogramsCountEverySampleOrSayWhatIsLeftOut) {
  const double inf = std::numeric_limits<double>::infinity();
  const std::string svg = log_histogram("label", "ms", {1, 1, 1e3, 1e3, 1e3, 0, inf}, "a", {{"p50", 1e3}});
  EXPECT_EQ(count(svg, "<rect"), 2u);
  EXPECT_EQ(count(svg, ">3: "), 1u);
  EXPECT_EQ(count(svg, "2 of 7 not shown"), 1u);
  EXPECT_EQ(count(log_histogram("label", "ms", {5}, "a"), "<rect"), 1u);
  EXPECT_EQ(log_histogram("label", "ms", {0, inf, std::nan("")}, "a"), "");
}

}  // namespace
}  // namespace kda::serve

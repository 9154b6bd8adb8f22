// The tables that `kda check` runs (src/conformance), every row by the portable backend.
#include <gtest/gtest.h>

#include "base/sanitizer.h"
#include "conformance/api.h"
#include "conformance/cases.h"

namespace kda::conformance {
namespace {

// The oracle is slow under a sanitizer; there a part of the rows has to do.
#if defined(KDA_ADDRESS_SANITIZER) || defined(KDA_THREAD_SANITIZER)
constexpr bool kAllRows = false;
#else
constexpr bool kAllRows = true;
#endif

std::string text(const Report& report) {
  std::string s = report.refusal();
  for (const std::string& fault : report.faults()) s += "\n  " + fault;
  for (const Measure& m : report.measures()) {
    if (!m.ok()) s += "\n  " + m.what + ": " + m.error.text() + "; limit " + std::to_string(m.limit);
  }
  return s;
}

// `named`: the portable backend bears its name; copies and metadata have names of their own.
void run_table(const std::vector<Case>& cases, bool named = true) {
  ASSERT_FALSE(cases.empty());
  const Setting setting{"portable", cpu_context(2), cpu_context(1), nullptr};
  for (const Case& c : cases) {
    if (!kAllRows && !c.quick) continue;
    Report report;
    c.run(setting, report);
    EXPECT_TRUE(report.passed()) << c.name << text(report);
    if (named) {
      EXPECT_EQ(report.backend(), "portable") << c.name;
    }
  }
}

// Turns the sign of the last row that holds numbers; false if there is none.
bool turn_last_row(Tensor& t) {
  for (int64_t r = t.shape()[0]; r-- > 0;) {
    const kda_tensor row = select(t, 0, r);
    std::vector<double> x = values(row);
    bool finite = false, zero = true;
    for (double v : x) finite = finite || v == v, zero = zero && v == 0;
    if (!finite || zero) continue;
    for (double& v : x) v = -v;
    assign(row, x);
    return true;
  }
  return false;
}

}  // namespace

TEST(Tables, R61_R62_Prefill) { run_table(prefill_cases()); }
TEST(Tables, N09_N10_Distributions) { run_table(distribution_cases()); }
TEST(Tables, V01_V14_Decode) { run_table(decode_cases()); }
TEST(Tables, V10_W04_Commit) { run_table(commit_cases()); }
TEST(Tables, V15_L08_DecodeStep) { run_table(decode_step_cases()); }
TEST(Tables, W01_W05_K02_Conv) { run_table(conv_cases()); }
TEST(Tables, L07_GatedNorm) { run_table(gated_norm_cases()); }
TEST(Tables, N04_N05_ResidualNorm) { run_table(residual_norm_cases()); }
TEST(Tables, S09_SegmentSummary) { run_table(segment_summary_cases()); }
TEST(Tables, S09_SegmentMerge) { run_table(segment_merge_cases()); }
TEST(Tables, C01_C22_StateCopy) { run_table(state_copy_cases(), false); }
TEST(Tables, M10_M30_Metadata) { run_table(metadata_cases(), false); }

// A case whose results are wrong in one row must say so.
TEST(Tables, F07_EveryTableNoticesASpoiledResult) {
  Setting setting{"portable", cpu_context(2), cpu_context(1), nullptr};
  bool spoiled = false;
  setting.spoil = [&](const std::string&, Tensor& t) { spoiled = turn_last_row(t) || spoiled; };
  for (const Case& c : all_cases()) {
    if (!c.quick) continue;
    Report report;
    spoiled = false;
    c.run(setting, report);
    EXPECT_TRUE(!spoiled || !report.passed()) << c.name;
  }
}

}  // namespace kda::conformance

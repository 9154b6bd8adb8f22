// The small parts: content, conversions, digests, percentiles, the comparison, models, output files.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "conformance/rounding.h"
#include "serve/content.h"
#include "serve/convert.h"
#include "serve/digest.h"
#include "serve/file.h"
#include "serve/prefix_cache.h"
#include "serve/stats.h"
#include "serve/step_builder.h"
#include "serve/timeline.h"
#include "serve/verify.h"
#include "serve/weights.h"

namespace kda::serve {
namespace {

TEST(Convert, G02_RoundsToNearestEven) {
  EXPECT_EQ(bf16_bits(1.0f), 0x3f80);
  EXPECT_EQ(bf16_bits(1.00390625f), 0x3f80);  // halfway, to even
  EXPECT_EQ(bf16_bits(1.01171875f), 0x3f82);
  EXPECT_EQ(fp16_bits(0.0f), 0);
  EXPECT_EQ(fp16_bits(-0.0f), 0x8000);
  EXPECT_EQ(fp16_bits(65519.0f), 0x7bff);
  EXPECT_EQ(fp16_bits(65520.0f), 0x7c00);
  EXPECT_EQ(fp16_bits(0x1p-25f), 0);  // halfway between 0 and the smallest: to even
  EXPECT_EQ(fp16_bits(0x1.8p-25f), 1);
  EXPECT_EQ(fp16_bits(0x1.ff8p-15f), 0x3ff);  // largest subnormal
  EXPECT_EQ(fp16_bits(0x1p-14f), 0x400);
  for (int i = -40000; i < 40000; ++i) {  // every exponent, values between neighbours
    const float x = static_cast<float>(i % 977) * std::ldexp(1.0f, i / 1000) * 0.37f;
    for (kda_dtype dtype : {KDA_BF16, KDA_FP16, KDA_FP32}) {
      float mine = 0, theirs = 0;
      store(&mine, dtype, 0, x);
      conformance::store(&theirs, dtype, x);
      ASSERT_EQ(std::memcmp(&mine, &theirs, kda_dtype_size(dtype)), 0) << x << " as " << kda_dtype_name(dtype);
    }
  }
}

TEST(Models, L03_L06_ShapesAndShares) {
  auto tiny = make_model({});
  ASSERT_TRUE(tiny.ok());
  EXPECT_EQ(tiny.value().channels(), 768);
  auto k3 = make_model({.name = "kimi-k3", .layers = 2, .tp = 8});
  ASSERT_TRUE(k3.ok());
  EXPECT_EQ(k3.value().heads, 12);
  EXPECT_EQ(k3.value().gate_family, KDA_GATE_BOUNDED);
  EXPECT_EQ(k3.value().lower_bound, -5);
  EXPECT_EQ(k3.value().io_dtype, KDA_BF16);
  EXPECT_FALSE(make_model({.name = "kimi-k3", .tp = 7}).ok());
  auto unknown = make_model({.name = "kimi"});
  ASSERT_FALSE(unknown.ok());
  EXPECT_NE(unknown.status().message().find("tiny, kimi-linear, kimi-k3, glm-5.3-flash"), std::string::npos);
  EXPECT_FALSE(make_model({.io = "fp8"}).ok());
}

TEST(Content, ATableIsStandardNormalAndARankHoldsAPartOfIt) {
  auto whole = make_model({.heads = 4}), share = make_model({.heads = 4, .tp = 2});
  kda_context* context = nullptr;
  ASSERT_EQ(kda_context_create(nullptr, &context), KDA_OK);
  auto a = Content::seeded(whole.value(), 7, context), b = Content::seeded(share.value(), 7, nullptr);
  kda_context_destroy(context);
  ASSERT_TRUE(a.ok() && b.ok());
  double sum = 0, square = 0;
  for (uint32_t r = 0; r < 512; ++r) {
    const auto* x = reinterpret_cast<const float*>(a.value().row(r));
    for (int i = 0; i < 1024; ++i) sum += x[i], square += double{x[i]} * x[i];
    const auto* y = reinterpret_cast<const float*>(b.value().row(r));
    const RowLayout &la = a.value().layout(), &lb = b.value().layout();
    for (int i = 0; i < 256; ++i) {
      EXPECT_EQ(x[i], y[i]);                      // q of heads 0 and 1
      EXPECT_EQ(x[2 * 512 + i], y[2 * 256 + i]);  // v
      EXPECT_EQ(x[la.gate + i], y[lb.gate + i]);
      EXPECT_EQ(x[la.z + i], y[lb.z + i]);
    }
    EXPECT_EQ(x[la.beta + 1], y[lb.beta + 1]);
  }
  EXPECT_NEAR(sum / (512 * 1024), 0, 0.01);
  EXPECT_NEAR(square / (512 * 1024), 1, 0.02);
}

TEST(Content, EqualPrefixesAreEqualTokensAndARejectedDraftIsAnother) {
  auto model = make_model({.heads = 1});
  auto content = Content::seeded(model.value(), 3, nullptr);
  const uint64_t shared[] = {11, 12}, other[] = {11, 13};
  const TokenOwner a{0, shared}, b{1, other}, own{2, {}}, own2{3, {}};
  std::vector<uint32_t> x(1024), y(1024);
  content.value().prompt_rows(a, 0, x);
  content.value().prompt_rows(b, 0, y);
  EXPECT_TRUE(std::equal(x.begin(), x.begin() + 512, y.begin()));
  EXPECT_FALSE(std::equal(x.begin() + 512, x.end(), y.begin() + 512));
  // Pieces give the rows of the whole.
  content.value().prompt_rows(a, 500, std::span<uint32_t>(y).first(100));
  EXPECT_TRUE(std::equal(x.begin() + 500, x.begin() + 600, y.begin()));
  content.value().prompt_rows(own, 0, x);
  content.value().prompt_rows(own2, 0, y);
  EXPECT_NE(x, y);
  content.value().generated_rows(a, 0, x);
  content.value().generated_rows(b, 0, y);
  EXPECT_NE(x, y);
  for (int64_t p = 0; p < 1024; ++p) EXPECT_NE(content.value().rejected_row(a, p), x[static_cast<size_t>(p)]);
}

TEST(Weights, SeededAsDesigned) {
  auto model = make_model({.heads = 64, .layers = 2});
  const auto layers = seeded_weights(model.value(), 5);
  ASSERT_EQ(layers.size(), 2u);
  EXPECT_NE(layers[0].A_log, layers[1].A_log);
  for (float a : layers[0].A_log) {
    EXPECT_GE(a, 0);
    EXPECT_LE(a, std::log(16.0f));
  }
  for (float b : layers[0].dt_bias) {
    const double dt = std::log1p(std::exp(double{b}));
    EXPECT_GT(dt, 0.999e-3);
    EXPECT_LT(dt, 0.1001);
  }
}

TEST(Digest, RowsAtOnceOrOneByOneAreTheSame) {
  const std::string rows = "aaaabbbbcccc";
  Digest once(2), apart(2), swapped(2);
  once.add_rows(0, rows.data(), 3, 4);
  for (int i = 0; i < 3; ++i) apart.add_rows(0, rows.data() + 4 * i, 1, 4);
  EXPECT_EQ(once.result(), apart.result());
  swapped.add_rows(1, rows.data(), 3, 4);
  EXPECT_NE(to_hex(once.result()), to_hex(swapped.result()));
  EXPECT_EQ(to_hex(once.result()).size(), 32u);
}

TEST(Drafts, KeptUpToTheFirstRejection) {
  EXPECT_EQ(kept_drafts(1, 1.0, 0, 0, 5), 5);
  EXPECT_EQ(kept_drafts(1, 0.0, 0, 0, 5), 0);
  // A draft's fate hangs on its position alone: windows that begin elsewhere agree.
  for (int64_t base = 0; base < 200; ++base) {
    const int32_t kept = kept_drafts(9, 0.7, 4, base, 6);
    for (int32_t narrow = 0; narrow < 6; ++narrow) {
      EXPECT_EQ(kept_drafts(9, 0.7, 4, base, narrow), std::min(kept, narrow));
    }
    EXPECT_GE(kept_drafts(9, 0.7, 4, base + 1, 6), kept - 1);
  }
  int64_t kept = 0;
  for (int64_t base = 0; base < 10000; ++base) kept += kept_drafts(2, 0.7, base, 0, 1);
  EXPECT_NEAR(static_cast<double>(kept) / 10000, 0.7, 0.02);
}

TEST(Stats, NearestRankPercentiles) {
  std::vector<double> samples;
  for (int i = 100; i >= 1; --i) samples.push_back(i);
  const Percentiles p = percentiles(samples);
  EXPECT_EQ(p.p50, 50);
  EXPECT_EQ(p.p90, 90);
  EXPECT_EQ(p.p99, 99);
  EXPECT_EQ(p.max, 100);
  EXPECT_EQ(percentiles({}).count, 0);
  EXPECT_EQ(percentiles({3}).p99, 3);
}

TEST(Verify, ChoosesBySeed) {
  Trace trace;
  for (int64_t i = 0; i < 100; ++i) trace.requests.push_back({.index = i});
  const auto a = choose_verified(trace, 5, 1), b = choose_verified(trace, 5, 2);
  EXPECT_EQ(a.size(), 5u);
  EXPECT_NE(a, b);
  EXPECT_EQ(a, choose_verified(trace, 5, 1));
  EXPECT_EQ(choose_verified(trace, 1000, 1).size(), 100u);
}

TEST(Timeline, TellsHowADeviceWasUsed) {
  Timeline t{Clock()};
  const auto op = [&](double begin, double end, int64_t step) { t.add({"prefill", begin, end, step, 0, 1, 1}); };
  op(1.0, 1.5, 0);
  op(1.6, 2.0, 0);  // a wait of 0.1 s within the step
  t.add({"step", 0.9, 2.1, 0, -1, 1, 1});
  op(2.25, 2.5, 1);  // 0.25 s between steps, as long as the step itself
  t.add({"step", 2.2, 2.6, 1, -1, 1, 1});
  op(4.5, 5.0, 2);  // 2 s for 0.5 s of work
  const DeviceUse use = t.device_use();
  EXPECT_EQ(use.steps, 3);
  EXPECT_NEAR(use.busy_s, 1.65, 1e-12);
  EXPECT_NEAR(use.wait_s, 2.35, 1e-12);
  EXPECT_NEAR(use.median_wait_s, 0.25, 1e-12);
  EXPECT_NEAR(use.longest_wait_s, 2, 1e-12);
  EXPECT_EQ(use.longest_wait_step, 2);
  EXPECT_EQ(use.starved_steps, 1);
  EXPECT_NEAR(use.starved_wait_s, 2, 1e-12);
  EXPECT_EQ(Timeline{Clock()}.device_use().steps, 0);
}

TEST(Timeline, IsAChromeTrace) {
  Timeline t{Clock()};
  t.add({"prefill", 0.5, 0.75, 3, 0, 128, 2});
  const std::string json = t.to_json();
  EXPECT_NE(json.find(R"("name":"prefill","ts":500000.000,"dur":250000.000)"), std::string::npos);
}

// An empty directory of the test's own, removed at its end.
class Files : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(dir_); }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  std::string path(const char* name) const { return (dir_ / name).string(); }
  std::string text(const char* name) const {
    std::ifstream in(path(name));
    return {std::istreambuf_iterator<char>(in), {}};
  }
  std::vector<std::string> names() const {
    std::vector<std::string> list;
    for (const auto& entry : std::filesystem::directory_iterator(dir_)) list.push_back(entry.path().filename());
    std::sort(list.begin(), list.end());
    return list;
  }
  static void expect_refused(const std::vector<OutputFile>& files, const std::string& message,
                             const std::string& input = "") {
    const Status status = check_outputs(files, input);
    EXPECT_EQ(status.code(), KDA_INVALID_ARGUMENT);
    EXPECT_NE(status.message().find(message), std::string::npos) << status.message();
  }

  const std::filesystem::path dir_ = std::filesystem::path(testing::TempDir()) / fmt::format("kda_{}", ::getpid());
};

TEST_F(Files, AreReplacedWhole) {
  const std::vector<OutputFile> files = {{"--json", path("a"), "new"}, {"--digests", path("b"), "other"}};
  ASSERT_TRUE(write_outputs(std::vector<OutputFile>{{"--json", path("a"), "old and longer"}}).ok());
  ASSERT_TRUE(check_outputs(files, path("trace")).ok());
  EXPECT_EQ(names(), std::vector<std::string>{"a"});  // checking leaves nothing
  ASSERT_TRUE(write_outputs(files).ok());
  EXPECT_EQ(text("a"), "new");
  EXPECT_EQ(text("b"), "other");
  EXPECT_EQ(names(), (std::vector<std::string>{"a", "b"}));
}

TEST_F(Files, AllOfThemOrNone) {
  ASSERT_TRUE(write_outputs(std::vector<OutputFile>{{"--json", path("a"), "old"}}).ok());
  for (const std::string& bad : {path("missing/x"), std::string("/dev/full")}) {
    const std::vector<OutputFile> files = {
        {"--json", path("a"), "new"}, {"--digests", bad, "x"}, {"--timeline", path("c"), "y"}};
    const Status status = write_outputs(files);
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.message().find("--digests: wanted a file that can be written, got " + bad), std::string::npos)
        << status.message();
    EXPECT_EQ(text("a"), "old");
    EXPECT_EQ(names(), std::vector<std::string>{"a"});
  }
}

TEST_F(Files, AreRefusedBeforeTheWork) {
  expect_refused({{"--json", "", ""}}, "--json: wanted a file name, got \"\"");
  expect_refused({{"--json", dir_.string(), ""}}, "--json: wanted a file, got the directory");
  expect_refused({{"--json", path("missing/x"), ""}}, "--json: wanted a file that can be written");
  expect_refused({{"--json", path("a"), ""}, {"--digests", path("../") + dir_.filename().string() + "/a", ""}},
                 "--digests: wanted another file than that of --json");
  ASSERT_TRUE(write_outputs(std::vector<OutputFile>{{"--json", path("a"), "trace"}}).ok());
  expect_refused({{"--json", path("a"), ""}}, "--json: wanted another file than the input", path("a"));
  EXPECT_EQ(text("a"), "trace");
  const std::vector<OutputFile> nowhere = {{"--json", "/dev/null", ""}, {"--digests", "/dev/null", ""}};
  EXPECT_TRUE(check_outputs(nowhere, "/dev/null").ok());
}

TEST_F(Files, LinksKeepPointingToTheirFile) {
  ASSERT_TRUE(write_outputs(std::vector<OutputFile>{{"--json", path("a"), "old"}}).ok());
  std::filesystem::create_symlink("a", path("link"));
  ASSERT_TRUE(write_outputs(std::vector<OutputFile>{{"--json", path("link"), "new"}}).ok());
  EXPECT_TRUE(std::filesystem::is_symlink(path("link")));
  EXPECT_EQ(text("a"), "new");
}

}  // namespace
}  // namespace kda::serve

// Replays of a small synthetic trace: everything that batch invariance promises not to change a bit (N-13, design.md
// 4) leaves every request's digest as it is, and the oracle agrees.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "replay_run.h"

namespace kda::serve {
namespace {

// 24 requests: shared prefixes of several depths, one-token prompts, no outputs, one output, long answers.
const std::string& trace_file() {
  static const std::string path = [] {
    const std::string name =
        (std::filesystem::path(testing::TempDir()) / fmt::format("kda_replay_{}.jsonl", ::getpid())).string();
    std::ofstream out(name);
    std::mt19937 random(7);
    for (int i = 0; i < 24; ++i) {
      const int64_t input = i % 8 == 3 ? 1 : i % 8 == 5 ? 512 : 40 + random() % 1600;
      const int64_t output = i % 6 == 1 ? 0 : i % 6 == 2 ? 1 : 2 + random() % 40;
      out << fmt::format(R"({{"timestamp": {}, "input_length": {}, "output_length": {}, "hash_ids": [)", i * 3, input,
                         output);
      for (int64_t b = 0; b * kBlockTokens < input; ++b) {
        // Three families of prompts; the last block of every other request is its own.
        const bool own = i % 2 == 0 && (b + 1) * kBlockTokens >= input;
        out << (b > 0 ? ", " : "") << (own ? 1000 + i : (i % 3) * 10 + b);
      }
      out << "]}\n";
    }
    return name;
  }();
  return path;
}

ReplayOptions base() {
  ReplayOptions o;
  o.trace = trace_file();
  o.model.heads = 1;
  o.cache_mib = 8;
  o.threads = 1;
  o.verify = 0;
  o.digests = true;
  return o;
}

class Digests : public testing::Test {
 protected:
  // Of the plainest run: no cache, no drafts, one request at a time.
  static const std::string& plain() {
    static const std::string text = [] {
      ReplayOptions o = base();
      o.prefix_cache = false;
      o.max_requests = 1;
      return digests(o);
    }();
    return text;
  }
  void expect_same(const ReplayOptions& o) { EXPECT_EQ(digests(o), plain()); }
};

TEST_F(Digests, N13_DefaultsEqualOneRequestAtATime) { expect_same(base()); }

TEST_F(Digests, N13_Batching) {
  ReplayOptions o = base();
  for (int64_t requests : {2, 8}) {
    o.max_requests = requests;
    expect_same(o);
  }
}

TEST_F(Digests, H10_CutsOfAPrompt) {
  ReplayOptions o = base();
  for (int64_t tokens : {64, 200, 1000, 16384}) {
    o.max_batch_tokens = tokens;
    expect_same(o);
  }
}

TEST_F(Digests, K05_PrefixCache) {
  ReplayOptions o = base();
  o.max_requests = 2;  // one after another: more hits
  const auto replay = run(o);
  ASSERT_NE(replay, nullptr);
  EXPECT_GT(replay->stats().cache_hits, 4);
  EXPECT_EQ(replay->stats().prompt, replay->stats().cached + replay->stats().prefilled);
  EXPECT_EQ(replay->digests_text(), plain());
}

TEST_F(Digests, K07_EvictedSnapshotsChangeNothing) {
  ReplayOptions o = base();
  o.model.layers = 4;  // a page is four times as large: three snapshots fit
  o.cache_mib = 1;
  o.max_batch_tokens = 512;
  o.max_requests = 2;
  const auto small = run(o);
  ASSERT_NE(small, nullptr);
  EXPECT_GT(small->stats().cache_evictions, 0);
  EXPECT_GT(small->stats().cache_hits, 0);
  o.prefix_cache = false;
  EXPECT_EQ(small->digests_text(), digests(o));
}

TEST_F(Digests, V09_Speculation) {
  ReplayOptions o = base();
  for (const char* mode : {"columns", "records"}) {
    for (int32_t spec : {0, 1, 3}) {
      o.spec_mode = mode;
      o.spec = spec;
      o.accept = 0.7;
      const auto replay = run(o);
      ASSERT_NE(replay, nullptr);
      EXPECT_EQ(replay->stats().accepted > 0, spec > 0);
      EXPECT_EQ(replay->digests_text(), plain()) << mode << " " << spec;
    }
  }
}

TEST_F(Digests, V11_Preemption) {
  ReplayOptions o = base();
  o.slots = 4;
  o.preempt = 0.1;
  o.spec = 2;
  for (const char* mode : {"columns", "records"}) {
    o.spec_mode = mode;
    const auto replay = run(o);
    ASSERT_NE(replay, nullptr);
    EXPECT_GT(replay->stats().preemptions, 5);
    EXPECT_EQ(replay->digests_text(), plain()) << mode;
  }
}

TEST_F(Digests, N12_Threads) {
  ReplayOptions o = base();
  o.threads = 2;
  o.spec = 3;
  expect_same(o);
}

TEST_F(Digests, K10_SlotsAndPacing) {
  ReplayOptions o = base();
  o.slots = 3;
  o.pace = "trace";
  o.speed = 4;
  expect_same(o);
}

TEST_F(Digests, TheyDependOnWhatTheyShould) {
  ReplayOptions o = base();
  o.seed = 1;
  EXPECT_NE(digests(o), plain());
}

TEST(Replay, E11_TheOracleAgrees) {
  for (const char* io : {"fp32", "bf16", "fp16"}) {
    ReplayOptions o = base();
    o.model.io = io;
    o.model.layers = 2;
    o.spec = 2;
    o.verify = 6;
    const auto replay = run(o);
    ASSERT_NE(replay, nullptr);
    const VerifyReport& v = replay->verification();
    EXPECT_EQ(v.requests, 6);
    EXPECT_TRUE(v.ok) << io << ": " << (v.failures.empty() ? "" : v.failures[0]);
    EXPECT_LE(v.max_rel_l2_out, v.tolerance.out);
  }
}

TEST(Replay, E11_EveryModelsGate) {
  for (const char* model : {"kimi-linear", "kimi-k3", "glm-5.3-flash"}) {
    ReplayOptions o = base();
    o.model.name = model;
    o.model.heads = 2;
    o.model.tp = 2;
    o.verify = 2;
    o.input.limit = 6;
    const auto replay = run(o);
    ASSERT_NE(replay, nullptr);
    EXPECT_TRUE(replay->verification().ok) << model;
  }
}

TEST(Replay, TheReportHoldsWhatItPromises) {
  ReplayOptions o = base();
  o.verify = 2;
  o.spec = 2;
  o.timeline = true;
  const auto replay = run(o);
  ASSERT_NE(replay, nullptr);
  const auto j = nlohmann::json::parse(replay->report().dump());
  EXPECT_EQ(j["schema_version"], 1);
  EXPECT_EQ(j["complete"], true);
  EXPECT_EQ(j["requests"]["total"], 24);
  EXPECT_EQ(j["requests"]["finished"], 24);
  EXPECT_EQ(j["requests"]["failed"], 0);
  const auto& t = j["tokens"];
  EXPECT_EQ(t["prompt"].get<int64_t>(), t["cached"].get<int64_t>() + t["prefilled"].get<int64_t>());
  for (const char* key : {"decoded", "drafted", "accepted"}) EXPECT_GT(t[key], 0) << key;
  EXPECT_EQ(j["verify"]["requests"], 2);
  EXPECT_EQ(j["verify"]["ok"], true);
  EXPECT_EQ(j["verify"]["tolerance"], 1e-5);
  for (const char* key : {"max_rel_l2_out", "max_rel_l2_state"}) EXPECT_GT(j["verify"][key], 0) << key;
  for (const char* key : {"wall_s", "prefill_tokens_per_s", "decode_tokens_per_s"})
    EXPECT_GT(j["time"][key], 0) << key;
  for (const char* key : {"ttft_ms", "tpot_ms"}) {
    for (const char* p : {"p50", "p90", "p99"}) EXPECT_GT(j["latency"][key][p], 0) << key << p;
  }
  for (const char* key : {"slots", "peak_used", "preemptions"}) EXPECT_TRUE(j["pool"].contains(key)) << key;
  for (const char* key : {"blocks", "hits", "evictions"}) EXPECT_TRUE(j["cache"].contains(key)) << key;
  EXPECT_EQ(j["choices"]["prefill"]["backend"], "portable");
  EXPECT_FALSE(j["choices"]["prefill"]["isa"].get<std::string>().empty());
  EXPECT_FALSE(j["choices"]["prefill"]["skipped"].empty());  // the CUDA ones, with the reason why
  EXPECT_GT(j["memory"]["peak_rss_mib"], 1);
  EXPECT_EQ(j["build"]["version"], kda_version_string());
  EXPECT_EQ(j["config"]["spec"], 2);
  EXPECT_FALSE(nlohmann::json::parse(replay->timeline_text())["traceEvents"].empty());
  EXPECT_NE(replay->table().find("verify"), std::string::npos);
}

TEST(Replay, F07_AWrongResultIsFound) {
  // The oracle is given other weights than the engine ran with.
  ReplayOptions o = base();
  o.verify = 3;
  o.input.limit = 3;
  auto prepared = Replay::prepare(o);
  ASSERT_TRUE(prepared.ok());
  const std::atomic<bool> stop{false};
  ASSERT_TRUE(prepared.value()->run(stop, {}).ok());
  std::vector<LayerWeights> weights = seeded_weights(prepared.value()->model(), o.seed);
  weights[0].dt_bias[5] += 0.01f;
  auto content = Content::seeded(prepared.value()->model(), o.seed, nullptr);
  kda_context* host = nullptr;
  ASSERT_EQ(kda_context_create(nullptr, &host), KDA_OK);
  const ContextHandle owner(host);
  VerifyProgress last;
  auto report = verify(prepared.value()->model(), weights, content.value(), prepared.value()->engine().requests(),
                       host, stop, [&](const VerifyProgress& v) { last = v; });
  EXPECT_EQ(last.done, 3);
  EXPECT_DOUBLE_EQ(last.share, 1);
  ASSERT_TRUE(report.ok());
  EXPECT_FALSE(report.value().ok);
  ASSERT_FALSE(report.value().failures.empty());
  EXPECT_NE(report.value().failures[0].find("head 0"), std::string::npos) << report.value().failures[0];
}

TEST(Replay, F07_ANaNIsAnInfiniteError) {
  ReplayOptions o = base();
  o.verify = 3;
  o.input.limit = 3;
  auto prepared = Replay::prepare(o);
  ASSERT_TRUE(prepared.ok());
  Replay& r = *prepared.value();
  const std::atomic<bool> stop{false};
  ASSERT_TRUE(r.run(stop, {}).ok());
  const float nan = std::nanf("");
  std::memcpy(r.engine().requests()[0]->capture->rows[0].data(), &nan, sizeof nan);
  std::memcpy(r.engine().requests()[1]->capture->states[0].data(), &nan, sizeof nan);
  ASSERT_TRUE(r.verify_results(stop).ok());
  EXPECT_FALSE(r.ok());
  const auto j = nlohmann::json::parse(r.report_text());
  EXPECT_EQ(j["verify"]["ok"], false);
  EXPECT_EQ(j["verify"]["max_rel_l2_out"], "inf");
  EXPECT_EQ(j["verify"]["max_rel_l2_state"], "inf");
  EXPECT_EQ(j["verify"]["failures"].size(), 2u);
}

TEST(Replay, ATimelineDoesNotCountPreparation) {
  ReplayOptions o = base();
  o.timeline = true;
  o.verify = 0;
  o.input.limit = 1;
  auto prepared = Replay::prepare(o);
  ASSERT_TRUE(prepared.ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const auto before = std::chrono::steady_clock::now();
  const std::atomic<bool> stop{false};
  ASSERT_TRUE(prepared.value()->run(stop, {}).ok());
  const double ran = std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
  EXPECT_LE(prepared.value()->stats().wall_s, ran);
}

TEST(Replay, OptionsAreRefusedByName) {
  const auto refused = [](auto change, const char* name) {
    ReplayOptions o = base();
    change(o);
    const Status status = check_options(o);
    EXPECT_EQ(status.code(), KDA_INVALID_ARGUMENT) << name;
    EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
  };
  refused([](ReplayOptions& o) { o.max_batch_tokens = 63; }, "--max-batch-tokens");
  refused([](ReplayOptions& o) { o.max_requests = 0; }, "--max-requests");
  refused([](ReplayOptions& o) { o.slots = 0; }, "--slots");
  refused([](ReplayOptions& o) { o.spec = 16; }, "--spec");
  refused([](ReplayOptions& o) { o.spec_mode = "rows"; }, "--spec-mode");
  refused([](ReplayOptions& o) { o.accept = 1.5; }, "--accept");
  refused([](ReplayOptions& o) { o.accept = std::nan(""); }, "--accept");
  refused([](ReplayOptions& o) { o.preempt = -0.1; }, "--preempt");
  refused([](ReplayOptions& o) { o.speed = 0; }, "--speed");
  refused([](ReplayOptions& o) { o.pace = "fast"; }, "--pace");
  refused([](ReplayOptions& o) { o.device = "gpu"; }, "--device");
  refused([](ReplayOptions& o) { o.input.format = "csv"; }, "--format");
}

}  // namespace
}  // namespace kda::serve

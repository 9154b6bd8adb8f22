// The engine without tensors: life cycle, failing steps, preemption, counting.
#include "serve/engine.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "support.h"

namespace kda::serve {
namespace {

using testing_support::PoisonedPool;

Model small_model() {
  Model m;
  m.heads = m.query_heads = m.total_heads = 1;
  m.key_dim = m.value_dim = 2;
  m.io_dtype = KDA_FP32;
  return m;
}

Trace make_trace(const std::vector<std::pair<int64_t, int64_t>>& lengths, bool shared_blocks = false) {
  Trace t;
  for (auto [input, output] : lengths) {
    TraceRequest r;
    r.index = static_cast<int64_t>(t.requests.size());
    r.input_length = input;
    r.output_length = output;
    r.first_block = static_cast<int64_t>(t.blocks.size());
    r.num_blocks = (input + kBlockTokens - 1) / kBlockTokens;
    for (int64_t b = 0; b < r.num_blocks; ++b) {
      t.blocks.push_back(static_cast<uint64_t>(shared_blocks ? b : r.index * 1000 + b));
    }
    t.requests.push_back(r);
  }
  return t;
}

// Writes each request's position into its pages as state, so that lost or mixed-up pages show; fails when told.
class FakeExecutor : public Executor {
 public:
  explicit FakeExecutor(kda_state_pool* pool) { EXPECT_EQ(kda_state_pool_state(pool, 0, &state_), KDA_OK); }

  Status run(const Step& step, LayerObserver& observer) override {
    EXPECT_LE(step.tokens, 4096);
    std::set<int64_t> written;
    for (size_t n = 0; n < step.recurrent.size(); ++n) {
      const StepRow& row = step.recurrent[n];
      const int64_t start = row.request->pages[static_cast<size_t>(row.request->accepted - 1)];
      EXPECT_EQ(value(start), static_cast<float>(row.request->position())) << "request " << row.request->trace.index;
      const auto before = static_cast<float>(row.request->position());
      for (int32_t t = 0; t < row.length; ++t) {
        const int64_t page = row.request->pages[static_cast<size_t>(t)];
        EXPECT_TRUE(written.insert(page).second);
        value(page) = before + static_cast<float>(t + 1);
      }
    }
    for (size_t n = 0; n < step.chunk.size(); ++n) {
      const StepRow& row = step.chunk[n];
      const Request& r = *row.request;
      EXPECT_EQ(step.chunk_has_state[n], r.prefilled > 0);  // F50: a fresh one-token row is told apart
      if (r.prefilled > 0) {
        EXPECT_EQ(value(r.pages[0]), static_cast<float>(r.prefilled));
      }
      EXPECT_TRUE(written.insert(r.pages[0]).second);
      value(r.pages[0]) = static_cast<float>(r.prefilled + row.length);
      const size_t per_row = step.checkpoint_slots.size() / std::max<size_t>(step.chunk.size(), 1);
      for (size_t c = n * per_row; c < (n + 1) * per_row; ++c) {
        if (step.checkpoint_slots[c] < 0) continue;
        EXPECT_TRUE(written.insert(step.checkpoint_slots[c]).second);
        value(step.checkpoint_slots[c]) = static_cast<float>(r.prefilled + step.checkpoint_offsets[c]);
        ++checkpoints;
      }
    }
    steps.push_back(step.tokens);
    contents.push_back(step.content);
    if (looks_ahead) observer.device_works();
    if (step.number == failing_step) return error(KDA_DEVICE_ERROR, "injected");
    rows_.assign(static_cast<size_t>(step.tokens) * 2, 0.0f);
    observer.layer_done(step, 0, reinterpret_cast<const char*>(rows_.data()));
    return {};
  }
  Status commit(std::span<Request* const>) override { return {}; }
  std::vector<OperatorChoice> choices() const override { return {}; }

  float& value(int64_t page) { return static_cast<float*>(state_.data)[page * state_.strides[0]]; }

  int64_t failing_step = -1;
  int64_t checkpoints = 0;
  std::vector<int64_t> steps;
  bool looks_ahead = false;  // as on a device
  std::vector<std::vector<uint32_t>> contents;

 private:
  kda_tensor state_{};
  std::vector<float> rows_;
};

struct Bench {
  Bench(EngineOptions o, const Trace& t, int64_t cache_pages = 0) : trace(t), options(o) {
    kda_state_pool_desc d;
    kda_state_pool_desc_init(&d);
    d.num_layers = 1;
    d.num_value_heads = 1;
    d.key_dim = d.value_dim = 2;
    d.conv_channels = model.channels();
    d.conv_width = 4;
    d.conv_columns = 3 + o.limits.spec;
    d.pages = o.slots * (1 + o.limits.spec) + cache_pages;
    pool = std::make_unique<PoisonedPool>(d);
    if (cache_pages > 0) cache = std::make_unique<PrefixCache>(pool->pool.get(), cache_pages);
    content = std::make_unique<Content>(std::move(Content::seeded(model, 1, nullptr).value()));
    executor = std::make_unique<FakeExecutor>(pool->pool.get());
    engine =
        std::make_unique<Engine>(device, model, options, pool->pool.get(), cache.get(), *content, *executor, nullptr);
    EXPECT_TRUE(engine->load(trace, {}).ok());
  }
  const RunStats& run() {
    const std::atomic<bool> stop{false};
    const Status status = engine->run(stop, {});
    EXPECT_TRUE(status.ok()) << status.message();
    return engine->stats();
  }

  Device device{testing_support::context()};
  Model model = small_model();
  Trace trace;
  EngineOptions options;
  std::unique_ptr<PoisonedPool> pool;
  std::unique_ptr<PrefixCache> cache;
  std::unique_ptr<Content> content;
  std::unique_ptr<FakeExecutor> executor;
  std::unique_ptr<Engine> engine;
};

EngineOptions limits(int64_t tokens, int64_t requests, int64_t slots, int32_t spec = 0) {
  EngineOptions o;
  o.limits = {tokens, requests, spec};
  o.slots = slots;
  o.accept = 0.7;
  return o;
}

TEST(Engine, CountsTokensAsDesigned) {
  Bench b(limits(256, 4, 4), make_trace({{10, 5}, {600, 1}, {1, 0}, {65, 2}}));
  const RunStats& s = b.run();
  EXPECT_EQ(s.finished, 4);
  EXPECT_EQ(s.failed, 0);
  EXPECT_EQ(s.prompt, 676);
  EXPECT_EQ(s.cached + s.prefilled, s.prompt);
  EXPECT_EQ(s.decoded, 4 + 0 + 0 + 1);
  EXPECT_EQ(s.drafted, 0);
  EXPECT_EQ(s.ttft_ms.size(), 3u);  // no first token without an output
  EXPECT_EQ(s.tpot_ms.size(), 2u);
  EXPECT_FALSE(s.interrupted);
  EXPECT_EQ(kda_state_pool_available(b.pool->pool.get()), 4);
}

TEST(Engine, DraftsCountApart) {
  Bench b(limits(256, 8, 8, 3), make_trace({{10, 50}, {20, 33}, {5, 2}}));
  const RunStats& s = b.run();
  EXPECT_EQ(s.decoded, 49 + 32 + 1);
  EXPECT_GT(s.drafted, s.accepted);
  EXPECT_GT(s.accepted, 0);
  EXPECT_LT(s.steps, 49);
}

// Rows that were looked up while the device worked are the rows that are looked up in time.
TEST(Engine, LookingAheadChangesNoToken) {
  const Trace trace = make_trace({{3000, 5}, {600, 1}, {5000, 3}, {65, 2}, {2600, 0}, {1, 4}}, true);
  EngineOptions options = limits(1024, 4, 4);
  options.preempt = 0.05;
  Bench plain(options, trace, 8), ahead(options, trace, 8);
  ahead.executor->looks_ahead = true;
  EXPECT_EQ(plain.run().finished, 6);
  EXPECT_EQ(ahead.run().finished, 6);
  EXPECT_EQ(ahead.executor->contents, plain.executor->contents);
}

TEST(FieldCases, F45_MoreRequestsThanSlotsWait) {
  std::vector<std::pair<int64_t, int64_t>> lengths;
  for (int i = 0; i < 40; ++i) lengths.emplace_back(1 + i * 5, i % 7);
  Bench b(limits(128, 16, 8), make_trace(lengths));
  const RunStats& s = b.run();
  EXPECT_EQ(s.finished, 40);
  EXPECT_EQ(s.peak_used, 8);
  EXPECT_EQ(s.used_slots, 0);
}

TEST(Engine, PreemptedRequestsComeBack) {
  std::vector<std::pair<int64_t, int64_t>> lengths;
  for (int i = 0; i < 20; ++i) lengths.emplace_back(100 + i * 31, 20);
  EngineOptions o = limits(256, 8, 6, 2);
  o.preempt = 0.3;
  Bench b(o, make_trace(lengths));
  const RunStats& s = b.run();
  EXPECT_EQ(s.finished, 20);
  EXPECT_GT(s.preemptions, 20);
  // Even when everybody is swapped out after every step, each step still moves on.
  o.preempt = 1;
  Bench c(o, make_trace(lengths));
  EXPECT_EQ(c.run().finished, 20);
}

TEST(FieldCases, F60_AFailedStepPublishesNothing) {
  // The second step holds the chunk that ends at 1024; it fails and its request with it.
  Bench b(limits(512, 1, 2), make_trace({{1100, 3}, {1100, 3}}, true), 8);
  b.executor->failing_step = 1;
  const RunStats& s = b.run();
  EXPECT_EQ(s.failed, 1);
  EXPECT_EQ(s.finished, 1);
  EXPECT_NE(s.first_failure.find("step 1: injected"), std::string::npos);
  EXPECT_EQ(b.engine->requests()[0]->phase, Phase::kFailed);
  // The second request found the snapshot of the step that succeeded and nothing behind it.
  EXPECT_EQ(b.engine->requests()[1]->cached, 512);
  EXPECT_EQ(s.cache_hits, 1);
  EXPECT_EQ(s.cache_published, 2);  // 512, then 1024 by the second request
}

TEST(FieldCases, F58_OneSnapshotPerBoundary) {
  for (auto [input, wanted] :
       {std::pair<int64_t, int64_t>{511, 0}, {512, 1}, {513, 1}, {1023, 1}, {1024, 2}, {2049, 4}}) {
    for (int64_t budget : {64, 448, 512, 4096}) {
      Bench b(limits(budget, 1, 1), make_trace({{input, 1}}), 16);
      EXPECT_EQ(b.run().cache_published, wanted) << input << " tokens, budget " << budget;
      EXPECT_EQ(b.executor->checkpoints, wanted);
    }
  }
}

TEST(Engine, K08_HitsAreRoundedDownAndLeaveOneToken) {
  // Equal prompts of exactly two blocks: the second may use one block only, since a token must be computed.
  Bench b(limits(4096, 1, 1), make_trace({{1024, 1}, {1024, 1}, {1025, 1}, {1536, 1}, {700, 1}}, true), 16);
  b.run();
  const auto& r = b.engine->requests();
  EXPECT_EQ(r[0]->cached, 0);
  EXPECT_EQ(r[1]->cached, 512);
  EXPECT_EQ(r[2]->cached, 1024);
  EXPECT_EQ(r[3]->cached, 1024);
  EXPECT_EQ(r[4]->cached, 512);
}

TEST(Engine, ASmallCacheEvictsAndStaysRight) {
  std::vector<std::pair<int64_t, int64_t>> lengths(30, {2100, 4});
  Trace trace = make_trace(lengths, true);
  for (size_t i = 0; i < trace.blocks.size(); ++i) trace.blocks[i] = (i / 5 % 3) * 100 + i % 5;  // three prompts
  Bench b(limits(1024, 3, 3), trace, 5);
  const RunStats& s = b.run();
  EXPECT_EQ(s.finished, 30);
  EXPECT_GT(s.cache_evictions, 0);
  EXPECT_LE(s.cache_peak_blocks, 5);
}

TEST(Engine, StopsWhenTold) {
  Bench b(limits(64, 2, 2), make_trace({{100, 50}, {100, 50}}));
  std::atomic<bool> stop{false};
  const Status status = b.engine->run(stop, [&](const Engine& e) { stop = e.stats().steps >= 5; });
  EXPECT_TRUE(status.ok());
  EXPECT_TRUE(b.engine->stats().interrupted);
  EXPECT_EQ(b.engine->stats().steps, 5);
}

TEST(Engine, KeepsArrivalTimes) {
  Trace t = make_trace({{10, 2}, {10, 2}});
  t.requests[1].arrival_ns = 400000000;  // 0.4 s, eight times as fast
  EngineOptions o = limits(64, 2, 2);
  o.pace_trace = true;
  o.speed = 8;
  Bench b(o, t);
  b.run();
  EXPECT_GE(b.engine->requests()[1]->first_s, 0.05);
  EXPECT_LT(b.engine->requests()[0]->first_s, 0.05);
}

}  // namespace
}  // namespace kda::serve

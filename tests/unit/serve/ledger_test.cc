// Field cases at engine level with ledger content: token t writes 0.5 into column t of every state row, once; a
// second absorption would show as 0.75, a lost one as 0, a rejected draft in the columns from 64 on.
#include <gtest/gtest.h>

#include <cmath>

#include "support.h"

namespace kda::serve {
namespace {

using testing_support::context;
using testing_support::PoisonedPool;

constexpr int64_t kDim = 128;
constexpr float kOne = 1.2784645f;  // silu(kOne) = 1

Model ledger_model(int32_t layers) {
  Model m;
  m.heads = m.query_heads = m.total_heads = 1;
  m.layers = layers;
  m.io_dtype = KDA_FP32;
  return m;
}

// Row r: k = q = e_r after conv and normalisation, v = 1, no decay, beta 0.5.
Buffer ledger_table(const RowLayout& layout) {
  Buffer table = std::move(Buffer::allocate(kDim * layout.stride * 4).value());
  auto* data = reinterpret_cast<float*>(table.data());
  for (int64_t r = 0; r < kDim; ++r) {
    float* row = data + r * layout.stride;
    std::fill(row, row + layout.stride, 0.0f);
    row[layout.qkv + r] = row[layout.qkv + kDim + r] = kOne;
    for (int64_t i = 0; i < kDim; ++i) {
      row[layout.qkv + 2 * kDim + i] = kOne;
      row[layout.gate + i] = -1000.0f;
    }
  }
  return table;
}

// Generated token i of a request is token prompt + i of its ledger.
class Ledger : public Content {
 public:
  Ledger(const Model& model, std::vector<int64_t> prompts)
      : Content(RowLayout::of(model), KDA_FP32, ledger_table(RowLayout::of(model)), 1),
        prompts_(std::move(prompts)) {}
  void prompt_rows(const TokenOwner&, int64_t first, std::span<uint32_t> rows) const override {
    for (uint32_t& row : rows) row = static_cast<uint32_t>(first++ % kDim);
  }
  void generated_rows(const TokenOwner& owner, int64_t first, std::span<uint32_t> rows) const override {
    prompt_rows(owner, prompts_[static_cast<size_t>(owner.index)] + first, rows);
  }
  uint32_t rejected_row(const TokenOwner& owner, int64_t position) const override {
    return static_cast<uint32_t>(64 + (prompts_[static_cast<size_t>(owner.index)] + position) % 64);
  }

 private:
  std::vector<int64_t> prompts_;
};

struct Run {
  int64_t spec = 0;
  bool records = false;
  double accept = 0.5, preempt = 0;
  int64_t max_batch_tokens = 4096, slots = 8, cache_pages = 0;
  int32_t layers = 1;
  uint64_t seed = 0;
};

// One engine over real operators; final states and windows are captured.
class LedgerBench {
 public:
  LedgerBench(const Run& run, std::vector<std::pair<int64_t, int64_t>> lengths) : model_(ledger_model(run.layers)) {
    std::vector<int64_t> prompts, all;
    for (auto [input, output] : lengths) {
      TraceRequest r;
      r.index = static_cast<int64_t>(trace_.requests.size());
      r.input_length = input;
      r.output_length = output;
      r.first_block = 0;
      r.num_blocks = (input + kBlockTokens - 1) / kBlockTokens;
      while (static_cast<int64_t>(trace_.blocks.size()) < r.num_blocks) trace_.blocks.push_back(trace_.blocks.size());
      prompts.push_back(input);
      all.push_back(r.index);
      trace_.requests.push_back(r);
    }
    kda_state_pool_desc d;
    kda_state_pool_desc_init(&d);
    d.num_layers = run.layers;
    d.num_value_heads = 1;
    d.key_dim = d.value_dim = kDim;
    d.conv_channels = model_.channels();
    d.conv_width = 4;
    d.conv_columns = static_cast<int32_t>(4 + run.spec - (run.records ? 0 : 1));
    d.pages = run.slots * (run.records ? 1 : 1 + run.spec) + run.cache_pages;
    pool_ = std::make_unique<PoisonedPool>(d);
    if (run.cache_pages > 0) cache_ = std::make_unique<PrefixCache>(pool_->pool.get(), run.cache_pages);
    content_ = std::make_unique<Ledger>(model_, prompts);
    LayerWeights w;
    for (int64_t c = 0; c < model_.channels(); ++c) w.conv.insert(w.conv.end(), {0, 0, 0, 1});
    w.A_log.assign(1, 0);
    w.dt_bias.assign(kDim, 0);
    w.norm.assign(kDim, 1);
    weights_.assign(static_cast<size_t>(run.layers), w);
    ExecutorOptions e;
    e.max_batch_tokens = run.max_batch_tokens;
    e.max_requests = run.slots;
    e.spec = static_cast<int32_t>(run.spec);
    e.records = run.records;
    e.seats = run.slots;
    e.max_checkpoints = cache_ ? max_checkpoints(run.max_batch_tokens) : 0;
    e.batch_invariant = false;
    e.prefill_backend = e.backend = "reference";
    auto executor = LayerExecutor::create(device_, model_, weights_, *content_, pool_->pool.get(), e, nullptr);
    EXPECT_TRUE(executor.ok()) << executor.status().message();
    executor_ = std::move(executor.value());
    EngineOptions o;
    o.limits = {run.max_batch_tokens, run.slots, static_cast<int32_t>(run.spec)};
    o.slots = run.slots;
    o.records = run.records;
    o.accept = run.accept;
    o.preempt = run.preempt;
    o.seed = run.seed;
    engine_ =
        std::make_unique<Engine>(device_, model_, o, pool_->pool.get(), cache_.get(), *content_, *executor_, nullptr);
    EXPECT_TRUE(engine_->load(trace_, all).ok());
    const std::atomic<bool> stop{false};
    const Status status = engine_->run(stop, {});
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(engine_->stats().finished, static_cast<int64_t>(lengths.size())) << engine_->stats().first_failure;
  }

  const Engine& engine() const { return *engine_; }

  // A state that has absorbed tokens 0 .. tokens-1, each once: column c is 1 - 2^-(times).
  static void expect_ledger(const float* state, int64_t tokens, const std::string& where) {
    for (int64_t c = 0; c < kDim; ++c) {
      const int64_t times = tokens / kDim + (c < tokens % kDim ? 1 : 0);
      const double wanted = 1.0 - std::ldexp(1.0, -static_cast<int>(times));
      for (int64_t v : {int64_t{0}, int64_t{77}}) {
        ASSERT_NEAR(state[v * kDim + c], wanted, 1e-5) << where << ", column " << c;
      }
    }
  }
  // Every request's final state and window.
  void expect_all(const std::string& where) const {
    for (const auto& r : engine_->requests()) {
      const int64_t tokens = r->trace.input_length + r->decode_length();
      for (const auto& state : r->capture->states) {
        expect_ledger(reinterpret_cast<const float*>(state.data()), tokens,
                      fmt::format("{}, request {}", where, r->trace.index));
      }
      const auto* window = reinterpret_cast<const float*>(r->capture->windows[0].data());
      for (int64_t i = 0; i < 3; ++i) {
        const int64_t t = tokens - 3 + i;
        for (int64_t c = 0; c < kDim; ++c) {
          ASSERT_EQ(window[i * model_.channels() + c], t >= 0 && c == t % kDim ? kOne : 0.0f) << where;
        }
      }
    }
  }
  // The published snapshot of `blocks` blocks.
  void expect_snapshot(int64_t blocks) const {
    std::vector<PrefixKey> keys;
    PrefixKey key;
    for (int64_t b = 0; b < blocks; ++b) keys.push_back(key = extend_key(key, static_cast<uint64_t>(b)));
    const PrefixCache::Hit hit = cache_->find(keys);
    ASSERT_EQ(hit.blocks, blocks);
    kda_tensor state{};
    ASSERT_EQ(kda_state_pool_state(pool_->pool.get(), 0, &state), KDA_OK);
    expect_ledger(static_cast<const float*>(state.data) + cache_->page(hit.handle) * state.strides[0],
                  blocks * kBlockTokens, fmt::format("snapshot of {} blocks", blocks));
  }

 private:
  Model model_;
  Trace trace_;
  std::unique_ptr<PoisonedPool> pool_;
  std::unique_ptr<PrefixCache> cache_;
  std::unique_ptr<Ledger> content_;
  std::vector<LayerWeights> weights_;
  Device device_{context()};
  std::unique_ptr<LayerExecutor> executor_;
  std::unique_ptr<Engine> engine_;
};

TEST(FieldCases, F53_F54_AcceptedTokensOnceAndRejectedNever) {
  for (bool records : {false, true}) {
    for (int64_t spec : {0, 1, 4}) {
      for (double accept : {0.0, 0.5, 1.0}) {
        const LedgerBench b({.spec = spec, .records = records, .accept = accept},
                            {{3, 8}, {3, 30}, {1, 1}, {2, 0}, {17, 40}});
        b.expect_all(fmt::format("records {}, spec {}, accept {}", records, spec, accept));
      }
    }
  }
}

TEST(FieldCases, F53_SwappedOutBetweenVerifySteps) {
  for (bool records : {false, true}) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      const LedgerBench b(
          {.spec = 3, .records = records, .accept = 0.6, .preempt = 0.3, .slots = 3, .layers = 2, .seed = seed},
          {{3, 40}, {5, 30}, {70, 20}, {1, 25}, {9, 50}});
      EXPECT_GT(b.engine().stats().preemptions, 5);
      b.expect_all(fmt::format("records {}, seed {}", records, seed));
    }
  }
}

TEST(FieldCases, F47_F58_SnapshotsHoldTheirBoundaryAndNoMore) {
  const LedgerBench b({.max_batch_tokens = 640, .cache_pages = 8}, {{1100, 5}});
  b.expect_all("prompt of 1100");
  b.expect_snapshot(1);
  b.expect_snapshot(2);
}

TEST(FieldCases, F60_WarmEqualsCold) {
  const LedgerBench b({.slots = 1, .cache_pages = 8}, {{1100, 5}, {1100, 9}, {1024, 2}, {513, 3}});
  EXPECT_EQ(b.engine().requests()[1]->cached, 1024);
  EXPECT_EQ(b.engine().requests()[2]->cached, 512);
  EXPECT_EQ(b.engine().requests()[3]->cached, 512);
  b.expect_all("warm");
}

TEST(FieldCases, F48_HandOverThroughHostMemory) {
  // Everybody leaves and returns after every step, through export and import, to whatever page is free.
  const LedgerBench b({.preempt = 1, .max_batch_tokens = 128, .slots = 2}, {{200, 8}, {9, 8}, {130, 8}});
  EXPECT_GT(b.engine().stats().preemptions, 15);
  b.expect_all("handed over");
}

TEST(FieldCases, F50_FreshOneTokenPromptsStartFromZero) {
  // Slots hold NaN, or the state of a request that went before.
  const LedgerBench b({.slots = 1}, {{1, 3}, {1, 1}, {1, 0}, {65, 2}, {1, 2}});
  b.expect_all("one token");
}

}  // namespace
}  // namespace kda::serve

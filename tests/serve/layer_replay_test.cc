// Layer mode: whole KDA layers with a residual stream. What does not change a bit in core mode does not here either,
// and the oracle agrees layer by layer.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "conformance/layer.h"
#include "kda/tensor_file.h"
#include "replay_run.h"
#include "serve/verify_layers.h"

namespace kda::serve {
namespace {

const std::string& trace_file() {
  static const std::string path = [] {
    const std::string name =
        (std::filesystem::path(testing::TempDir()) / fmt::format("kda_layer_replay_{}.jsonl", ::getpid())).string();
    std::ofstream out(name);
    const int64_t inputs[] = {1300, 1, 700, 1030, 512, 90, 1300, 600}, outputs[] = {7, 9, 0, 12, 1, 15, 4, 20};
    for (int i = 0; i < 8; ++i) {
      out << fmt::format(R"({{"timestamp": {}, "input_length": {}, "output_length": {}, "hash_ids": [)", i, inputs[i],
                         outputs[i]);
      for (int64_t b = 0; b * kBlockTokens < inputs[i]; ++b) out << (b > 0 ? ", " : "") << (i % 2) * 10 + b;
      out << "]}\n";
    }
    return name;
  }();
  return path;
}

ReplayOptions base() {
  ReplayOptions o;
  o.trace = trace_file();
  o.mode = "layer";
  o.model.heads = 1;
  o.model.layers = 3;
  o.cache_mib = 8;
  o.threads = 1;
  o.verify = 0;
  o.digests = true;
  return o;
}

}  // namespace

TEST(LayerReplay, N13_DigestsDoNotDependOnTheBatch) {
  ReplayOptions plain = base();
  plain.prefix_cache = false;
  plain.max_requests = 1;
  const std::string wanted = digests(plain);
  EXPECT_NE(wanted, "");
  EXPECT_EQ(digests(base()), wanted);
  ReplayOptions o = base();
  o.threads = 3;
  o.max_batch_tokens = 200;
  o.max_requests = 3;
  EXPECT_EQ(digests(o), wanted);
  o = base();
  o.spec = 2;
  o.accept = 0.6;
  o.preempt = 0.1;
  EXPECT_EQ(digests(o), wanted);
  o.spec_mode = "records";
  EXPECT_EQ(digests(o), wanted);
  o = base();
  o.seed = 1;
  EXPECT_NE(digests(o), wanted);
}

TEST(LayerReplay, E11_TheOracleAgreesLayerByLayer) {
  for (const char* io : {"fp32", "bf16"}) {
    ReplayOptions o = base();
    o.model.io = io;
    o.verify = 8;
    o.spec = 2;
    const auto replay = run(o);
    ASSERT_NE(replay, nullptr);
    const VerifyReport& v = replay->verification();
    EXPECT_EQ(v.requests, 8);
    EXPECT_TRUE(v.ok) << (v.failures.empty() ? "" : v.failures[0]);
    EXPECT_GT(v.max_rel_l2_out, 0);
    EXPECT_LE(v.max_rel_l2_out, io[0] == 'f' ? 1e-5 : 1e-2);
    EXPECT_EQ(replay->report()["config"]["mode"], "layer");
  }
}

// Weights of another seed are another model: the oracle must notice.
TEST(LayerReplay, F07_AWrongLayerIsNoticed) {
  ReplayOptions o = base();
  auto replay = Replay::prepare(o);
  ASSERT_TRUE(replay.ok());
  Model model = replay.value()->model();
  const ModelWeights other = ModelWeights::seeded(model, 99);
  o.verify = 2;
  const auto done = run(o);
  ASSERT_NE(done, nullptr);
  EXPECT_TRUE(done->verification().ok);
  kda_context* context = nullptr;
  ASSERT_EQ(kda_context_create(nullptr, &context), KDA_OK);
  const ContextHandle owned(context);
  const std::atomic<bool> stop{false};
  VerifyProgress last;
  const auto report =
      verify_layers(model, other, done->engine().requests(), context, stop, [&](const VerifyProgress& v) {
        EXPECT_GT(v.share, last.share);
        EXPECT_GE(v.done, last.done);
        last = v;
      });
  EXPECT_EQ(last.done, 2);
  EXPECT_EQ(last.requests, 2);
  EXPECT_DOUBLE_EQ(last.share, 1);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_FALSE(report.value().ok);
  EXPECT_GT(report.value().max_rel_l2_out, 0.1);
}

// H = 2 query heads and HV = 4 value heads, two layers, as a checkpoint on disk.
class GroupedCheckpoint {
 public:
  GroupedCheckpoint()
      : path_((std::filesystem::path(testing::TempDir()) / fmt::format("kda_grouped_{}.safetensors", ::getpid()))
                  .string()) {
    kda_layer_spec s{};
    s.hidden = 96;
    s.num_heads = 2;
    s.num_value_heads = 4;
    s.key_dim = 32;
    s.value_dim = 24;
    s.gate_rank = s.output_gate_rank = 16;
    s.output_gate = KDA_OUTPUT_GATE_LOW_RANK;
    s.conv_width = 4;
    s.gate_family = KDA_GATE_SOFTPLUS;
    s.norm_eps = 1e-5;
    std::vector<conformance::LayerModel> models;
    std::vector<std::string> names;
    std::vector<kda_named_tensor> tensors;
    for (uint32_t n = 0; n < 2; ++n) models.push_back(conformance::layer_model(s, n));
    for (size_t n = 0; n < 2; ++n) {
      for (const auto& t : models[n].tensors)
        names.push_back(fmt::format("model.layers.{}.self_attn.{}", n, t.first));
    }
    for (size_t n = 0, i = 0; n < 2; ++n) {
      for (const auto& t : models[n].tensors) tensors.push_back({names[i++].c_str(), t.second.view()});
    }
    EXPECT_EQ(kda_tensor_file_write(path_.c_str(), tensors.data(), tensors.size()), KDA_OK) << kda_last_error();
  }
  ~GroupedCheckpoint() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(LayerReplay, E08_F16_GroupedValueHeadsOfACheckpoint) {
  const GroupedCheckpoint checkpoint;
  ReplayOptions o = base();
  o.checkpoint = checkpoint.path();
  o.model.heads = 0;
  o.model.layers = 0;
  o.model.io = "fp32";
  o.verify = 3;
  const auto replay = run(o);
  ASSERT_NE(replay, nullptr);
  EXPECT_TRUE(replay->verification().ok);
  EXPECT_EQ(replay->model().heads, 4);
  EXPECT_EQ(replay->model().query_heads, 2);
  EXPECT_EQ(replay->model().channels(), 2 * 2 * 32 + 4 * 24);
  const std::string plain = replay->digests_text();
  o.verify = 0;
  o.spec = 2;
  for (const char* mode : {"columns", "records"}) {
    o.spec_mode = mode;
    EXPECT_EQ(digests(o), plain) << mode;
  }
  o.spec = 0;
  o.verify = 1;
  o.model.tp = 2;
  const auto share = run(o);
  ASSERT_NE(share, nullptr);
  EXPECT_TRUE(share->verification().ok);
  EXPECT_EQ(share->model().heads, 2);
  EXPECT_EQ(share->model().query_heads, 1);
  o.model.tp = 4;
  const auto odd = Replay::prepare(o);
  ASSERT_FALSE(odd.ok());
  EXPECT_NE(odd.status().message().find("2 heads and 4 value heads"), std::string::npos) << odd.status().message();
}

TEST(LayerReplay, L06_RanksRunTheirShareAndBadOptionsAreRefused) {
  ReplayOptions o = base();
  o.model.heads = 2;
  o.model.layers = 1;
  o.model.tp = 2;
  o.verify = 1;
  const auto replay = run(o);
  ASSERT_NE(replay, nullptr);
  EXPECT_TRUE(replay->verification().ok);
  EXPECT_EQ(replay->model().heads, 1);
  o.model.layers = 0;
  EXPECT_EQ(Replay::prepare(o).value()->model().layers, 4);
  o.checkpoint = "/nonexistent";
  o.model.heads = 0;
  const auto none = Replay::prepare(o);
  ASSERT_FALSE(none.ok());
  EXPECT_NE(none.status().message().find("/nonexistent"), std::string::npos);
  o.mode = "core";
  EXPECT_FALSE(Replay::prepare(o).ok());
}

}  // namespace kda::serve

// A layer's steps as graphs, and what its projections promise at sizes that only a device computes in time: one
// captured decode step follows the device's tables (F52), several layers are one graph, rows of a large batch have
// the bits that they have alone (N-13), and a run takes no device memory (G-11).
#include <gtest/gtest.h>

#include <random>

#include "conformance/layer.h"
#include "conformance/random.h"
#include "harness.h"
#include "runtime.h"

namespace kda::conformance::test {
namespace {

using conformance::LayerModel;
using conformance::Mirror;
using conformance::WeightsHandle;

constexpr int64_t kSlots = 9, kRows = 4, kHidden = 256;

kda_layer_spec spec(int64_t hidden, int64_t heads) {
  kda_layer_spec s{};
  s.hidden = hidden;
  s.num_heads = s.num_value_heads = heads;
  s.key_dim = s.value_dim = s.gate_rank = s.output_gate_rank = 128;
  s.output_gate = KDA_OUTPUT_GATE_LOW_RANK;
  s.conv_width = 4;
  s.gate_family = KDA_GATE_SOFTPLUS;
  s.norm_eps = 1e-5;
  return s;
}

// `layers` layers of a residual stream over one pool a layer, decoding up to kRows rows.
class Decoding {
 public:
  explicit Decoding(int layers) {
    kda_layer_desc d = conformance::layer_desc(spec(kHidden, 2), "auto", KDA_BF16);
    d.max_tokens = kRows;
    d.max_sequences = kRows;
    plan_ = conformance::Plan(kda_layer_plan_create, cuda_test::context(), d);
    EXPECT_TRUE(plan_.ok()) << plan_.message();
    auto n = sized<kda_residual_norm_desc>();
    n.hidden = kHidden;
    n.max_tokens = kRows;
    norm_ = conformance::make_plan(n, cuda_test::context());
    EXPECT_TRUE(norm_.ok()) << norm_.message();
    residual = Tensor::of(KDA_BF16, {kRows, kHidden}, uniform_vector(1, kRows * kHidden));
    begin_ = Tensor::ints({0, 1, 2, 3});
    length_ = Tensor::ints({1, 1, 1, 1});
    slots = Tensor::ints({0, 1, 2, 3});
    for (int i = 0; i < layers; ++i) {
      std::string message;
      weights_.push_back(conformance::pack(conformance::layer_model(spec(kHidden, 2), static_cast<uint32_t>(40 + i)),
                                           cuda_test::context(), KDA_BF16, nullptr, message));
      EXPECT_NE(weights_.back(), nullptr) << message;
      Layer l;
      l.x = Tensor(KDA_BF16, {kRows, kHidden});
      l.out = Tensor(KDA_BF16, {kRows, kHidden});
      l.state = Tensor::full(KDA_FP32, {kSlots, 2, 128, 128}, 0.01);
      l.window = Tensor::full(KDA_BF16, {kSlots, 3, 768}, 0.5);
      layers_.push_back(std::move(l));
    }
    for (size_t i = 0; i < layers_.size(); ++i) add(i);
    for (size_t i = 0; i < layers_.size(); ++i) {
      for (kda_tensor* t : conformance::tensors_of(norm_args_[i])) all_.push_back(t);
      for (kda_tensor* t : conformance::tensors_of(args_[i])) all_.push_back(t);
    }
    mirror_ = std::make_unique<Mirror>(memory_, all_, plan_.workspace_bytes());
  }

  void run(cudaStream_t stream) const {
    for (size_t i = 0; i < args_.size(); ++i) {
      EXPECT_EQ(kda_residual_norm_run(norm_.get(), &norm_args_[i], {}, stream), KDA_OK) << kda_last_error();
      EXPECT_EQ(kda_layer_run(plan_.get(), &args_[i], mirror_->workspace(), stream), KDA_OK) << kda_last_error();
    }
  }
  Mirror& mirror() { return *mirror_; }
  // Everything that a step writes.
  std::vector<Tensor> results() const {
    std::vector<Tensor> all = {residual};
    for (const Layer& l : layers_) all.insert(all.end(), {l.out, l.state, l.window});
    return all;
  }
  void restore(const std::vector<Tensor>& from) {
    size_t next = 0;
    residual.assign(from[next++].values());
    for (Layer& l : layers_) {
      for (Tensor* t : {&l.out, &l.state, &l.window}) t->assign(from[next++].values());
    }
  }

  Tensor residual, slots;

 private:
  struct Layer {
    Tensor x, out, state, window;
  };
  void add(size_t i) {
    Layer& l = layers_[i];
    auto n = sized<kda_residual_norm_args>();
    n.residual = residual;
    if (i > 0) n.add = layers_[i - 1].out;
    n.out = l.x;
    norm_args_.push_back(n);
    auto a = sized<kda_layer_args>();
    a.weights = weights_[i].get();
    a.hidden = l.x;
    a.recurrent.sequences.begin = begin_;
    a.recurrent.sequences.length = length_;
    a.recurrent.slots = slots;
    a.state = l.state;
    a.conv_state = l.window;
    a.out = l.out;
    args_.push_back(a);
  }

  conformance::Plan plan_, norm_;
  Tensor begin_, length_;
  std::vector<WeightsHandle> weights_;
  std::vector<Layer> layers_;
  std::vector<kda_residual_norm_args> norm_args_;
  std::vector<kda_layer_args> args_;
  std::vector<kda_tensor*> all_;
  cuda_test::Memory memory_;
  std::unique_ptr<Mirror> mirror_;
};

class LayerGraph : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Layers, LayerGraph, testing::Values(1, 3));

TEST_P(LayerGraph, F52_ACapturedDecodeStepFollowsTheDevice) {
  Decoding d(GetParam());
  ASSERT_TRUE(d.mirror().ok());
  cudaStream_t stream = nullptr;
  KDA_REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  KDA_REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  d.run(stream);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  size_t nodes = 0;
  KDA_REQUIRE_CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
  std::printf("%d layers: %zu nodes\n", GetParam(), nodes);
  cudaGraphExec_t exec = nullptr;
  KDA_REQUIRE_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  std::mt19937_64 random(7);
  for (int step = 0; step < 20; ++step) {
    std::vector<int64_t> ids = iota(kSlots);
    std::shuffle(ids.begin(), ids.end(), random);
    std::vector<double> table;
    for (size_t i = 0; i < kRows; ++i) table.push_back(random() % 4 == 0 ? -1.0 : static_cast<double>(ids[i]));
    d.slots.assign(table);
    d.residual.assign(uniform_vector(static_cast<uint32_t>(100 + step), kRows * kHidden));
    const std::vector<Tensor> before = d.results();
    ASSERT_TRUE(d.mirror().refresh());
    d.run(stream);
    KDA_REQUIRE_CUDA(cudaStreamSynchronize(stream));
    ASSERT_EQ(d.mirror().back(), "");
    const std::vector<Tensor> eager = d.results();
    d.restore(before);
    ASSERT_TRUE(d.mirror().refresh());
    KDA_REQUIRE_CUDA(cudaGraphLaunch(exec, stream));
    KDA_REQUIRE_CUDA(cudaStreamSynchronize(stream));
    ASSERT_EQ(d.mirror().back(), "");
    const std::vector<Tensor> replayed = d.results();
    for (size_t i = 0; i < eager.size(); ++i) {
      ASSERT_EQ(first_difference(eager[i], replayed[i]), "") << "step " << step << ", result " << i;
    }
  }
  KDA_REQUIRE_CUDA(cudaGraphExecDestroy(exec));
  KDA_REQUIRE_CUDA(cudaGraphDestroy(graph));
  KDA_REQUIRE_CUDA(cudaStreamDestroy(stream));
}

TEST(LayerRuns, G11_TakeNoDeviceMemory) {
  Decoding d(2);
  d.run(nullptr);
  KDA_REQUIRE_CUDA(cudaDeviceSynchronize());
  // The count is the device's, which other processes use too: what a run takes would be missing every time.
  size_t before = 0, after = 0, total = 0;
  for (int attempt = 0; attempt < 20 && (attempt == 0 || after < before); ++attempt) {
    KDA_REQUIRE_CUDA(cudaMemGetInfo(&before, &total));
    for (int i = 0; i < 100; ++i) d.run(nullptr);
    KDA_REQUIRE_CUDA(cudaDeviceSynchronize());
    KDA_REQUIRE_CUDA(cudaMemGetInfo(&after, &total));
  }
  EXPECT_GE(after, before);
}

// The sizes of Kimi-Linear and of a rank of Kimi-K3: a prefix of 2,048 rows has the bits that it has alone.
TEST(LayerProjections, N13_RowsOfALargeBatch) {
  for (const auto& [hidden, heads] : {std::pair{int64_t{2304}, int64_t{32}}, {7168, 12}}) {
    const LayerModel m = conformance::layer_model(spec(hidden, heads), 6);
    std::string message;
    const WeightsHandle w = conformance::pack(m, cuda_test::context(), KDA_BF16, nullptr, message);
    ASSERT_NE(w, nullptr) << message;
    const auto run = [&](int64_t rows) {
      auto r = conformance::prefill_layer(w.get(), cuda_test::context(), "auto", nullptr, KDA_BF16, rows,
                                          KDA_PLAN_BATCH_INVARIANT);
      EXPECT_EQ(r.error, "");
      return r;
    };
    const auto all = run(2048);
    for (const int64_t rows : {1, 7, 64, 129, 1000}) {
      ASSERT_EQ(first_difference(conformance::narrow(all.out, 0, 0, rows), run(rows).out), "")
          << hidden << " " << rows;
    }
  }
}

}  // namespace
}  // namespace kda::conformance::test

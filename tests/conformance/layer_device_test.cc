// The layer operator on a device (spec L-6 to L-13): the cases and files that the CPU's layer passes, and what its
// projections promise there. tests/unit/layer has the same for the CPU.
#include "conformance/device.h"
#include "conformance/layer.h"
#include "conformance/layer_vectors.h"
#include "harness.h"
#include "support/vectors.h"

namespace kda::conformance::test {
namespace {

using conformance::LayerModel;
using conformance::LayerRun;
using conformance::WeightsHandle;

kda_layer_spec spec_of(int64_t hidden, kda_output_gate gate = KDA_OUTPUT_GATE_LOW_RANK) {
  kda_layer_spec s{};
  s.hidden = hidden;
  s.num_heads = s.num_value_heads = 2;
  s.key_dim = s.value_dim = 32;
  s.gate_rank = 16;
  s.output_gate = gate;
  s.output_gate_rank = gate == KDA_OUTPUT_GATE_LOW_RANK ? 16 : 0;
  s.conv_width = 4;
  s.gate_family = KDA_GATE_SOFTPLUS;
  s.norm_eps = 1e-5;
  return s;
}

std::string text(const conformance::Report& report) {
  std::string s = report.refusal();
  for (const std::string& fault : report.faults()) s += "\n  " + fault;
  for (const conformance::Measure& m : report.measures()) {
    if (!m.ok()) s += "\n  " + m.what + ": " + m.error.text() + "; limit " + std::to_string(m.limit);
  }
  return s;
}

}  // namespace

class LayerDeviceTest : public BackendTest {
 protected:
  void SetUp() override {
    if (!on_device()) GTEST_SKIP() << "tests/unit/layer has the CPU's";
  }
  const char* backend() const { return GetParam() == "cuda_portable" ? "portable" : "auto"; }
  kda_context* context() const { return conformance::device_context(); }
  conformance::Setting setting() const {
    conformance::Setting s;
    s.backend = backend();
    s.context = s.other = context();
    s.device = {KDA_CUDA, 0};
    return s;
  }
  WeightsHandle packed(const LayerModel& m, kda_dtype io, int32_t ranks = 1, int32_t rank = 0) const {
    std::string message;
    WeightsHandle w = conformance::pack(m, context(), io, nullptr, message, ranks, rank);
    EXPECT_NE(w, nullptr) << message;
    return w;
  }
  LayerRun run(const kda_layer_weights* w, kda_dtype io, int64_t rows, uint32_t flags = 0) const {
    LayerRun r = conformance::prefill_layer(w, context(), backend(), nullptr, io, rows, flags);
    EXPECT_EQ(r.error, "");
    return r;
  }
  // The same on the fp64 layer.
  static LayerRun oracle(const LayerModel& m, kda_dtype io, int64_t rows) {
    std::string message;
    const WeightsHandle w = conformance::pack(m, conformance::cpu_context(), io, "reference", message);
    EXPECT_NE(w, nullptr) << message;
    return conformance::prefill_layer(w.get(), conformance::cpu_context(), "reference", "reference", io, rows);
  }
  void expect_agrees(const LayerModel& m, kda_dtype io, int64_t rows) const {
    const WeightsHandle w = packed(m, io);
    ASSERT_NE(w, nullptr);
    const LayerRun got = run(w.get(), io, rows), wanted = oracle(m, io, rows);
    ASSERT_EQ(wanted.error, "");
    const double limit = io == KDA_FP32 ? 1e-5 : 1e-2;
    EXPECT_LE(conformance::compare_flat(got.out.values(), wanted.out.values()).total, limit);
    EXPECT_LE(conformance::compare_flat(got.state.values(), wanted.state.values()).total, limit);
  }
};
KDA_FOR_BACKENDS(LayerDeviceTest);

TEST_P(LayerDeviceTest, L07_CasesAgainstTheFp64Layer) {
  for (const conformance::Case& c : conformance::layer_cases()) {
#ifdef KDA_TEST_FEW_LAYERS  // kernels run on the host
    if (!c.quick) continue;
#endif
    conformance::Report report;
    c.run(setting(), report);
    EXPECT_TRUE(report.passed()) << c.name << text(report);
    EXPECT_EQ(report.backend(), "cublaslt") << c.name;
  }
}

TEST_P(LayerDeviceTest, L07_R67_VectorsOfOtherImplementations) {
  for (const char* file : {"layer_kimi_linear", "layer_k3", "layer_glm5_next"}) {
    for (const kda_dtype io : {KDA_FP32, KDA_BF16}) {
      conformance::Report report;
      conformance::run_layer_vectors(data_dir() + "/vectors/" + file + ".safetensors", io, setting(), report);
      EXPECT_TRUE(report.passed()) << file << " " << kda_dtype_name(io) << text(report);
      EXPECT_EQ(report.measures().size(), 3u);
      for (const conformance::Measure& m : report.measures()) {
        std::printf("%s %s %s: %.2e of %.2e\n", file, kda_dtype_name(io), m.what.c_str(), m.error.total, m.limit);
      }
    }
  }
}

// Rows of a step do not change one another: a prefix of a large step has the bits that it has alone.
TEST_P(LayerDeviceTest, N13_RowsDoNotDependOnTheBatch) {
  const LayerModel m = conformance::layer_model(spec_of(160), 6);
  for (const kda_dtype io : {KDA_FP32, KDA_BF16, KDA_FP16}) {
    const WeightsHandle w = packed(m, io);
    ASSERT_NE(w, nullptr);
    const LayerRun all = run(w.get(), io, 150, KDA_PLAN_BATCH_INVARIANT);
    for (const int64_t rows : {1, 2, 17, 65, 100}) {
      const LayerRun few = run(w.get(), io, rows, KDA_PLAN_BATCH_INVARIANT);
      ASSERT_EQ(conformance::first_difference(conformance::narrow(all.out, 0, 0, rows), few.out), "")
          << kda_dtype_name(io) << " " << rows;
    }
  }
}

// The same call gives the same bits, with the flag and without it (N-12).
TEST_P(LayerDeviceTest, N12_RunsRepeat) {
  const LayerModel m = conformance::layer_model(spec_of(608), 6);
  const WeightsHandle w = packed(m, KDA_BF16);
  ASSERT_NE(w, nullptr);
  const LayerRun first = run(w.get(), KDA_BF16, 70), second = run(w.get(), KDA_BF16, 70);
  EXPECT_EQ(conformance::first_difference(first.out, second.out), "");
  EXPECT_EQ(conformance::first_difference(first.state, second.state), "");
}

// Weights that the io dtype cannot hold are multiplied exactly all the same, and a bias is added before the rounding.
TEST_P(LayerDeviceTest, L07_L11_WideWeightsAndBias) {
  for (const int64_t rows : {1, 130}) {  // one piece, and more than one
    LayerModel m = conformance::layer_model(spec_of(48), 10);
    for (const kda_dtype io : {KDA_FP32, KDA_BF16, KDA_FP16}) {
      LayerModel wide = m;
      for (auto& [name, tensor] : wide.tensors) {
        if (name != "q_proj.weight" && name != "o_proj.weight") continue;
        std::vector<double> x = tensor.values();
        for (double& v : x) v *= 1.0003;
        tensor = Tensor::of(KDA_FP32, tensor.shape(), x);
      }
      expect_agrees(wide, io, rows);
      LayerModel biased = m;
      biased.tensors.emplace_back("g_b_proj.bias", Tensor::of(KDA_FP32, {64}, uniform_vector(77, 64)));
      expect_agrees(biased, io, rows);
    }
  }
}

TEST_P(LayerDeviceTest, L06_L10_SharesAndFullRankGate) {
  expect_agrees(conformance::layer_model(spec_of(48, KDA_OUTPUT_GATE_FULL_RANK), 3), KDA_BF16, 20);
  kda_layer_spec s = spec_of(48);
  s.num_heads = 4;
  s.num_value_heads = 8;
  const LayerModel m = conformance::layer_model(s, 7);
  const LayerRun whole = oracle(m, KDA_FP32, 30);
  std::vector<double> sum(static_cast<size_t>(whole.out.size()), 0.0);
  for (int32_t rank = 0; rank < 2; ++rank) {
    const WeightsHandle w = packed(m, KDA_FP32, 2, rank);
    ASSERT_NE(w, nullptr);
    const std::vector<double> part = run(w.get(), KDA_FP32, 30).out.values();
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
  }
  EXPECT_LE(conformance::compare_flat(sum, whole.out.values()).total, 1e-5);
}

TEST_P(LayerDeviceTest, L12_ADryRunWritesZerosAndTouchesNoPool) {
  const LayerModel m = conformance::layer_model(spec_of(48), 12);
  const WeightsHandle w = packed(m, KDA_BF16);
  kda_layer_desc d = conformance::layer_desc(m.spec, backend(), KDA_BF16);
  d.max_tokens = 5;
  d.max_sequences = 1;
  const conformance::Plan plan(kda_layer_plan_create, context(), d);
  ASSERT_TRUE(plan.ok()) << plan.message();
  const Tensor hidden = Tensor::full(KDA_BF16, {5, 48}, 1);
  Tensor out(KDA_BF16, {5, 48}), normed(KDA_BF16, {5, 2, 32});  // full of NaN
  const Tensor pool = canary_pool(KDA_FP32, {2, 2, 32, 32}), window = canary_pool(KDA_BF16, {2, 3, 192});
  const conformance::Snapshot before(pool), before_window(window);
  auto a = conformance::sized<kda_layer_args>();
  a.weights = w.get();
  a.hidden = hidden;
  a.state = pool;
  a.conv_state = window;
  a.normed = normed;
  a.out = out;
  std::string message;
  ASSERT_EQ(conformance::run_layer(context(), plan, a, message), KDA_OK) << message;
  for (const Tensor* t : {&out, &normed}) {
    for (const double x : t->values()) EXPECT_EQ(x, 0);
  }
  EXPECT_EQ(before.changes_outside(pool) + before_window.changes_outside(window), "");

  // Rows that the algorithms were not chosen for are refused by name, never copied (G-8).
  Tensor odd = Tensor::full(KDA_BF16, {5, 49}, 1);
  a.hidden = conformance::narrow(odd, 1, 0, 48);
  const Tensor cu = Tensor::ints({0, 5}), slots = Tensor::ints({0});
  a.chunk.sequences.cu_seqlens = cu;
  a.chunk.slots = slots;
  EXPECT_EQ(conformance::run_layer(context(), plan, a, message), KDA_UNSUPPORTED);
  EXPECT_NE(message.find("multiples of 16 bytes"), std::string::npos) << message;
}

// Between the layers: the table of the residual norm.
TEST_P(LayerDeviceTest, N04_N05_N12_ResidualNorm) {
  for (const conformance::Case& c : conformance::residual_norm_cases()) {
    conformance::Report report;
    c.run(setting(), report);
    EXPECT_TRUE(report.passed()) << c.name << text(report);
    EXPECT_EQ(report.backend(), "portable") << c.name;
  }
}

}  // namespace kda::conformance::test

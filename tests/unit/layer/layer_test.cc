// The layer operator (spec L-6 to L-13) and weights in their other forms (L-10, L-11).
#include <unistd.h>

#include <cmath>

#include "conformance/compare.h"
#include "conformance/layer_vectors.h"
#include "support.h"

namespace kda::conformance::test {
namespace {

using conformance::WeightsHandle;

WeightsHandle packed(const LayerModel& m, kda_dtype io, const char* projection = nullptr, int32_t ranks = 1,
                     int32_t rank = 0) {
  std::string message;
  WeightsHandle w = conformance::pack(m, conformance::cpu_context(), io, projection, message, ranks, rank);
  EXPECT_NE(w, nullptr) << message;
  return w;
}

// A whole model's results, bit for bit, from two forms of its weights.
void expect_same(const LayerModel& a, const LayerModel& b) {
  const WeightsHandle first = packed(a, KDA_BF16), second = packed(b, KDA_BF16);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  const LayerRun x = run_once(first.get(), nullptr, KDA_BF16, 20), y = run_once(second.get(), nullptr, KDA_BF16, 20);
  ASSERT_EQ(x.error + y.error, "");
  EXPECT_EQ(conformance::first_difference(x.out, y.out), "");
  EXPECT_EQ(conformance::first_difference(x.state, y.state), "");
}

}  // namespace

TEST(Layer, L07_VectorsOfOtherImplementations) {
  for (const char* backend : {"auto", "portable", "reference"}) {
    for (const char* file : {"layer_kimi_linear", "layer_k3", "layer_glm5_next"}) {
      for (const kda_dtype io : {KDA_FP32, KDA_BF16}) {
        SCOPED_TRACE(std::string(backend) + " " + file + " " + kda_dtype_name(io));
        conformance::Report report;
        conformance::Setting setting;
        setting.backend = backend;
        conformance::run_layer_vectors(std::string(KDA_TEST_DATA_DIR) + "/vectors/" + file + ".safetensors", io,
                                       setting, report);
        EXPECT_TRUE(report.passed()) << (report.faults().empty() ? report.worst()->error.text() : report.faults()[0]);
        EXPECT_EQ(report.measures().size(), 3u);
      }
    }
  }
}

TEST(Layer, L07_CasesAgainstTheFp64Layer) {
  conformance::Setting setting;
  setting.context = conformance::cpu_context(2);
  setting.other = conformance::cpu_context(1);
  for (const conformance::Case& c : conformance::layer_cases()) {
    SCOPED_TRACE(c.name);
    conformance::Report report;
    c.run(setting, report);
    EXPECT_TRUE(report.passed()) << (report.faults().empty() ? report.worst()->what + report.worst()->error.text()
                                                             : report.faults()[0]);
  }
}

TEST(Layer, L07_ACaseThatCanFail) {
  conformance::Setting setting;
  setting.spoil = [](const std::string&, Tensor& t) { t.set({0, 0}, 1e3); };
  conformance::Report report;
  conformance::layer_cases()[0].run(setting, report);
  EXPECT_FALSE(report.passed());
}

// Rows of a step do not change one another: any row of a large step has the bits that it has alone.
TEST(Layer, N13_ProjectionsOfARowDoNotDependOnTheBatch) {
  kda_layer_spec s = small_spec();
  s.hidden = 600;  // more than one block of the sums
  const LayerModel m = conformance::layer_model(s, 6);
  for (const char* projection : {"portable", "onednn", "reference"}) {
    for (const kda_dtype io : {KDA_FP32, KDA_BF16, KDA_FP16}) {
      SCOPED_TRACE(std::string(projection) + " " + kda_dtype_name(io));
      std::string message;
      const WeightsHandle w = conformance::pack(m, conformance::cpu_context(), io, projection, message);
      if (w == nullptr) {
        EXPECT_STREQ(projection, "onednn") << message;  // the build or the machine has none
        continue;
      }
      const LayerRun all = run_once(w.get(), projection, io, 150);
      for (const int64_t rows :
           {1, 2, 5, 11, 12, 13, 16, 17, 25, 63, 64, 65, 100}) {  // a prefix: later rows do not reach back
        const LayerRun few = run_once(w.get(), projection, io, rows);
        ASSERT_EQ(few.error, "");
        EXPECT_EQ(conformance::first_difference(conformance::narrow(all.out, 0, 0, rows), few.out), "") << rows;
      }
      const WeightsHandle exact = packed(m, io, "reference");
      const LayerRun oracle = run_once(exact.get(), "reference", io, 150);
      ASSERT_EQ(oracle.error, "");
      EXPECT_LE(conformance::compare_flat(all.out.values(), oracle.out.values()).total, io == KDA_FP32 ? 1e-6 : 1e-2);
    }
  }
}

TEST(Layer, L06_RanksSharesSumToTheWhole) {
  kda_layer_spec s = small_spec();
  s.num_heads = 4;
  s.num_value_heads = 8;
  const LayerModel m = conformance::layer_model(s, 7);
  const LayerRun whole = run_once(packed(m, KDA_FP32).get(), nullptr, KDA_FP32, 30);
  std::vector<double> sum(static_cast<size_t>(whole.out.size()), 0.0), state;
  for (int32_t rank = 0; rank < 2; ++rank) {
    const WeightsHandle w = packed(m, KDA_FP32, nullptr, 2, rank);
    const LayerRun part = run_once(w.get(), nullptr, KDA_FP32, 30);
    ASSERT_EQ(part.error, "");
    const std::vector<double> x = part.out.values(), heads = part.state.values();
    for (size_t i = 0; i < x.size(); ++i) sum[i] += x[i];
    state.insert(state.end(), heads.begin(), heads.end());
  }
  EXPECT_LE(conformance::compare_flat(sum, whole.out.values()).total, 1e-6);
  EXPECT_LE(conformance::compare_flat(state, whole.state.values()).total, 1e-6);
  std::string message;
  EXPECT_EQ(conformance::pack(m, conformance::cpu_context(), KDA_FP32, nullptr, message, 3, 0), nullptr);
  EXPECT_NE(message.find("divides 4 heads and 8 value heads"), std::string::npos) << message;
  kda_layer_spec share{};
  EXPECT_EQ(kda_layer_spec_share(&s, 2, 2, &share), KDA_INVALID_ARGUMENT);
}

TEST(Layer, L10_FusedProjections) {
  for (const kda_output_gate gate : {KDA_OUTPUT_GATE_LOW_RANK, KDA_OUTPUT_GATE_FULL_RANK}) {
    const LayerModel plain = conformance::layer_model(small_spec(gate), 8);
    LayerModel m = plain;
    const auto get = [&](const char* name) { return const_cast<LayerModel&>(plain).find(name); };
    std::vector<const Tensor*> rows = {get("q_proj.weight"), get("k_proj.weight"), get("v_proj.weight")};
    if (gate == KDA_OUTPUT_GATE_FULL_RANK) rows.push_back(get("g_proj.weight"));
    rows.push_back(get("f_a_proj.weight"));
    rows.push_back(get("b_proj.weight"));
    Tensor fused = stacked(rows, 14);  // 16 - (… + 16 + 2) mod 16
    for (const char* name : {"q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"})
      remove(m, std::string(name) + ".weight");
    m.tensors.emplace_back("in_proj_qkvgfab.weight", fused);
    expect_same(plain, m);
    fused.set({fused.shape()[0] - 1, 0}, 1);
    *m.find("in_proj_qkvgfab.weight") = fused;
    std::string message;
    EXPECT_EQ(conformance::pack(m, conformance::cpu_context(), KDA_BF16, nullptr, message), nullptr);
    EXPECT_NE(message.find("zero rows"), std::string::npos) << message;
  }
  LayerModel plain = conformance::layer_model(small_spec(), 8);
  for (const char* name : {"fused_qkvbfg_a_proj.weight", "in_proj_qkvbfg_a.weight"}) {
    LayerModel m = plain;
    const auto get = [&](const char* tensor) { return plain.find(tensor); };
    m.tensors.emplace_back(name, stacked({get("q_proj.weight"), get("k_proj.weight"), get("v_proj.weight"),
                                          get("b_proj.weight"), get("f_a_proj.weight"), get("g_a_proj.weight")}));
    m.tensors.emplace_back("fused_fg_b_proj.weight", stacked({get("f_b_proj.weight"), get("g_b_proj.weight")}));
    for (const char* old : {"q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj", "f_b_proj", "g_b_proj"}) {
      remove(m, std::string(old) + ".weight");
    }
    expect_same(plain, m);
    m.tensors.emplace_back("q_proj.weight", *plain.find("q_proj.weight"));
    std::string message;
    EXPECT_EQ(conformance::pack(m, conformance::cpu_context(), KDA_BF16, nullptr, message), nullptr);
    EXPECT_NE(message.find("q_proj"), std::string::npos) << message;
  }
}

TEST(FieldCases, F36_ConvWeightsPackedOrApart) {
  LayerModel plain = conformance::layer_model(small_spec(), 9), m = plain, flat = plain;
  m.tensors.emplace_back("qkv_conv1d.weight", stacked({plain.find("q_conv1d.weight"), plain.find("k_conv1d.weight"),
                                                       plain.find("v_conv1d.weight")}));
  for (const char* name : {"q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"}) {
    remove(m, name);
    *flat.find(name) = Tensor::of(KDA_BF16, {64, 4}, plain.find(name)->values());
  }
  expect_same(plain, m);
  expect_same(plain, flat);
}

TEST(Layer, L11_NamesBiasAndNoShortConvolutionOfFla) {
  LayerModel plain = conformance::layer_model(small_spec(), 10), m = plain;
  rename(m, "f_a_proj.weight", "f_proj.0.weight");
  rename(m, "f_b_proj.weight", "f_proj.1.weight");
  rename(m, "g_a_proj.weight", "g_proj.0.weight");
  rename(m, "g_b_proj.weight", "g_proj.1.weight");
  expect_same(plain, m);

  // A bias on g_proj.1 is added before the rounding: with zero weights z is the bias.
  m.tensors.emplace_back("g_proj.1.bias", Tensor::full(KDA_BF16, {64}, 100));
  m.find("g_proj.1.weight")->fill(0);
  plain.find("g_b_proj.weight")->fill(0);
  const LayerRun open = run_once(packed(m, KDA_FP32).get(), nullptr, KDA_FP32, 9);
  const LayerRun half = run_once(packed(plain, KDA_FP32).get(), nullptr, KDA_FP32, 9);
  std::vector<double> twice = half.normed.values();
  for (double& x : twice) x *= 2;  // sigmoid(0) against sigmoid(100)
  EXPECT_LE(conformance::compare_flat(open.normed.values(), twice).total, 1e-6);

  // Without short convolution q, k, v are silu of their projections, as with taps that pass the newest input on.
  kda_layer_spec s = small_spec();
  s.conv_width = 2;
  LayerModel taps = conformance::layer_model(s, 11), none = taps;
  for (const char* name : {"q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"}) {
    std::vector<double> w;
    for (int c = 0; c < 64; ++c) w.insert(w.end(), {0.0, 1.0});
    *taps.find(name) = Tensor::of(KDA_FP32, {64, 1, 2}, w);
    remove(none, name);
  }
  expect_same(taps, none);
}

// The bias is added to the taps' sum in fp32 (spec L-11): with a constant hidden row and taps [0, 0, 0, 1] the
// convolution of q, k, v is silu(projection + bias), as the projection of one more hidden channel that is always 1.
TEST(Layer, L11_ABiasOfTheShortConvolution) {
  kda_layer_spec s = small_spec();
  s.conv_bias = 1;
  LayerModel biased = conformance::layer_model(s, 13), plain = biased;
  plain.spec.conv_bias = 0;
  const int64_t last = s.hidden - 1;
  for (const char* part : {"q", "k", "v"}) {
    const std::string taps = std::string(part) + "_conv1d.weight", bias = std::string(part) + "_conv1d.bias",
                      matrix = std::string(part) + "_proj.weight";
    std::vector<double> w;
    for (int c = 0; c < 64; ++c) w.insert(w.end(), {0.0, 0.0, 0.0, 1.0});
    for (LayerModel* m : {&biased, &plain}) *m->find(taps) = Tensor::of(KDA_FP32, {64, 1, 4}, w);
    for (int64_t c = 0; c < 64; ++c) {
      biased.find(matrix)->set({c, last}, 0);
      plain.find(matrix)->set({c, last}, biased.find(bias)->get({c}));
    }
    remove(plain, bias);
  }
  // Other tensors read the last channel too: the same in both models.
  const WeightsHandle a = packed(biased, KDA_FP32), b = packed(plain, KDA_FP32);
  ASSERT_TRUE(a != nullptr && b != nullptr);
  Tensor hidden = conformance::layer_rows(a.get(), KDA_FP32, 12);
  for (int64_t t = 0; t < 12; ++t) hidden.set({t, last}, 1);
  const auto run = [&](const WeightsHandle& w) {
    return conformance::prefill_layer(w.get(), conformance::cpu_context(), nullptr, nullptr, hidden);
  };
  const LayerRun x = run(a), y = run(b);
  ASSERT_EQ(x.error + y.error, "");
  EXPECT_LE(conformance::compare_flat(x.out.values(), y.out.values()).total, 1e-6);
  EXPECT_LE(conformance::compare_flat(x.state.values(), y.state.values()).total, 1e-6);
  kda_tensor bias{};
  EXPECT_EQ(kda_layer_weights_parameter(a.get(), "conv_bias", &bias), KDA_OK);
  EXPECT_EQ(bias.shape[0], 192);
  EXPECT_EQ(kda_layer_weights_parameter(b.get(), "conv_bias", &bias), KDA_NOT_FOUND);
}

TEST(Layer, L11_PackedBiasAndARanksShare) {
  kda_layer_spec s = small_spec();
  s.conv_bias = 1;
  const LayerModel apart = conformance::layer_model(s, 14);
  LayerModel joined = apart;
  std::vector<double> all;
  for (const char* name : {"q_conv1d.bias", "k_conv1d.bias", "v_conv1d.bias"}) {
    const std::vector<double> part = joined.find(name)->values();
    all.insert(all.end(), part.begin(), part.end());
    remove(joined, name);
  }
  joined.tensors.emplace_back("conv1d.bias", Tensor::of(KDA_BF16, {192}, all));
  expect_same(apart, joined);
  for (int32_t rank = 0; rank < 2; ++rank) {
    const WeightsHandle w = packed(apart, KDA_FP32, nullptr, 2, rank);
    kda_tensor bias{};
    ASSERT_EQ(kda_layer_weights_parameter(w.get(), "conv_bias", &bias), KDA_OK);
    const std::vector<double> got = conformance::values(bias);
    ASSERT_EQ(got.size(), 96u);
    for (size_t part = 0; part < 3; ++part) {
      for (size_t c = 0; c < 32; ++c) {
        EXPECT_EQ(got[part * 32 + c], all[part * 64 + static_cast<size_t>(rank) * 32 + c]);
      }
    }
  }
}

// Decode of a layer with a biased convolution continues a prefill as a longer prefill would have.
TEST(Layer, L11_DecodeWithABiasContinuesThePrompt) {
  kda_layer_spec s = small_spec();
  s.conv_bias = 1;
  const LayerModel m = conformance::layer_model(s, 15);
  const WeightsHandle w = packed(m, KDA_FP32);
  const LayerRun whole = run_once(w.get(), nullptr, KDA_FP32, 12);
  kda_layer_desc d = conformance::layer_desc(s, nullptr, KDA_FP32);
  d.max_tokens = 12;
  d.max_sequences = 1;
  const conformance::Plan plan(kda_layer_plan_create, conformance::cpu_context(), d);
  ASSERT_TRUE(plan.ok()) << plan.message();
  Tensor state = Tensor::full(KDA_FP32, {1, 2, 32, 32}, 0), window = Tensor::full(KDA_FP32, {1, 3, 192}, 0);
  const Tensor rows = conformance::layer_rows(w.get(), KDA_FP32, 12), slots = Tensor::ints({0});
  std::string message;
  for (int64_t first = 0; first < 12;) {
    const int64_t count = first == 0 ? 7 : 1;
    const Tensor cu = Tensor::ints({0, count}),
                 hidden = Tensor::of(KDA_FP32, {count, s.hidden},
                                     conformance::values(conformance::narrow(rows, 0, first, count)));
    Tensor out(KDA_FP32, {count, s.hidden});
    auto a = conformance::sized<kda_layer_args>();
    a.weights = w.get();
    a.hidden = hidden;
    kda_layer_group& group = first == 0 ? a.chunk : a.recurrent;
    group.sequences.cu_seqlens = cu;
    group.slots = slots;
    a.state = state;
    a.conv_state = window;
    a.out = out;
    ASSERT_EQ(conformance::run_layer(conformance::cpu_context(), plan, a, message), KDA_OK) << message;
    const auto wanted = conformance::values(conformance::narrow(whole.out, 0, first, count));
    EXPECT_LE(conformance::compare_flat(out.values(), wanted).total, 1e-5) << first;
    first += count;
  }
}

TEST(Layer, L12_ADryRunWritesZerosAndTouchesNoPool) {
  const LayerModel m = conformance::layer_model(small_spec(), 12);
  const WeightsHandle w = packed(m, KDA_BF16);
  kda_layer_desc d = conformance::layer_desc(small_spec(), nullptr, KDA_BF16);
  d.max_tokens = 5;
  d.max_sequences = 1;
  const conformance::Plan plan(kda_layer_plan_create, conformance::cpu_context(), d);
  ASSERT_TRUE(plan.ok()) << plan.message();
  const Tensor hidden = Tensor::full(KDA_BF16, {5, 48}, 1);
  Tensor out(KDA_BF16, {5, 48}), normed(KDA_BF16, {5, 2, 32});  // full of NaN
  const Tensor pool = conformance::canary_pool(KDA_FP32, {2, 2, 32, 32}),
               window = conformance::canary_pool(KDA_BF16, {2, 3, 192});
  const conformance::Snapshot before(pool), before_window(window);
  auto a = conformance::sized<kda_layer_args>();
  a.weights = w.get();
  a.hidden = hidden;
  a.state = pool;
  a.conv_state = window;
  a.normed = normed;
  a.out = out;
  std::string message;
  ASSERT_EQ(conformance::run_layer(conformance::cpu_context(), plan, a, message), KDA_OK) << message;
  for (const Tensor* t : {&out, &normed}) {
    for (const double x : t->values()) EXPECT_EQ(x, 0);
  }
  EXPECT_EQ(before.changes_outside(pool) + before_window.changes_outside(window), "");
  EXPECT_EQ(out.guard_report(), "");

  // Wrong rows, weights of another io, no weights: refused.
  const Tensor long_hidden = Tensor::full(KDA_BF16, {6, 48}, 1);
  a.hidden = long_hidden;
  EXPECT_EQ(conformance::run_layer(conformance::cpu_context(), plan, a, message), KDA_INVALID_ARGUMENT);
  EXPECT_NE(message.find("max_tokens = 5"), std::string::npos) << message;
  a.hidden = hidden;
  const WeightsHandle other = packed(m, KDA_FP32);
  a.weights = other.get();
  EXPECT_EQ(conformance::run_layer(conformance::cpu_context(), plan, a, message), KDA_INVALID_ARGUMENT);
  a.weights = nullptr;
  EXPECT_EQ(conformance::run_layer(conformance::cpu_context(), plan, a, message), KDA_INVALID_ARGUMENT);
  a.weights = w.get();
  a.out = hidden;  // in place
  EXPECT_EQ(conformance::run_layer(conformance::cpu_context(), plan, a, message), KDA_INVALID_ARGUMENT);
}

TEST(Layer, L13_MasksWithPaddingOnOneSideAlone) {
  int64_t begin[3] = {-1, -1, -1}, length[3] = {-1, -1, -1};
  const Tensor mask = Tensor::flags({0, 0, 1, 1, /**/ 1, 1, 1, 1, /**/ 0, 0, 0, 0});
  const kda_tensor rows = conformance::reshape(mask, {3, 4});
  ASSERT_EQ(kda_mask_sequences(&rows, begin, length), KDA_OK) << kda_last_error();
  EXPECT_EQ(std::vector<int64_t>(begin, begin + 3), (std::vector<int64_t>{2, 4, 8}));
  EXPECT_EQ(std::vector<int64_t>(length, length + 3), (std::vector<int64_t>{2, 4, 0}));
  for (const std::vector<int64_t>& bad : {std::vector<int64_t>{1, 0, 1, 1}, {0, 1, 1, 0}, {1, 1, 0, 1}}) {
    const Tensor hole = Tensor::flags(bad);
    const kda_tensor view = conformance::reshape(hole, {1, 4});
    begin[0] = -7;
    EXPECT_EQ(kda_mask_sequences(&view, begin, length), KDA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(kda_last_error()).find("row 0"), std::string::npos);
    EXPECT_EQ(begin[0], -7);
  }
}

}  // namespace kda::conformance::test

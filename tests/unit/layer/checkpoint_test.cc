// Checkpoints (spec L-1 to L-5, L-10, L-11) and what is wrong with them: one error that names file and tensor.
#include <unistd.h>

#include <cmath>
#include <cstring>

#include "support.h"

namespace kda::conformance::test {
namespace {

constexpr char kPrefix[] = "model.layers.0.self_attn.";

class CheckpointTest : public testing::Test {
 protected:
  // One layer 0 in one file; the message of its refusal.
  void write(const LayerModel& model) { write_file(folder_.file("model.safetensors"), {{kPrefix, &model}}); }
  std::string path() const { return folder_.file("model.safetensors"); }
  Folder folder_;
  LayerModel model_ = conformance::layer_model(small_spec(), 1);
};

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

const char* const kKimi =
    R"({"hidden_size":48,"num_heads":7,"rms_norm_eps":1e-6,"linear_attn_config":{"num_heads":2,"head_dim":32,
        "short_conv_kernel_size":4,"kda_layers":[1,3],"full_attn_layers":[2]}})";

}  // namespace

TEST_F(CheckpointTest, L01_L03_L05_NamesPrefixesAndConfigsOfTheModels) {
  for (const std::string model : {"model.", "model.language_model.", "language_model.model."}) {
    write_file(path(), {{layer_prefix(0, model), &model_}, {layer_prefix(2, model), &model_}});
    folder_.text("config.json", kKimi);
    const auto layers = Checkpoint(folder_.path()).layers();
    ASSERT_EQ(layers.size(), 2u);
    EXPECT_EQ(layers[0].number, 0);
    EXPECT_EQ(layers[1].number, 2);
    EXPECT_EQ(layers[1].spec.gate_family, KDA_GATE_SOFTPLUS);
    EXPECT_EQ(layers[1].spec.num_heads, 2);
    EXPECT_EQ(layers[1].spec.key_dim, 32);
    EXPECT_EQ(layers[1].spec.norm_eps, 1e-6);
    EXPECT_EQ(layers[1].spec.output_gate, KDA_OUTPUT_GATE_LOW_RANK);
  }
  const LayerModel k3 = conformance::layer_model(small_spec(KDA_OUTPUT_GATE_FULL_RANK), 2);
  write_file(path(), {{layer_prefix(0), &k3}, {layer_prefix(2), &k3}});
  folder_.text("config.json", replaced(kKimi, "\"kda_layers\"",
                                       "\"gate_lower_bound\":-5.0,\"use_full_rank_gate\":true,\"kda_layers\""));
  auto spec = Checkpoint(folder_.path()).layers()[0].spec;
  EXPECT_EQ(spec.gate_family, KDA_GATE_BOUNDED);
  EXPECT_EQ(spec.lower_bound, -5);
  EXPECT_EQ(spec.output_gate, KDA_OUTPUT_GATE_FULL_RANK);
  write(model_);
  folder_.text("config.json", R"({"text_config":{"linear_num_heads":2,"linear_head_dim":32,"linear_conv_kernel_dim":4,
      "linear_lower_bound":-5,"num_attention_heads":9,"layer_types":["linear_attention","full_attention"]}})");
  spec = Checkpoint(path()).layers()[0].spec;
  EXPECT_EQ(spec.lower_bound, -5);
  EXPECT_EQ(spec.num_heads, 2);
  int32_t count = 0;
  ASSERT_EQ(kda_model_spec("kimi-k3", &spec, &count), KDA_OK);
  EXPECT_EQ(spec.hidden, 7168);
  EXPECT_EQ(spec.num_heads, 96);
  EXPECT_EQ(count, 69);
  EXPECT_EQ(kda_model_spec("kimi-k4", &spec, nullptr), KDA_NOT_FOUND);
}

TEST_F(CheckpointTest, L01_ParametersByOneNameFromFilesAndMemory) {
  write(model_);
  const Checkpoint checkpoint(path());
  std::vector<kda_named_tensor> tensors;
  for (const auto& [name, tensor] : model_.tensors) tensors.push_back({name.c_str(), tensor.view()});
  const kda_layer_spec spec = checkpoint.layers()[0].spec;
  for (const auto& [name, tensor] : model_.tensors) {
    const kda_tensor mapped = checkpoint.parameter(0, name);
    kda_tensor given{};
    ASSERT_EQ(kda_layer_parameter(&spec, tensors.data(), tensors.size(), name.c_str(), &given), KDA_OK) << name;
    for (const kda_tensor& t : {mapped, given}) {
      size_t count = 1;
      for (int32_t i = 0; i < t.rank; ++i) count *= static_cast<size_t>(t.shape[i]);
      ASSERT_EQ(t.dtype, tensor.view().dtype) << name;
      ASSERT_EQ(count, static_cast<size_t>(tensor.size())) << name;
      EXPECT_EQ(std::memcmp(t.data, tensor.view().data, count * kda_dtype_size(t.dtype)), 0) << name;
    }
    EXPECT_EQ(given.data, tensor.view().data) << name;
  }
  kda_tensor none{};
  EXPECT_EQ(kda_checkpoint_parameter(checkpoint.get(), 0, "g_proj.weight", &none), KDA_NOT_FOUND);
  EXPECT_EQ(kda_checkpoint_parameter(checkpoint.get(), 1, "A_log", &none), KDA_NOT_FOUND);
  EXPECT_EQ(kda_layer_parameter(&spec, tensors.data(), tensors.size() - 1, "A_log", &none), KDA_INVALID_ARGUMENT);
}

TEST_F(CheckpointTest, L04_GateFamilyFollowsTheBoundAlone) {
  write(model_);
  const auto family = [&](const std::string& config) {
    folder_.text("config.json", config);
    return Checkpoint(path()).layers()[0].spec;
  };
  EXPECT_EQ(family(R"({"safe_gate":true})").gate_family, KDA_GATE_SOFTPLUS);
  EXPECT_EQ(family(R"({"lower_bound":null})").gate_family, KDA_GATE_SOFTPLUS);
  EXPECT_EQ(family(R"({"lower_bound":-7,"safe_gate":false})").lower_bound, -7);
  EXPECT_EQ(family(R"({"lower_bound":-5,"linear_attn_config":{"gate_lower_bound":-5.0}})").lower_bound, -5);
  folder_.text("config.json", R"({"lower_bound":-5,"linear_lower_bound":-4})");
  expect_refused(path(), {"config.json", "linear_lower_bound", "-5", "-4"});
  folder_.text("config.json", R"({"lower_bound":"-5"})");
  expect_refused(path(), {"config.json", "lower_bound", "number"});
}

TEST_F(CheckpointTest, L05_ConfigAndTensorsMustAgree) {
  write_file(path(), {{layer_prefix(0), &model_}, {layer_prefix(1), &model_}});
  folder_.text("config.json", kKimi);
  expect_refused(path(), {"layer 1", "not KDA", "config.json"});
  write_file(path(), {{layer_prefix(0), &model_}});
  expect_refused(path(), {"layer 2", "has no", "model.safetensors"});
  write_file(path(), {{"vision.layers.0.self_attn.", &model_}, {layer_prefix(0), &model_}});
  expect_refused(path(), {"one KDA layer 0", "vision.layers.0.self_attn.A_log"});
  LayerModel none = model_;
  remove(none, "A_log");
  write_file(path(), {{layer_prefix(0), &none}});
  expect_refused(path(), {"A_log", "got none"});
}

TEST_F(CheckpointTest, L02_MissingUnknownQuantisedAndBothOutputGates) {
  LayerModel m = model_;
  remove(m, "v_proj.weight");
  write(m);
  expect_refused(path(), {"model.safetensors", kPrefix, "v_proj.weight", "got none"});
  m = model_;
  m.tensors.emplace_back("q_proj.bias", Tensor::full(KDA_BF16, {64}, 0));
  write(m);
  expect_refused(path(), {"model.safetensors", "q_proj.bias"});
  m = model_;
  m.tensors.emplace_back("g_proj.weight", Tensor::full(KDA_BF16, {64, 48}, 0));
  write(m);
  expect_refused(path(), {kPrefix, "g_proj.weight", "g_a_proj.weight", "both"});
  m = model_;
  remove(m, "g_a_proj.weight");
  remove(m, "g_b_proj.weight");
  write(m);
  expect_refused(path(), {kPrefix, "neither"});
  m = model_;
  *m.find("k_proj.weight") = Tensor::full(KDA_BF16, {64, 47}, 0);
  write(m);
  expect_refused(path(), {"k_proj.weight", "3072", "3008"});
  m = model_;
  *m.find("o_proj.weight") = m.find("o_proj.weight")->copy(KDA_FP64);
  write(m);
  expect_refused(path(), {"model.safetensors", "o_proj.weight", "fp64"}, KDA_UNSUPPORTED);
}

TEST_F(CheckpointTest, L01_AnyShapeOfALogAndK3sPadding) {
  const std::vector<double> a = model_.find("A_log")->values();
  for (const conformance::Shape& shape : {conformance::Shape{2}, {1, 1, 2, 1}, {2, 1}}) {
    *model_.find("A_log") = Tensor::of(KDA_FP32, shape, a);
    write(model_);
    EXPECT_EQ(Checkpoint(path()).layers().size(), 1u);
  }
  std::vector<double> padded = a;
  padded.resize(128, 0.0);
  *model_.find("A_log") = Tensor::of(KDA_FP32, {128}, padded);
  write(model_);
  const Checkpoint c(path());
  auto options = conformance::sized<kda_layer_load_options>();
  const LayerWeights w(Context(1), c, 0, options);
  EXPECT_EQ(w.parameter("A_log").shape[0], 2);
  EXPECT_EQ(static_cast<const float*>(w.parameter("A_log").data)[1], static_cast<float>(a[1]));
  padded[100] = 1;
  *model_.find("A_log") = Tensor::of(KDA_FP32, {128}, padded);
  write(model_);
  expect_refused(path(), {"A_log", "zeros", "100"});
}

TEST_F(CheckpointTest, ShardsOfAnIndex) {
  LayerModel first = model_, second = model_;
  first.tensors.resize(6);
  second.tensors.erase(second.tensors.begin(), second.tensors.begin() + 6);
  write_file(folder_.file("a.safetensors"), {{kPrefix, &first}});
  write_file(folder_.file("b.safetensors"), {{kPrefix, &second}});
  std::string map;
  for (const auto& [name, shard] : {std::pair{&first, "a.safetensors"}, {&second, "b.safetensors"}}) {
    for (const auto& t : name->tensors) {
      map += (map.empty() ? "\"" : ",\"") + (kPrefix + t.first) + "\":\"" + shard + "\"";
    }
  }
  const std::string index = "model.safetensors.index.json";
  folder_.text(index, "{\"weight_map\":{" + map + "}}");
  EXPECT_EQ(Checkpoint(folder_.path()).layers().size(), 1u);
  EXPECT_EQ(Checkpoint(folder_.file(index)).layers().size(), 1u);
  folder_.text(index, "{\"weight_map\":{" + map + ",\"x\":\"../a.safetensors\"}}");
  expect_refused(folder_.path(), {index, "'x'", "beside the index"});
  folder_.text(index, "{\"weight_map\":{" + map + ",\"model.norm\":\"a.safetensors\"}}");
  expect_refused(folder_.path(), {"a.safetensors", "model.norm"});
  folder_.text(index, "{\"weight_map\":{" + map + "}}");
  fs::remove(folder_.file("b.safetensors"));
  expect_refused(folder_.path(), {"b.safetensors", "shard", kPrefix}, KDA_NOT_FOUND);
}

TEST_F(CheckpointTest, DamagedFiles) {
  write(model_);
  fs::resize_file(path(), fs::file_size(path()) - 5);
  expect_refused(path(), {"model.safetensors", "tensor '"});
  folder_.text("model.safetensors", std::string(7, '\xff'));
  expect_refused(path(), {"at least 8 bytes"});
  folder_.text("model.safetensors", std::string("\xff\xff\xff\xff\xff\xff\xff\x7f", 8) + "{}");
  expect_refused(path(), {"header length", "9223372036854775807"});
  expect_refused(folder_.file("none"), {"no such file"}, KDA_NOT_FOUND);
  fs::remove(path());
  expect_refused(folder_.path(), {".safetensors", "got none"}, KDA_NOT_FOUND);
}

TEST(FieldCases, F39_BiasOfHValuesIsRefusedWithBothCounts) {
  Folder folder;
  kda_layer_spec s = small_spec();
  s.num_heads = s.num_value_heads = 12;
  s.key_dim = s.value_dim = 128;
  LayerModel m = conformance::layer_model(s, 3);
  const std::vector<double> bias = m.find("dt_bias")->values();
  for (const conformance::Shape& shape : {conformance::Shape{1536}, {12, 128}}) {
    *m.find("dt_bias") = Tensor::of(KDA_FP32, shape, bias);
    write_file(folder.file("m.safetensors"), {{kPrefix, &m}});
    EXPECT_EQ(Checkpoint(folder.path()).layers()[0].spec.key_dim, 128);
  }
  *m.find("dt_bias") = Tensor::full(KDA_FP32, {12}, 0);
  write_file(folder.file("m.safetensors"), {{kPrefix, &m}});
  expect_refused(folder.path(), {"dt_bias", "1536", "12"});
}

TEST(FieldCases, F16_GateParametersAreCountedPerValueHead) {
  Folder folder;
  kda_layer_spec s = small_spec();
  s.num_value_heads = 4;
  LayerModel m = conformance::layer_model(s, 4);
  write_file(folder.file("m.safetensors"), {{kPrefix, &m}});
  EXPECT_EQ(Checkpoint(folder.path()).layers()[0].spec.num_value_heads, 4);
  *m.find("A_log") = Tensor::full(KDA_FP32, {2}, 0);
  write_file(folder.file("m.safetensors"), {{kPrefix, &m}});
  expect_refused(folder.path(), {"A_log", "4", "2"});
  s.num_heads = 5;
  s.num_value_heads = 12;
  std::string message;
  m = conformance::layer_model(s, 4);
  EXPECT_EQ(conformance::pack(m, conformance::cpu_context(), KDA_FP32, nullptr, message), nullptr);
  EXPECT_NE(message.find("multiple of num_heads = 5, got 12"), std::string::npos) << message;
}

TEST(FieldCases, F62_F63_BoundsAndHeadSizesOfACheckpoint) {
  Folder folder;
  kda_layer_spec s = small_spec();
  s.key_dim = 60;
  s.value_dim = 100;
  const LayerModel m = conformance::layer_model(s, 5);
  write_file(folder.file("m.safetensors"), {{kPrefix, &m}});
  EXPECT_EQ(Checkpoint(folder.path()).layers()[0].spec.value_dim, 100);
  EXPECT_EQ(Checkpoint(folder.path()).layers()[0].spec.gate_family, KDA_GATE_SOFTPLUS);  // never a silent -5
  for (const std::string bound : {"0", "1e999", "5"}) {
    folder.text("config.json", "{\"lower_bound\":" + bound + "}");
    expect_refused(folder.path(), {"config.json"});
  }
  folder.text("config.json", "{\"lower_bound\":-7}");
  const Checkpoint c(folder.path());
  EXPECT_EQ(c.layers()[0].spec.lower_bound, -7);
  const Context context(1);
  auto options = conformance::sized<kda_layer_load_options>();
  options.lower_bound = -5;
  EXPECT_THROW(LayerWeights(context, c, 0, options), Error);  // the config says -7
  options.lower_bound = 0;
  const LayerWeights w(context, c, 0, options);
  auto d = make<kda_layer_desc>();
  d.layer = w.spec();
  d.max_tokens = d.max_sequences = 1;
  d.prefill_backend = "fused";  // there is none on the CPU: refused by name, never replaced
  try {
    const kda::Plan plan(context, d);
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), KDA_UNSUPPORTED);
  }
}

}  // namespace kda::conformance::test

// Checkpoints that were put together wrongly: each of their tensors in turn, shards that do not fit one another,
// texts that no reader may follow to their end. One error that names file and tensor, before any weight is packed
// (spec L-1, L-2, L-11).
#include <unistd.h>

#include "support.h"

namespace kda::conformance::test {
namespace {

constexpr char kPrefix[] = "model.layers.0.self_attn.";

class MalformedTest : public testing::Test {
 protected:
  void write(const LayerModel& model, const std::string& name = "model.safetensors") {
    write_file(folder_.file(name), {{kPrefix, &model}});
  }
  // The model's tensors in two files, a.safetensors and b.safetensors.
  void write_halves(const LayerModel& model) {
    LayerModel a = model, b = model;
    a.tensors.resize(6);
    b.tensors.erase(b.tensors.begin(), b.tensors.begin() + 6);
    write(a, "a.safetensors");
    write(b, "b.safetensors");
  }
  // An index that says where each tensor of write_halves lies; `more` is put behind.
  void write_index(const LayerModel& model, const std::string& more = "") {
    std::string map;
    for (size_t i = 0; i < model.tensors.size(); ++i) {
      map += (i == 0 ? "\"" : ",\"") + (kPrefix + model.tensors[i].first) + "\":\"" + (i < 6 ? "a" : "b") +
             ".safetensors\"";
    }
    folder_.text("model.safetensors.index.json", "{\"weight_map\":{" + map + more + "}}");
  }
  Folder folder_;
  LayerModel models_[2] = {conformance::layer_model(small_spec(), 1),
                           conformance::layer_model(small_spec(KDA_OUTPUT_GATE_FULL_RANK), 2)};
};

conformance::Shape one_more(conformance::Shape shape, size_t dim) {
  ++shape[dim];
  return shape;
}

}  // namespace

TEST_F(MalformedTest, L02_EveryTensorMissing) {
  for (const LayerModel& whole : models_) {
    for (const auto& [name, tensor] : whole.tensors) {
      LayerModel m = whole;
      remove(m, name);
      write(m);
      // Without g_proj there is no output gate, without A_log no layer; the messages say so.
      expect_refused(folder_.path(), {folder_.path(), name == "g_proj.weight" ? "g_proj.weight" : name, "got n"});
    }
  }
}

TEST_F(MalformedTest, L01_L02_EveryTensorOfAnotherCount) {
  // Without a config sizes follow from the tensors: the one that is named may be another that no longer fits. With it
  // the wrong one is.
  const std::string sizes =
      R"({"hidden_size":48,"num_v_heads":2,"linear_attn_config":{"num_heads":2,"head_dim":32,"short_conv_kernel_size":4}})";
  for (const std::string& config : {std::string("{}"), sizes}) {
    folder_.text("config.json", config);
    for (const LayerModel& whole : models_) {
      for (const auto& [name, tensor] : whole.tensors) {
        for (size_t dim = 0; dim < tensor.shape().size(); ++dim) {
          LayerModel m = whole;
          *m.find(name) = Tensor::full(tensor.dtype(), one_more(tensor.shape(), dim), 1);
          write(m);
          SCOPED_TRACE(name);
          const bool rank = name.find("_a_proj") != std::string::npos || name.find("_b_proj") != std::string::npos;
          const bool derived = config == "{}" || name == "o_norm.weight" || rank;
          expect_refused(folder_.path(),
                         {"model.safetensors", derived ? kPrefix : "tensor '" + (kPrefix + name) + "'"});
        }
      }
    }
  }
}

TEST_F(MalformedTest, L02_EveryTensorOfAnotherElementType) {
  for (const LayerModel& whole : models_) {
    for (const auto& [name, tensor] : whole.tensors) {
      LayerModel m = whole;
      *m.find(name) = tensor.copy(KDA_FP16);
      write(m);
      expect_refused(folder_.path(), {"model.safetensors", name, "fp16", "bf16 or fp32"}, KDA_UNSUPPORTED);
    }
  }
}

TEST_F(MalformedTest, L11_ABiasOfTheConvolutionComesWhole) {
  const char* const parts[] = {"q_conv1d.bias", "k_conv1d.bias", "v_conv1d.bias"};
  // One part's alone, and one part's missing.
  for (const char* name : parts) {
    LayerModel m = models_[0];
    m.tensors.emplace_back(name, Tensor::full(KDA_BF16, {64}, 0));
    write(m);
    expect_refused(folder_.path(), {"model.safetensors", kPrefix + std::string(name), "beside it", "got none"});
    m = models_[0];
    for (const char* other : parts) {
      if (other != name) m.tensors.emplace_back(other, Tensor::full(KDA_BF16, {64}, 0));
    }
    write(m);
    expect_refused(folder_.path(), {"model.safetensors", "'" + std::string(name) + "' beside it", "got none"});
  }
  // Of another size, packed and beside parts, and without a short convolution.
  for (const char* name : {"qkv_conv1d.bias", "conv1d.bias"}) {
    LayerModel m = models_[0];
    m.tensors.emplace_back(name, Tensor::full(KDA_BF16, {191}, 0));
    write(m);
    expect_refused(folder_.path(), {"model.safetensors", kPrefix + std::string(name), "192", "191"});
    m.tensors.back().second = Tensor::full(KDA_BF16, {192}, 0);
    write(m);
    EXPECT_EQ(kda::Checkpoint(folder_.path()).layers()[0].spec.conv_bias, 1);
    m.tensors.emplace_back(parts[1], Tensor::full(KDA_BF16, {64}, 0));
    write(m);
    expect_refused(folder_.path(), {"model.safetensors", kPrefix + std::string(parts[1]), "another tensor"});
  }
}

TEST_F(MalformedTest, L02_ShardsThatDoNotFitOneAnother) {
  const LayerModel& m = models_[0];
  write_halves(m);
  EXPECT_EQ(kda::Checkpoint(folder_.path()).layers().size(), 1u);
  // A tensor in both shards, listed once or without an index.
  LayerModel b = m;
  b.tensors.erase(b.tensors.begin(), b.tensors.begin() + 5);
  write(b, "b.safetensors");
  const std::string twice = kPrefix + m.tensors[5].first;
  expect_refused(folder_.path(), {"a.safetensors", "b.safetensors", twice, "once"});
  write_index(m);
  expect_refused(folder_.path(), {"a.safetensors", "b.safetensors", twice, "once"});
  // One name for two shards.
  write_halves(m);
  write_index(m, ",\"" + twice + "\":\"b.safetensors\"");
  expect_refused(folder_.path(), {"index.json", twice, "twice"});
  // Shards of two element types.
  LayerModel mixed = m;
  const std::string odd = "k_proj.weight";
  *mixed.find(odd) = mixed.find(odd)->copy(KDA_FP32);
  write_halves(mixed);
  write_index(m);
  expect_refused(folder_.path(), {".safetensors", "proj.weight", "wanted dtype", "bf16", "fp32"});
  // A shard that ends early, and one that is missing.
  write_halves(m);
  fs::resize_file(folder_.file("b.safetensors"), fs::file_size(folder_.file("b.safetensors")) - 3);
  expect_refused(folder_.path(), {"b.safetensors", "tensor '"});
  fs::remove(folder_.file("b.safetensors"));
  expect_refused(folder_.path(), {"b.safetensors", "index.json", kPrefix}, KDA_NOT_FOUND);
}

TEST_F(MalformedTest, L02_ShardsOfLayersOfTwoElementTypes) {
  LayerModel wide = models_[0];
  for (auto& [name, tensor] : wide.tensors) tensor = tensor.copy(KDA_FP32);
  write_file(folder_.file("a.safetensors"), {{layer_prefix(0), &models_[0]}});
  write_file(folder_.file("b.safetensors"), {{layer_prefix(1), &wide}});
  expect_refused(folder_.path(), {"b.safetensors", "a.safetensors", "layers.1.", "wanted dtype bf16", "fp32"});
}

TEST_F(MalformedTest, G10_SizesWhoseProductsDoNotFit) {
  write(models_[0]);
  folder_.text("config.json", R"({"num_v_heads":2147483647,"hidden_size":2147483647})");
  expect_refused(folder_.path(), {folder_.path(), "self_attn."});
  folder_.text("config.json", R"({"linear_num_heads":2147483647,"linear_head_dim":2147483647})");
  expect_refused(folder_.path(), {folder_.path(), "self_attn."});
}

TEST_F(MalformedTest, TextsThatNoReaderMayFollowToTheirEnd) {
  write(models_[0]);
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  for (const char* key :
       {"hidden_size", "lower_bound", "kda_layers", "layer_types", "model_type", "use_short_conv"}) {
    folder_.text("config.json", "{\"" + std::string(key) + "\":" + deep + "}");
    const std::string message = refusal(folder_.path());
    EXPECT_LT(message.size(), 1000u) << key;
  }
  folder_.text("config.json", R"({"lower_bound":-5,"lower_bound":-4})");
  expect_refused(folder_.path(), {"config.json", "lower_bound", "twice"});
  fs::remove(folder_.file("config.json"));
  folder_.text("model.safetensors.index.json", "{\"weight_map\":{\"x\":" + deep + "}}");
  expect_refused(folder_.path(), {"index.json", "'x'"});
}

}  // namespace kda::conformance::test

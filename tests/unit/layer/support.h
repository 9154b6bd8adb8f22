// Checkpoints on disk for the loader's tests, from the conformance library's seeded models.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <kda/kda.hpp>
#include <string>
#include <vector>

#include "base/safetensors.h"
#include "conformance/layer.h"

namespace kda::conformance::test {

namespace fs = std::filesystem;
using conformance::LayerModel;
using conformance::Tensor;

// A fresh folder, removed at the end.
class Folder {
 public:
  Folder()
      : path_(fs::path(testing::TempDir()) /
              ("kda_layer_" + std::to_string(::getpid()) + "_" + std::to_string(next()++))) {
    fs::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }
  void text(const std::string& name, const std::string& content) const { std::ofstream(file(name)) << content; }

 private:
  static int& next() {
    static int n = 0;
    return n;
  }
  fs::path path_;
};

// K = V = 32, H = HV = 2, D = 48; low-rank output gate, softplus gate.
inline kda_layer_spec small_spec(kda_output_gate gate = KDA_OUTPUT_GATE_LOW_RANK) {
  kda_layer_spec s{};
  s.hidden = 48;
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

using Layers = std::vector<std::pair<std::string, const LayerModel*>>;  // prefix, model

inline void write_file(const std::string& path, const Layers& layers) {
  std::vector<SafetensorsItem> items;
  for (const auto& [prefix, model] : layers) {
    for (const auto& [name, tensor] : model->tensors) items.push_back({prefix + name, tensor.view()});
  }
  const Status status = write_safetensors(path, items);
  ASSERT_TRUE(status.ok()) << status.message();
}

inline std::string layer_prefix(int n, const std::string& model = "model.") {
  return model + "layers." + std::to_string(n) + ".self_attn.";
}

// The message of a refused checkpoint; "" if it opens.
inline std::string refusal(const std::string& path, kda_status wanted = KDA_INVALID_ARGUMENT) {
  try {
    const Checkpoint c(path);
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), wanted) << e.what();
    return e.what();
  }
  return "";
}

inline void expect_refused(const std::string& path, const std::vector<std::string>& parts,
                           kda_status wanted = KDA_INVALID_ARGUMENT) {
  const std::string message = refusal(path, wanted);
  EXPECT_NE(message, "") << "accepted";
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
}

inline void remove(LayerModel& m, const std::string& name) {
  std::erase_if(m.tensors, [&](const auto& t) { return t.first == name; });
}
inline void rename(LayerModel& m, const std::string& from, const std::string& to) {
  for (auto& t : m.tensors) {
    if (t.first == from) t.first = to;
  }
}

// Rows of several 2-d tensors behind one another.
inline Tensor stacked(const std::vector<const Tensor*>& parts, int64_t zero_rows = 0) {
  std::vector<double> all;
  int64_t rows = zero_rows;
  for (const Tensor* t : parts) {
    const std::vector<double> x = t->values();
    all.insert(all.end(), x.begin(), x.end());
    rows += t->shape()[0];
  }
  conformance::Shape shape = parts[0]->shape();
  shape[0] = rows;
  all.resize(static_cast<size_t>(conformance::product(shape)), 0.0);
  return Tensor::of(parts[0]->dtype(), shape, all);
}

// `rows` of one fresh sequence through a layer as one prefill; fp32 unless said. The outputs' values.
using conformance::LayerRun;
inline LayerRun run_once(const kda_layer_weights* w, const char* projection, kda_dtype io, int64_t rows,
                         kda_context* context = conformance::cpu_context()) {
  return conformance::prefill_layer(w, context, nullptr, projection, io, rows);
}

}  // namespace kda::conformance::test

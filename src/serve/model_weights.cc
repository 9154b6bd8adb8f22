#include "serve/model_weights.h"

#include <cmath>

#include "serve/convert.h"
#include "serve/hash.h"
#include "serve/parallel.h"
#include "serve/weights.h"

namespace kda::serve {
namespace {

enum MatrixTag : uint64_t { kWq, kWk, kWv, kWb, kWfa, kWfb, kWga, kWgb, kWg, kWo };

// One weight of the rank, in bf16. Rows (or, for o_proj, columns) are the rank's share of the whole matrix, whose
// numbers they are.
struct Matrix {
  const char* name;
  MatrixTag tag;
  int64_t rows, cols;
  int64_t first_row = 0, first_col = 0;  // of the share in the whole
  int64_t whole_cols = 0;                // 0 = cols
};

// Four numbers of 16 random bits each from one hash.
void fill(const Matrix& m, uint64_t stream, const kda_context* context, uint16_t* out) {
  const int64_t width = m.whole_cols > 0 ? m.whole_cols : m.cols;
  const float scale = static_cast<float>(std::sqrt(3.0 / static_cast<double>(width)) / 32768.0);
  parallel_ranges(context, m.rows, 64, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const uint64_t row = mix(stream, static_cast<uint64_t>(m.first_row + r));
      uint64_t bits = 0;
      for (int64_t c = 0; c < m.cols; ++c) {
        const auto column = static_cast<uint64_t>(m.first_col + c);
        if (c == 0 || column % 4 == 0) bits = mix(row + column / 4);
        const auto piece = static_cast<int32_t>((bits >> (16 * (column % 4))) & 0xffff);
        out[r * m.cols + c] = bf16_bits((static_cast<float>(piece) - 32767.5f) * scale);
      }
    }
  });
}

std::vector<Matrix> matrices(const kda_layer_spec& s, int64_t first_head, int64_t total_heads) {
  const int64_t keys = s.num_heads * s.key_dim, values = s.num_value_heads * s.value_dim;
  const int64_t key = first_head * s.key_dim, value = first_head * s.value_dim;
  std::vector<Matrix> list = {{"q_proj.weight", kWq, keys, s.hidden, key},
                              {"k_proj.weight", kWk, keys, s.hidden, key},
                              {"v_proj.weight", kWv, values, s.hidden, value},
                              {"b_proj.weight", kWb, s.num_value_heads, s.hidden, first_head},
                              {"f_a_proj.weight", kWfa, s.gate_rank, s.hidden},
                              {"f_b_proj.weight", kWfb, keys, s.gate_rank, key},
                              {"o_proj.weight", kWo, s.hidden, values, 0, value, total_heads * s.value_dim}};
  if (s.output_gate == KDA_OUTPUT_GATE_LOW_RANK) {
    list.push_back({"g_a_proj.weight", kWga, s.output_gate_rank, s.hidden});
    list.push_back({"g_b_proj.weight", kWgb, values, s.output_gate_rank, value});
  } else {
    list.push_back({"g_proj.weight", kWg, values, s.hidden, value});
  }
  return list;
}

kda_layer_load_options load_options(const Model& model, const char* projection) {
  kda_layer_load_options o{};
  o.struct_size = sizeof o;
  o.io_dtype = model.io_dtype;
  o.projection = projection;
  return o;
}

}  // namespace

ModelWeights ModelWeights::seeded(const Model& model, uint64_t seed) {
  ModelWeights w;
  w.model_ = model;
  w.seed_ = seed;
  return w;
}

Result<ModelWeights> ModelWeights::open(const std::string& path, const ModelOptions& options, Model& model) {
  kda_checkpoint* checkpoint = nullptr;
  KDA_SERVE_TRY(from_kda(kda_checkpoint_open(path.c_str(), &checkpoint)));
  ModelWeights w;
  w.checkpoint_.reset(checkpoint);
  kda_layer_spec whole{};
  int32_t layers = 0;
  kda_layer_spec s{};
  for (int64_t number = 0; kda_checkpoint_layer(checkpoint, static_cast<size_t>(layers), &number, &s) == KDA_OK;
       ++layers) {
    if (layers == 0) whole = s;
    if (s.hidden != whole.hidden || s.num_heads != whole.num_heads || s.num_value_heads != whole.num_value_heads ||
        s.key_dim != whole.key_dim || s.value_dim != whole.value_dim || s.gate_rank != whole.gate_rank ||
        s.output_gate_rank != whole.output_gate_rank || s.conv_width != whole.conv_width ||
        s.conv_bias != whole.conv_bias) {
      return invalid_argument("--checkpoint: wanted KDA layers of one shape, got another in layer {} of {}", number,
                              path);
    }
  }
  if (options.layers > layers) {
    return invalid_argument("--layers: wanted at most the {} KDA layers of {}, got {}", layers, path, options.layers);
  }
  auto made = model_of(options, path, whole, layers);
  if (!made.ok()) return made.status();
  w.model_ = model = made.value();
  return w;
}

Result<LayerWeightsHandle> ModelWeights::load(kda_context* context, int32_t layer, const char* projection,
                                              const kda_context* host) const {
  kda_layer_load_options options = load_options(model_, projection);
  if (checkpoint_ == nullptr) return generate(context, layer, options, host);
  options.ranks = static_cast<int32_t>(model_.total_heads / model_.heads);
  kda_layer_weights* weights = nullptr;
  KDA_SERVE_TRY(
      from_kda(kda_layer_weights_load(context, checkpoint_.get(), static_cast<size_t>(layer), &options, &weights)));
  return LayerWeightsHandle(weights);
}

Result<LayerWeightsHandle> ModelWeights::generate(kda_context* context, int32_t layer,
                                                  const kda_layer_load_options& options,
                                                  const kda_context* host) const {
  const kda_layer_spec& s = model_.spec;
  const LayerWeights small = seeded_layer(model_, seed_, layer);
  std::vector<kda_named_tensor> named;
  std::vector<Buffer> memory;
  for (const Matrix& m : matrices(s, model_.first_head, model_.total_heads)) {
    auto buffer = Buffer::allocate(m.rows * m.cols * 2);
    if (!buffer.ok()) return buffer.status();
    auto* data = reinterpret_cast<uint16_t*>(buffer.value().data());
    fill(m, mix(uint64_t{kTagMatrix}, seed_, layer, m.tag), host, data);
    named.push_back({m.name, view(data, KDA_BF16, {m.rows, m.cols})});
    memory.push_back(std::move(buffer.value()));
  }
  const int64_t W = s.conv_width, keys = s.num_heads * s.key_dim, values = s.num_value_heads * s.value_dim;
  named.push_back({"q_conv1d.weight", view(small.conv.data(), KDA_FP32, {keys, W})});
  named.push_back({"k_conv1d.weight", view(small.conv.data() + keys * W, KDA_FP32, {keys, W})});
  named.push_back({"v_conv1d.weight", view(small.conv.data() + 2 * keys * W, KDA_FP32, {values, W})});
  named.push_back({"A_log", view(small.A_log.data(), KDA_FP32, {s.num_value_heads})});
  named.push_back({"dt_bias", view(small.dt_bias.data(), KDA_FP32, {s.num_value_heads, s.key_dim})});
  named.push_back({"o_norm.weight", view(small.norm.data(), KDA_FP32, {s.value_dim})});
  kda_layer_weights* weights = nullptr;
  KDA_SERVE_TRY(from_kda(kda_layer_weights_create(context, &s, named.data(), named.size(), &options, &weights)));
  return LayerWeightsHandle(weights);
}

}  // namespace kda::serve

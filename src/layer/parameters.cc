#include "layer/parameters.h"

#include "base/tensor.h"

namespace kda::layer {
namespace {

kda_tensor matrix(const MatrixView& m) {
  kda_tensor t = make_tensor(const_cast<void*>(m.data), m.dtype, {m.rows, m.cols});
  t.strides[0] = m.stride;
  return t;
}

kda_tensor vector(const VectorView& v, std::initializer_list<int64_t> shape) {
  return make_tensor(const_cast<void*>(v.data), v.dtype, shape);
}

}  // namespace

Result<kda_tensor> parameter(const LayerTensors& t, const kda_layer_spec& s, const std::string& name) {
  const struct {
    const char* name;
    const MatrixView& view;
  } matrices[] = {{"q_proj.weight", t.q},     {"k_proj.weight", t.k},     {"v_proj.weight", t.v},
                  {"b_proj.weight", t.b},     {"f_a_proj.weight", t.f_a}, {"f_b_proj.weight", t.f_b},
                  {"g_a_proj.weight", t.g_a}, {"g_b_proj.weight", t.g_b}, {"g_proj.weight", t.g},
                  {"o_proj.weight", t.o}};
  for (const auto& m : matrices) {
    if (name == m.name && m.view.present()) return matrix(m.view);
  }
  const struct {
    const char* name;
    const VectorView& view;
    kda_tensor tensor;
  } vectors[] = {{"q_conv1d.weight", t.conv[0], vector(t.conv[0], {keys(s), s.conv_width})},
                 {"k_conv1d.weight", t.conv[1], vector(t.conv[1], {keys(s), s.conv_width})},
                 {"v_conv1d.weight", t.conv[2], vector(t.conv[2], {values(s), s.conv_width})},
                 {"q_conv1d.bias", t.conv_bias[0], vector(t.conv_bias[0], {keys(s)})},
                 {"k_conv1d.bias", t.conv_bias[1], vector(t.conv_bias[1], {keys(s)})},
                 {"v_conv1d.bias", t.conv_bias[2], vector(t.conv_bias[2], {values(s)})},
                 {"A_log", t.A_log, vector(t.A_log, {s.num_value_heads})},
                 {"dt_bias", t.dt_bias, vector(t.dt_bias, {s.num_value_heads, s.key_dim})},
                 {"o_norm.weight", t.norm, vector(t.norm, {s.value_dim})},
                 {"g_b_proj.bias", t.g_bias, vector(t.g_bias, {values(s)})}};
  for (const auto& v : vectors) {
    if (name == v.name && v.view.present()) return v.tensor;
  }
  return not_found("parameter: this layer has no '", name, "'");
}

}  // namespace kda::layer

#include "layer/weights.h"

#include "base/tensor.h"

namespace kda::layer {
namespace {

// Rows [first, first + count) of a matrix, or columns.
MatrixView rows(MatrixView m, int64_t first, int64_t count) {
  if (!m.present()) return m;
  m.data = static_cast<const char*>(m.data) + first * m.stride * static_cast<int64_t>(dtype_size(m.dtype));
  m.rows = count;
  return m;
}
MatrixView columns(MatrixView m, int64_t first, int64_t count) {
  m.data = static_cast<const char*>(m.data) + first * static_cast<int64_t>(dtype_size(m.dtype));
  m.cols = count;
  return m;
}
VectorView part(VectorView v, int64_t first, int64_t count) {
  if (!v.present()) return v;
  v.data = static_cast<const char*>(v.data) + first * static_cast<int64_t>(dtype_size(v.dtype));
  v.count = count;
  return v;
}

std::vector<float> widened(const VectorView& v) {
  std::vector<float> values(static_cast<size_t>(v.count));
  for (int64_t i = 0; i < v.count; ++i) values[static_cast<size_t>(i)] = v.value(i);
  return values;
}

// This rank's share of the whole layer (spec L-1's column "shard"); `s` describes the share.
LayerTensors cut(const LayerTensors& whole, const kda_layer_spec& s, int64_t rank) {
  LayerTensors t = whole;
  const int64_t HV = s.num_value_heads, W = s.conv_width;
  t.q = rows(t.q, rank * keys(s), keys(s));
  t.k = rows(t.k, rank * keys(s), keys(s));
  t.v = rows(t.v, rank * values(s), values(s));
  t.b = rows(t.b, rank * HV, HV);
  t.f_b = rows(t.f_b, rank * gates(s), gates(s));
  t.g_b = rows(t.g_b, rank * values(s), values(s));
  t.g = rows(t.g, rank * values(s), values(s));
  t.o = columns(t.o, rank * values(s), values(s));
  const int64_t channel[3] = {keys(s), keys(s), values(s)};
  for (int i = 0; i < 3; ++i) t.conv[i] = part(t.conv[i], rank * channel[i] * W, channel[i] * W);
  t.A_log = part(t.A_log, rank * HV, HV);
  t.dt_bias = part(t.dt_bias, rank * gates(s), gates(s));
  t.g_bias = part(t.g_bias, rank * values(s), values(s));
  return t;
}

// Taps [channels, W]; without short convolution [0, 1], which passes the newest input on as it is (spec L-11).
std::vector<float> taps(const LayerTensors& t, const kda_layer_spec& s) {
  std::vector<float> all;
  for (const VectorView& v : t.conv) {
    const std::vector<float> values = widened(v);
    all.insert(all.end(), values.begin(), values.end());
  }
  for (int64_t c = 0; !t.conv[0].present() && c < channels(s); ++c) all.insert(all.end(), {0.0f, 1.0f});
  return all;
}

}  // namespace

Result<std::unique_ptr<Weights>> Weights::create(const Context& context, const kda_layer_spec& spec,
                                                 const LayerTensors& tensors, const LoadOptions& options,
                                                 const std::string& origin) {
  auto own = share(spec, options.ranks, options.rank);
  if (!own.ok()) return own.status().with_context(origin);
  auto choice = select_projection(context, options.io, options.projection);
  if (!choice.ok()) return choice.status().with_context(origin);
  std::unique_ptr<Weights> w(new Weights());
  w->context_ = &context;
  w->spec_ = own.value();
  w->io_ = options.io;
  w->backend_ = choice.value().backend;
  const LayerTensors mine = cut(tensors, w->spec_, options.rank);
  w->A_log_ = widened(mine.A_log);
  w->dt_bias_ = widened(mine.dt_bias);
  w->norm_ = widened(mine.norm);
  w->conv_ = taps(mine, w->spec_);
  KDA_RETURN_IF_ERROR(w->pack(mine, widened(mine.g_bias)).with_context(origin));
  return w;
}

Status Weights::pack(const LayerTensors& t, const std::vector<float>& g_bias) {
  const bool low = spec_.output_gate == KDA_OUTPUT_GATE_LOW_RANK;
  const auto make = [&](std::initializer_list<ProjectionPart> parts, std::unique_ptr<PackedMatrix>& to) -> Status {
    auto packed = backend_->pack(*context_, io_, {parts.begin(), parts.size()});
    if (!packed.ok()) return packed.status();
    to = std::move(packed.value());
    return {};
  };
  KDA_RETURN_IF_ERROR(make({{t.q}, {t.k}, {t.v}, {t.b}, {t.f_a}, {low ? t.g_a : t.g}}, in_));
  KDA_RETURN_IF_ERROR(make({{t.f_b}}, f_b_));
  if (low) KDA_RETURN_IF_ERROR(make({{t.g_b, g_bias.empty() ? nullptr : g_bias.data()}}, g_b_));
  return make({{t.o}}, o_);
}

int64_t Weights::bytes() const {
  int64_t total = 0;
  for (const auto* m : {&in_, &f_b_, &g_b_, &o_}) total += *m ? (*m)->bytes() : 0;
  for (const auto* v : {&A_log_, &dt_bias_, &conv_, &norm_}) total += static_cast<int64_t>(v->size() * sizeof(float));
  return total;
}

Result<kda_tensor> Weights::parameter(const std::string& name) const {
  const auto view = [](const std::vector<float>& v, std::initializer_list<int64_t> shape) {
    return make_tensor(const_cast<float*>(v.data()), KDA_FP32, shape);
  };
  if (name == "A_log") return view(A_log_, {spec_.num_value_heads});
  if (name == "dt_bias") return view(dt_bias_, {spec_.num_value_heads, spec_.key_dim});
  if (name == "conv") return view(conv_, {channels(spec_), spec_.conv_width});
  if (name == "norm") return view(norm_, {spec_.value_dim});
  return not_found("parameter: wanted A_log, dt_bias, conv or norm, got \"", name, "\"");
}

}  // namespace kda::layer

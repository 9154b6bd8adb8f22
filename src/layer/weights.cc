#include "layer/weights.h"

#include "base/checked.h"
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
  for (int i = 0; i < 3; ++i) {
    t.conv[i] = part(t.conv[i], rank * channel[i] * W, channel[i] * W);
    t.conv_bias[i] = part(t.conv_bias[i], rank * channel[i], channel[i]);
  }
  t.A_log = part(t.A_log, rank * HV, HV);
  t.dt_bias = part(t.dt_bias, rank * gates(s), gates(s));
  t.g_bias = part(t.g_bias, rank * values(s), values(s));
  return t;
}

// Of q, k and v behind one another.
std::vector<float> joined(const VectorView (&parts)[3]) {
  std::vector<float> all;
  for (const VectorView& v : parts) {
    const std::vector<float> values = widened(v);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

// Taps [channels, W]; without short convolution [0, 1], which passes the newest input on as it is (spec L-11).
std::vector<float> taps(const LayerTensors& t, const kda_layer_spec& s) {
  std::vector<float> all = joined(t.conv);
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
  KDA_RETURN_IF_ERROR(w->upload(mine).with_context(origin));
  KDA_RETURN_IF_ERROR(w->pack(mine, widened(mine.g_bias)).with_context(origin));
  return w;
}

Status Weights::pack(const LayerTensors& t, const std::vector<float>& g_bias) {
  const bool low = spec_.output_gate == KDA_OUTPUT_GATE_LOW_RANK;
  const auto make = [&](std::initializer_list<ProjectionPart> parts, int64_t width,
                        std::unique_ptr<PackedMatrix>& to) -> Status {
    auto packed = backend_->pack(*context_, io_, {parts.begin(), parts.size()}, width);
    if (!packed.ok()) return packed.status();
    to = std::move(packed.value());
    return {};
  };
  const InRow row = in_row(spec_);
  KDA_RETURN_IF_ERROR(make({{t.q, nullptr, 0},
                            {t.k, nullptr, keys(spec_)},
                            {t.v, nullptr, 2 * keys(spec_)},
                            {low ? t.g_a : t.g, nullptr, row.gate},
                            {t.f_a, nullptr, row.f_a},
                            {t.b, nullptr, row.b}},
                           row.width, in_));
  KDA_RETURN_IF_ERROR(make({{t.f_b}}, gates(spec_), f_b_));
  if (low) KDA_RETURN_IF_ERROR(make({{t.g_b, g_bias.empty() ? nullptr : g_bias.data()}}, values(spec_), g_b_));
  return make({{t.o}}, spec_.hidden, o_);
}

// The small parameters, widened, each from a multiple of 256 bytes on.
Status Weights::upload(const LayerTensors& t) {
  struct Part {
    std::vector<float> values;
    kda_tensor& view;
    std::initializer_list<int64_t> shape;
  };
  const Part parts[] = {
      {widened(t.A_log), parameters_.A_log, {spec_.num_value_heads}},
      {widened(t.dt_bias), parameters_.dt_bias, {spec_.num_value_heads, spec_.key_dim}},
      {taps(t, spec_), parameters_.conv, {channels(spec_), spec_.conv_width}},
      {widened(t.norm), parameters_.norm, {spec_.value_dim}},
      {joined(t.conv_bias), parameters_.conv_bias, {channels(spec_)}},
  };
  constexpr size_t kFloats = 64;
  std::vector<float> all;
  for (const Part& part : parts) {
    all.insert(all.end(), part.values.begin(), part.values.end());
    all.resize(round_up(all.size(), kFloats));
  }
  auto block = DeviceBlock::allocate(*context_, static_cast<int64_t>(all.size() * sizeof(float)));
  if (!block.ok()) return block.status();
  small_ = std::move(block.value());
  const CreationStream stream(*context_);
  KDA_RETURN_IF_ERROR(stream.status());
  KDA_RETURN_IF_ERROR(
      context_->runtime->copy(small_.data(), all.data(), static_cast<size_t>(small_.bytes()), stream.get()));
  KDA_RETURN_IF_ERROR(stream.synchronize());
  auto* at = reinterpret_cast<float*>(small_.data());
  for (const Part& part : parts) {
    if (!part.values.empty()) part.view = make_tensor(at, KDA_FP32, part.shape, context_->device);
    at += round_up(part.values.size(), kFloats);
  }
  return {};
}

int64_t Weights::bytes() const {
  int64_t total = small_.bytes();
  for (const auto* m : {&in_, &f_b_, &g_b_, &o_}) total += *m ? (*m)->bytes() : 0;
  return total;
}

Result<kda_tensor> Weights::parameter(const std::string& name) const {
  if (name == "A_log") return parameters_.A_log;
  if (name == "dt_bias") return parameters_.dt_bias;
  if (name == "conv") return parameters_.conv;
  if (name == "norm") return parameters_.norm;
  if (name == "conv_bias" && present(parameters_.conv_bias)) return parameters_.conv_bias;
  return not_found("parameter: wanted A_log, dt_bias, conv, norm",
                   present(parameters_.conv_bias) ? ", conv_bias" : "", ", got \"", name, "\"");
}

}  // namespace kda::layer

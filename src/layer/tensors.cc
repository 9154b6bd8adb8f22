#include "layer/tensors.h"

#include <algorithm>
#include <initializer_list>

#include "base/checked.h"
#include "base/half.h"
#include "base/tensor.h"

namespace kda::layer {
namespace {

// FLA's names (spec L-11).
std::string canonical(const std::string& name) {
  static const std::map<std::string, std::string> kAliases = {
      {"f_proj.0.weight", "f_a_proj.weight"},
      {"f_proj.1.weight", "f_b_proj.weight"},
      {"g_proj.0.weight", "g_a_proj.weight"},
      {"g_proj.1.weight", "g_b_proj.weight"},
      {"g_proj.1.bias", "g_b_proj.bias"},
      {"in_proj_qkvbfg_a.weight", "fused_qkvbfg_a_proj.weight"},
      {"in_proj_qkvgfab", "in_proj_qkvgfab.weight"},
      {"conv1d.weight", "qkv_conv1d.weight"},
      {"conv1d.bias", "qkv_conv1d.bias"}};
  const auto at = kAliases.find(name);
  return at == kAliases.end() ? name : at->second;
}

constexpr const char* kKnown[] = {"q_proj.weight",
                                  "k_proj.weight",
                                  "v_proj.weight",
                                  "b_proj.weight",
                                  "f_a_proj.weight",
                                  "f_b_proj.weight",
                                  "g_a_proj.weight",
                                  "g_b_proj.weight",
                                  "g_b_proj.bias",
                                  "g_proj.weight",
                                  "o_proj.weight",
                                  "o_norm.weight",
                                  "A_log",
                                  "dt_bias",
                                  "q_conv1d.weight",
                                  "k_conv1d.weight",
                                  "v_conv1d.weight",
                                  "qkv_conv1d.weight",
                                  "q_conv1d.bias",
                                  "k_conv1d.bias",
                                  "v_conv1d.bias",
                                  "qkv_conv1d.bias",
                                  "in_proj_qkvgfab.weight",
                                  "fused_qkvbfg_a_proj.weight",
                                  "fused_fg_b_proj.weight"};

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += str_cat(i == 0 ? "" : ", ", shape[i]);
  return text + "]";
}

int64_t element_size(kda_dtype dtype) { return static_cast<int64_t>(dtype_size(dtype)); }

const void* at(const TensorSource& t, int64_t element) {
  return t.data == nullptr ? nullptr : static_cast<const char*>(t.data) + element * element_size(t.dtype);
}

// One section of a fused tensor, or a tensor of its own.
struct Section {
  MatrixView* to;
  const char* name;  // of the parameter
  int64_t rows;
};

class Resolver {
 public:
  Resolver(const TensorMap& tensors, const kda_layer_spec& spec, const std::string& origin)
      : s_(spec), origin_(origin) {
    for (const auto& [name, source] : tensors) tensors_[canonical(name)] = &source;
  }

  Result<LayerTensors> run(bool short_conv) {
    KDA_RETURN_IF_ERROR(check_names());
    KDA_RETURN_IF_ERROR(projections());
    KDA_RETURN_IF_ERROR(output_gate());
    KDA_RETURN_IF_ERROR(convolutions(short_conv));
    KDA_RETURN_IF_ERROR(convolution_biases(short_conv));
    KDA_RETURN_IF_ERROR(parameters());
    return out_;
  }

 private:
  const TensorSource* find(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : found->second;
  }
  Status missing(const std::string& name) const {
    return invalid_argument(origin_, ": wanted a tensor '", name, "', got none");
  }
  static Status check_dtype(const TensorSource& t) {
    if (t.dtype == KDA_FP32 || t.dtype == KDA_BF16) return {};
    return unsupported(t.where, ": wanted dtype bf16 or fp32 (spec L-2), got ", dtype_name(t.dtype));
  }
  static Status wrong_count(const TensorSource& t, int64_t wanted, const std::string& as) {
    return invalid_argument(t.where, ": wanted ", wanted, " elements", as.empty() ? "" : " as " + as, ", got ",
                            t.count(), " in ", shape_text(t.shape));
  }

  Status check_names() const {
    for (const auto& [name, source] : tensors_) {
      if (std::find(std::begin(kKnown), std::end(kKnown), name) != std::end(kKnown)) {
        KDA_RETURN_IF_ERROR(check_dtype(*source));
        continue;
      }
      return invalid_argument(source->where,
                              ": not a tensor of a KDA layer (no projection but FLA's g_proj.1 has a bias, "
                              "spec L-2, L-11)");
    }
    return {};
  }

  // A tensor [rows, cols] cut into sections from the top.
  Status cut(const TensorSource& t, int64_t cols, std::initializer_list<Section> sections, int64_t padding = 0) {
    int64_t rows = padding;
    for (const Section& s : sections) rows += s.rows;
    const std::string as = shape_text({rows, cols});
    if (t.shape.size() != 2 || t.shape[0] != rows || t.shape[1] != cols) return wrong_count(t, rows * cols, as);
    int64_t first = 0;
    for (const Section& s : sections) {
      if (s.to->present()) return invalid_argument(t.where, ": holds ", s.name, ", which another tensor gives too");
      *s.to = {at(t, first * cols), t.dtype, s.rows, cols, cols};
      first += s.rows;
    }
    return {};
  }
  // A tensor of its own, required unless a fused one gave it.
  Status take(const char* name, MatrixView& to, int64_t rows, int64_t cols, bool required = true) {
    const std::string full = std::string(name) + ".weight";
    if (const TensorSource* t = find(full)) return cut(*t, cols, {{&to, name, rows}});
    return to.present() || !required ? Status() : missing(full);
  }

  Status projections() {
    LayerTensors& o = out_;
    const int64_t D = s_.hidden, r = s_.gate_rank, rg = s_.output_gate_rank;
    if (const TensorSource* t = find("in_proj_qkvgfab.weight")) KDA_RETURN_IF_ERROR(cut_qkvgfab(*t));
    if (const TensorSource* t = find("fused_qkvbfg_a_proj.weight")) {
      KDA_RETURN_IF_ERROR(cut(*t, D,
                              {{&o.q, "q_proj", keys(s_)},
                               {&o.k, "k_proj", keys(s_)},
                               {&o.v, "v_proj", values(s_)},
                               {&o.b, "b_proj", s_.num_value_heads},
                               {&o.f_a, "f_a_proj", r},
                               {&o.g_a, "g_a_proj", rg}}));
    }
    if (const TensorSource* t = find("fused_fg_b_proj.weight")) {
      if (r != rg)
        return invalid_argument(t->where, ": wanted equal ranks of f_a_proj and g_a_proj, got ", r, " and ", rg);
      KDA_RETURN_IF_ERROR(cut(*t, r, {{&o.f_b, "f_b_proj", gates(s_)}, {&o.g_b, "g_b_proj", values(s_)}}));
    }
    KDA_RETURN_IF_ERROR(take("q_proj", o.q, keys(s_), D));
    KDA_RETURN_IF_ERROR(take("k_proj", o.k, keys(s_), D));
    KDA_RETURN_IF_ERROR(take("v_proj", o.v, values(s_), D));
    KDA_RETURN_IF_ERROR(take("b_proj", o.b, s_.num_value_heads, D));
    KDA_RETURN_IF_ERROR(take("f_a_proj", o.f_a, r, D));
    KDA_RETURN_IF_ERROR(take("f_b_proj", o.f_b, gates(s_), r));
    return take("o_proj", o.o, D, values(s_));
  }

  // q, k, v, [g], f_a, b and zero rows up to a multiple of 16.
  Status cut_qkvgfab(const TensorSource& t) {
    LayerTensors& o = out_;
    const bool full = s_.output_gate == KDA_OUTPUT_GATE_FULL_RANK;
    const int64_t used = 2 * keys(s_) + (full ? 2 : 1) * values(s_) + s_.gate_rank + s_.num_value_heads;
    const int64_t padding = round_up(used, 16) - used;
    const Section g{&o.g, "g_proj", values(s_)}, q{&o.q, "q_proj", keys(s_)}, k{&o.k, "k_proj", keys(s_)},
        v{&o.v, "v_proj", values(s_)}, f_a{&o.f_a, "f_a_proj", s_.gate_rank}, b{&o.b, "b_proj", s_.num_value_heads};
    KDA_RETURN_IF_ERROR(full ? cut(t, s_.hidden, {q, k, v, g, f_a, b}, padding)
                             : cut(t, s_.hidden, {q, k, v, f_a, b}, padding));
    const VectorView rest{t.where, t.dtype, at(t, used * s_.hidden), padding * s_.hidden};
    for (int64_t i = 0; t.data != nullptr && i < rest.count; ++i) {
      if (rest.value(i) != 0)
        return invalid_argument(t.where, ": wanted zero rows from row ", used, ", got ", rest.value(i));
    }
    return {};
  }

  Status output_gate() {
    LayerTensors& o = out_;
    const bool full = o.g.present() || find("g_proj.weight") != nullptr;
    const bool low = o.g_a.present() || o.g_b.present() || find("g_a_proj.weight") != nullptr ||
                     find("g_b_proj.weight") != nullptr;
    if (full == low) {
      return invalid_argument(origin_,
                              ": wanted one output gate, 'g_proj.weight' or 'g_a_proj.weight' and "
                              "'g_b_proj.weight' (spec L-2), got ",
                              full ? "both" : "neither");
    }
    if (full != (s_.output_gate == KDA_OUTPUT_GATE_FULL_RANK)) {
      return invalid_argument(origin_, ": wanted the ", full ? "low" : "full",
                              "-rank output gate of the description, got '",
                              full ? "g_proj.weight'" : "g_a_proj.weight'");
    }
    if (full) return take("g_proj", o.g, values(s_), s_.hidden);
    KDA_RETURN_IF_ERROR(take("g_a_proj", o.g_a, s_.output_gate_rank, s_.hidden));
    KDA_RETURN_IF_ERROR(take("g_b_proj", o.g_b, values(s_), s_.output_gate_rank));
    return vector("g_b_proj.bias", o.g_bias, values(s_), /*required=*/false);
  }

  Status vector(const char* name, VectorView& to, int64_t count, bool required = true) {
    const TensorSource* t = find(name);
    if (t == nullptr) return required ? missing(name) : Status();
    if (t->count() != count) return wrong_count(*t, count, "");
    to = {t->where, t->dtype, t->data, count};
    return {};
  }

  // [channels, 1, W] or [channels, W].
  static bool is_conv(const TensorSource& t, int64_t rows, int64_t width) {
    const bool flat = t.shape.size() == 2 && t.shape[1] == width;
    return (flat || (t.shape.size() == 3 && t.shape[1] == 1 && t.shape[2] == width)) && t.shape[0] == rows;
  }

  Status convolutions(bool short_conv) {
    const int64_t W = s_.conv_width, rows[3] = {keys(s_), keys(s_), values(s_)};
    const char* names[3] = {"q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"};
    const TensorSource* packed = find("qkv_conv1d.weight");
    if (packed != nullptr && !is_conv(*packed, channels(s_), W)) {
      return wrong_count(*packed, channels(s_) * W, shape_text({channels(s_), 1, W}));
    }
    int64_t first = 0;
    for (int i = 0; i < 3; ++i) {
      const TensorSource* t = find(names[i]);
      if (t != nullptr && !short_conv)
        return invalid_argument(t->where, ": wanted no short convolution, as the config says");
      if (t != nullptr && packed != nullptr) return invalid_argument(t->where, ": another tensor gives it too");
      if (t != nullptr && !is_conv(*t, rows[i], W)) return wrong_count(*t, rows[i] * W, shape_text({rows[i], 1, W}));
      if (t == nullptr && packed == nullptr && short_conv) return missing(names[i]);
      const TensorSource* from = t != nullptr ? t : packed;
      if (from != nullptr)
        out_.conv[i] = {from->where, from->dtype, at(*from, t != nullptr ? 0 : first * W), rows[i] * W};
      first += rows[i];
    }
    return {};
  }

  // All parts have a bias, or none has (spec L-11).
  Status convolution_biases(bool short_conv) {
    const int64_t rows[3] = {keys(s_), keys(s_), values(s_)};
    const char* names[3] = {"q_conv1d.bias", "k_conv1d.bias", "v_conv1d.bias"};
    const TensorSource* packed = find("qkv_conv1d.bias");
    if (packed != nullptr && packed->count() != channels(s_)) {
      return wrong_count(*packed, channels(s_), shape_text({channels(s_)}));
    }
    const TensorSource* any = packed;
    for (const char* name : names) any = any != nullptr ? any : find(name);
    int64_t first = 0;
    for (int i = 0; i < 3; ++i) {
      const TensorSource* t = find(names[i]);
      if (t != nullptr && packed != nullptr) return invalid_argument(t->where, ": another tensor gives it too");
      const TensorSource* from = t != nullptr ? t : packed;
      if (from != nullptr && !short_conv) {
        return invalid_argument(from->where, ": wanted no short convolution, as the config says");
      }
      if (from != nullptr && s_.conv_bias == 0) {
        return invalid_argument(from->where, ": wanted no bias of the short convolution, as the description says");
      }
      if (from == nullptr && any != nullptr) {
        return invalid_argument(any->where, ": wanted a tensor '", names[i], "' beside it (spec L-11), got none");
      }
      if (from == nullptr && s_.conv_bias != 0) return missing(names[i]);
      if (t != nullptr && t->count() != rows[i]) return wrong_count(*t, rows[i], shape_text({rows[i]}));
      if (from != nullptr)
        out_.conv_bias[i] = {from->where, from->dtype, at(*from, t != nullptr ? 0 : first), rows[i]};
      first += rows[i];
    }
    return {};
  }

  Status parameters() {
    const int64_t HV = s_.num_value_heads;
    KDA_RETURN_IF_ERROR(vector("dt_bias", out_.dt_bias, gates(s_)));
    KDA_RETURN_IF_ERROR(vector("o_norm.weight", out_.norm, s_.value_dim));
    const TensorSource* t = find("A_log");
    if (t == nullptr) return missing("A_log");
    // Any shape; K3 ships zeros behind the heads (spec L-1).
    if (t->count() < HV) return wrong_count(*t, HV, "one a value head");
    out_.A_log = {t->where, t->dtype, t->data, HV};
    const VectorView rest{t->where, t->dtype, at(*t, HV), t->count() - HV};
    if (rest.count > 0 && t->shape.size() != 1) return wrong_count(*t, HV, "one a value head");
    for (int64_t i = 0; t->data != nullptr && i < rest.count; ++i) {
      if (rest.value(i) == 0) continue;
      return invalid_argument(t->where, ": wanted zeros behind the ", HV, " value heads, got ", rest.value(i), " at ",
                              HV + i, " of ", t->count());
    }
    return {};
  }

  std::map<std::string, const TensorSource*> tensors_;
  const kda_layer_spec& s_;
  const std::string& origin_;
  LayerTensors out_;
};

// A tensor under its own or an alias's name.
const TensorSource* find_any(const TensorMap& tensors, const std::string& name) {
  for (const auto& [key, source] : tensors) {
    if (canonical(key) == name) return &source;
  }
  return nullptr;
}

constexpr int64_t kMostRows = int64_t{1} << 31;  // products of two sizes stay below 2^63

// wanted / by, if it goes even.
Result<int64_t> divided(const TensorSource& t, const char* what, int64_t total, int64_t by) {
  if (by > 0 && total > 0 && total % by == 0) return total / by;
  return invalid_argument(t.where, ": wanted a multiple of ", by, " ", what, ", got ", total);
}

}  // namespace

int64_t TensorSource::count() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

float VectorView::value(int64_t i) const {
  return dtype == KDA_BF16 ? to_float(unaligned<bf16>(data, i)) : unaligned<float>(data, i);
}

Result<LayerTensors> resolve(const TensorMap& tensors, const kda_layer_spec& spec, const std::string& origin,
                             bool short_conv) {
  std::map<std::string, std::string> seen;
  for (const auto& [name, source] : tensors) {
    const auto [at, fresh] = seen.emplace(canonical(name), name);
    if (!fresh) return invalid_argument(source.where, ": the same parameter as '", at->second, "'");
  }
  return Resolver(tensors, spec, origin).run(short_conv);
}

namespace {

// The rows of a matrix that must be there to tell the shapes.
Result<const TensorSource*> matrix(const TensorMap& tensors, const char* name, const std::string& origin) {
  const TensorSource* t = find_any(tensors, name);
  if (t == nullptr) return invalid_argument(origin, ": wanted a tensor '", name, "', got none");
  if (t->shape.size() == 2 && t->shape[0] > 0 && t->shape[1] > 0) return t;
  return invalid_argument(t->where, ": wanted two dimensions, got ", shape_text(t->shape));
}

Status derive_ranks(const TensorMap& tensors, kda_layer_spec& s, const std::string& origin) {
  const TensorSource* fused = find_any(tensors, "fused_fg_b_proj.weight");
  auto f_b = fused != nullptr ? Result<const TensorSource*>(fused) : matrix(tensors, "f_b_proj.weight", origin);
  if (!f_b.ok()) return f_b.status();
  const TensorSource& t = *f_b.value();
  if (t.shape.size() != 2) return invalid_argument(t.where, ": wanted two dimensions, got ", shape_text(t.shape));
  s.gate_rank = t.shape[1];
  const int64_t rows = t.shape[0] - (fused != nullptr ? values(s) : 0);
  if (s.key_dim == 0) {
    auto dim = divided(t, "rows", rows, s.num_value_heads);
    if (!dim.ok()) return dim.status();
    s.key_dim = dim.value();
  }
  if (const TensorSource* g_b = find_any(tensors, "g_b_proj.weight")) {
    s.output_gate_rank = g_b->shape.size() == 2 ? g_b->shape[1] : 0;
  } else if (fused != nullptr) {
    s.output_gate_rank = s.gate_rank;
  } else if (const TensorSource* g_a = find_any(tensors, "g_a_proj.weight")) {
    s.output_gate_rank = g_a->shape.empty() ? 0 : g_a->shape[0];
  }
  s.output_gate = s.output_gate_rank > 0 ? KDA_OUTPUT_GATE_LOW_RANK : KDA_OUTPUT_GATE_FULL_RANK;
  return {};
}

Status derive_heads(const TensorMap& tensors, const Config& config, kda_layer_spec& s, const std::string& origin) {
  if (s.num_heads == 0) {
    const TensorSource *q = find_any(tensors, "q_proj.weight"), *conv = find_any(tensors, "qkv_conv1d.weight");
    const TensorSource* q_conv = find_any(tensors, "q_conv1d.weight");
    const TensorSource* from = q != nullptr ? q : q_conv != nullptr ? q_conv : conv;
    if (from == nullptr || from->shape.empty()) {
      return invalid_argument(origin, ": wanted a tensor 'q_proj.weight', got none");
    }
    const bool packed = from == conv;
    auto heads = divided(*from, "rows", from->shape[0] - (packed ? values(s) : 0), (packed ? 2 : 1) * s.key_dim);
    if (!heads.ok()) return heads.status();
    s.num_heads = heads.value();
  }
  for (const char* name : {"q_conv1d.bias", "k_conv1d.bias", "v_conv1d.bias", "qkv_conv1d.bias"}) {
    if (find_any(tensors, name) != nullptr) s.conv_bias = 1;
  }
  if (!config.short_conv) {
    s.conv_width = 2;
    return {};
  }
  const TensorSource* conv = find_any(tensors, "q_conv1d.weight");
  if (conv == nullptr) conv = find_any(tensors, "qkv_conv1d.weight");
  if (conv == nullptr || conv->shape.empty()) {
    return invalid_argument(origin, ": wanted a tensor 'q_conv1d.weight', got none");
  }
  s.conv_width =
      static_cast<int32_t>(std::clamp<int64_t>(config.conv_width.value_or(conv->shape.back()), 0, 1 << 20));
  return {};
}

}  // namespace

Result<kda_layer_spec> derive_spec(const TensorMap& tensors, const Config& config, const std::string& origin) {
  kda_layer_spec s{};
  const TensorSource* norm = find_any(tensors, "o_norm.weight");
  if (norm == nullptr) return invalid_argument(origin, ": wanted a tensor 'o_norm.weight', got none");
  auto o = matrix(tensors, "o_proj.weight", origin);
  if (!o.ok()) return o.status();
  for (const auto& [name, source] : tensors) {
    for (const int64_t size : source.shape) {
      if (size >= kMostRows) {
        return invalid_argument(source.where, ": wanted sizes below 2^31, got ", shape_text(source.shape));
      }
    }
  }
  if (norm->count() == 0 || norm->count() >= kMostRows) {
    return invalid_argument(norm->where, ": wanted one element a value channel, got ", shape_text(norm->shape));
  }
  s.hidden = config.hidden.value_or(o.value()->shape[0]);
  s.value_dim = config.value_dim.value_or(norm->count());
  s.key_dim = config.key_dim.value_or(0);
  s.num_heads = config.heads.value_or(0);
  s.num_value_heads = config.value_heads.value_or(s.num_heads);
  if (s.num_value_heads == 0) {
    auto heads = divided(*o.value(), "columns", o.value()->shape[1], s.value_dim);
    if (!heads.ok()) return heads.status();
    s.num_value_heads = heads.value();
  }
  KDA_RETURN_IF_ERROR(derive_ranks(tensors, s, origin));
  KDA_RETURN_IF_ERROR(derive_heads(tensors, config, s, origin));
  s.gate_family = config.lower_bound ? KDA_GATE_BOUNDED : KDA_GATE_SOFTPLUS;
  s.lower_bound = config.lower_bound.value_or(0);
  s.norm_eps = config.norm_eps.value_or(1e-5);
  s.allow_neg_eigval = config.allow_neg_eigval ? 1 : 0;
  const Status status = normalize(s);
  if (!status.ok()) return status.with_context(origin);
  return s;
}

}  // namespace kda::layer

#include "layer/spec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/checked.h"

namespace kda::layer {
namespace {

struct Known {
  const char* name;
  int64_t hidden, heads;
  kda_gate_family family;
  double lower_bound;
  kda_output_gate gate;
  int32_t layers;
};

// Spec L-3; `tiny` is a size for tests and first runs.
constexpr Known kModels[] = {
    {"tiny", 256, 2, KDA_GATE_SOFTPLUS, 0, KDA_OUTPUT_GATE_LOW_RANK, 4},
    {"kimi-linear", 2304, 32, KDA_GATE_SOFTPLUS, 0, KDA_OUTPUT_GATE_LOW_RANK, 20},
    {"kimi-k3", 7168, 96, KDA_GATE_BOUNDED, -5, KDA_OUTPUT_GATE_FULL_RANK, 69},
    {"glm-5.3-flash", 4096, 64, KDA_GATE_BOUNDED, -5, KDA_OUTPUT_GATE_LOW_RANK, 34},
};

Status check_size(const char* name, int64_t value) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (value >= 1 && value < kMost) return {};
  return invalid_argument("layer.", name, ": wanted 1 to 2^31-1, got ", value);
}

}  // namespace

InRow in_row(const kda_layer_spec& s) {
  constexpr int64_t kColumns = 16;
  InRow row;
  row.gate = round_up(channels(s), kColumns);
  row.f_a = round_up(row.gate + (s.output_gate_rank > 0 ? s.output_gate_rank : values(s)), kColumns);
  row.b = round_up(row.f_a + s.gate_rank, kColumns);
  row.width = round_up(row.b + s.num_value_heads, kColumns);
  return row;
}

Status normalize(kda_layer_spec& s) {
  if (s.num_value_heads == 0) s.num_value_heads = s.num_heads;
  if (s.norm_eps == 0) s.norm_eps = 1e-5;
  KDA_RETURN_IF_ERROR(check_size("hidden", s.hidden));
  KDA_RETURN_IF_ERROR(check_size("num_heads", s.num_heads));
  KDA_RETURN_IF_ERROR(check_size("num_value_heads", s.num_value_heads));
  KDA_RETURN_IF_ERROR(check_size("key_dim", s.key_dim));
  KDA_RETURN_IF_ERROR(check_size("value_dim", s.value_dim));
  KDA_RETURN_IF_ERROR(check_size("gate_rank", s.gate_rank));
  if (s.num_value_heads % s.num_heads != 0) {
    return invalid_argument("layer.num_value_heads: wanted a multiple of num_heads = ", s.num_heads, ", got ",
                            s.num_value_heads);
  }
  if (s.conv_width < 2 || s.conv_width > 8) {
    return invalid_argument("layer.conv_width: wanted 2 to 8, got ", s.conv_width);
  }
  if (s.output_gate == KDA_OUTPUT_GATE_LOW_RANK) {
    KDA_RETURN_IF_ERROR(check_size("output_gate_rank", s.output_gate_rank));
  } else if (s.output_gate != KDA_OUTPUT_GATE_FULL_RANK) {
    return invalid_argument("layer.output_gate: wanted low rank (1) or full rank (2), got ",
                            static_cast<int>(s.output_gate));
  } else if (s.output_gate_rank != 0) {
    return invalid_argument("layer.output_gate_rank: wanted 0 with a full-rank output gate, got ",
                            s.output_gate_rank);
  }
  if (s.gate_family == KDA_GATE_BOUNDED) {
    if (!(std::isfinite(s.lower_bound) && s.lower_bound < 0)) {
      return invalid_argument("layer.lower_bound: wanted a finite number < 0, got ", s.lower_bound);
    }
  } else if (s.gate_family != KDA_GATE_SOFTPLUS) {
    return invalid_argument("layer.gate_family: wanted softplus (1) or bounded (2), got ",
                            static_cast<int>(s.gate_family));
  } else if (s.lower_bound != 0) {
    return invalid_argument("layer.lower_bound: wanted 0 with the softplus family, got ", s.lower_bound);
  }
  if (!(std::isfinite(s.norm_eps) && s.norm_eps > 0)) {
    return invalid_argument("layer.norm_eps: wanted a finite number > 0, got ", s.norm_eps);
  }
  // Every matrix, with room for the others beside it in a fused one.
  const int64_t columns = std::max({s.hidden, s.gate_rank, s.output_gate_rank});
  const std::pair<int64_t, int64_t> rows[] = {
      {s.num_heads, s.key_dim}, {s.num_value_heads, s.key_dim}, {s.num_value_heads, s.value_dim}};
  for (const auto& [heads, dim] : rows) {
    const auto bytes = checked_product({heads, dim, columns, 64});
    if (!bytes) return invalid_argument("layer: wanted weights below 2^63 bytes, got more");
  }
  return {};
}

Result<kda_layer_spec> model_spec(const char* name, int32_t* kda_layers) {
  std::string names;
  for (const Known& m : kModels) {
    if (std::strcmp(m.name, name) != 0) {
      names += str_cat(names.empty() ? "" : ", ", m.name);
      continue;
    }
    kda_layer_spec s{};
    s.hidden = m.hidden;
    s.num_heads = s.num_value_heads = m.heads;
    s.key_dim = s.value_dim = s.gate_rank = 128;
    s.output_gate = m.gate;
    s.output_gate_rank = m.gate == KDA_OUTPUT_GATE_LOW_RANK ? 128 : 0;
    s.conv_width = 4;
    s.gate_family = m.family;
    s.lower_bound = m.lower_bound;
    s.norm_eps = 1e-5;
    if (kda_layers != nullptr) *kda_layers = m.layers;
    return s;
  }
  return not_found("model: wanted one of ", names, ", got \"", name, "\"");
}

Result<kda_layer_spec> share(const kda_layer_spec& whole, int32_t ranks, int32_t rank) {
  kda_layer_spec s = whole;
  KDA_RETURN_IF_ERROR(normalize(s));
  if (ranks < 1 || s.num_heads % ranks != 0 || s.num_value_heads % ranks != 0) {
    return invalid_argument("ranks: wanted a number that divides ", s.num_heads, " heads and ", s.num_value_heads,
                            " value heads (spec L-6), got ", ranks);
  }
  if (rank < 0 || rank >= ranks) return invalid_argument("rank: wanted 0 to ", ranks - 1, ", got ", rank);
  s.num_heads /= ranks;
  s.num_value_heads /= ranks;
  return s;
}

Status same(const kda_layer_spec& a, const kda_layer_spec& b) {
  const auto field = [](const char* name, auto wanted, auto got) {
    return wanted == got ? Status() : invalid_argument("weights: wanted ", name, " ", wanted, ", got ", got);
  };
  KDA_RETURN_IF_ERROR(field("hidden", a.hidden, b.hidden));
  KDA_RETURN_IF_ERROR(field("num_heads", a.num_heads, b.num_heads));
  KDA_RETURN_IF_ERROR(field("num_value_heads", a.num_value_heads, b.num_value_heads));
  KDA_RETURN_IF_ERROR(field("key_dim", a.key_dim, b.key_dim));
  KDA_RETURN_IF_ERROR(field("value_dim", a.value_dim, b.value_dim));
  KDA_RETURN_IF_ERROR(field("gate_rank", a.gate_rank, b.gate_rank));
  KDA_RETURN_IF_ERROR(field("output_gate_rank", a.output_gate_rank, b.output_gate_rank));
  KDA_RETURN_IF_ERROR(field("conv_width", a.conv_width, b.conv_width));
  KDA_RETURN_IF_ERROR(field("output_gate", static_cast<int>(a.output_gate), static_cast<int>(b.output_gate)));
  KDA_RETURN_IF_ERROR(field("gate_family", static_cast<int>(a.gate_family), static_cast<int>(b.gate_family)));
  KDA_RETURN_IF_ERROR(field("lower_bound", a.lower_bound, b.lower_bound));
  KDA_RETURN_IF_ERROR(field("allow_neg_eigval", a.allow_neg_eigval != 0, b.allow_neg_eigval != 0));
  KDA_RETURN_IF_ERROR(field("conv_bias", a.conv_bias != 0, b.conv_bias != 0));
  return field("norm_eps", a.norm_eps, b.norm_eps);
}

}  // namespace kda::layer

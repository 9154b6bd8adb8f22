// What a model's config.json says about its KDA layers (spec L-3, L-4, L-5).
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "base/status.h"

namespace kda::layer {

struct Config {
  std::string path;  // "" = no config
  std::optional<int64_t> hidden, heads, value_heads, key_dim, value_dim, conv_width;
  std::optional<double> lower_bound;  // present: the bounded family (spec L-4)
  std::optional<double> norm_eps;
  std::optional<std::set<int64_t>> kda_layers;  // 0-based
  bool short_conv = true, allow_neg_eigval = false;
};

// INVALID_ARGUMENT names file and key. Keys may stand at the top, in `text_config`, and in `linear_attn_config` of
// either.
Result<Config> parse_config(const std::string& text, const std::string& path);

}  // namespace kda::layer

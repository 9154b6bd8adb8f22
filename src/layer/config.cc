#include "layer/config.h"

#include <cmath>
#include <initializer_list>
#include <vector>

#include "base/json.h"

namespace kda::layer {
namespace {

using Json = nlohmann::json;

class Reader {
 public:
  Reader(const Json& root, const std::string& path) : path_(path) {
    add(root);
    if (const auto text = root.find("text_config"); text != root.end()) add(*text);
  }

  // The first of `names` that is an integer in [least, 2^31). Two that disagree are an error.
  Status integer(std::initializer_list<const char*> names, int64_t least, std::optional<int64_t>& out) {
    return each(names, [&](const char* name, const Json& value) -> Status {
      if (!value.is_number_integer() || !(value.is_number_unsigned() || value.get<int64_t>() >= 0) ||
          value.get<uint64_t>() >= uint64_t{1} << 31 || value.get<int64_t>() < least) {
        return invalid_argument(path_, ": ", name, ": wanted an integer >= ", least, ", got ", brief(value));
      }
      const auto number = value.get<int64_t>();
      if (out && *out != number) return disagree(name, *out, number);
      out = number;
      return {};
    });
  }
  Status number(std::initializer_list<const char*> names, std::optional<double>& out) {
    return each(names, [&](const char* name, const Json& value) -> Status {
      if (!value.is_number()) return invalid_argument(path_, ": ", name, ": wanted a number, got ", brief(value));
      const auto number = value.get<double>();
      if (out && *out != number) return disagree(name, *out, number);
      out = number;
      return {};
    });
  }
  Status flag(const char* name, bool& out) {
    return each({name}, [&](const char*, const Json& value) -> Status {
      if (!value.is_boolean())
        return invalid_argument(path_, ": ", name, ": wanted true or false, got ", brief(value));
      out = value.get<bool>();
      return {};
    });
  }
  // kda_layers (1-based) or layer_types.
  Status layers(std::optional<std::set<int64_t>>& out) {
    KDA_RETURN_IF_ERROR(each({"kda_layers"}, [&](const char* name, const Json& value) -> Status {
      out.emplace();
      bool good = value.is_array();
      for (size_t i = 0; good && i < value.size(); ++i) {
        good = value[i].is_number_integer() && value[i].get<int64_t>() >= 1 && value[i].get<int64_t>() < 1 << 20;
        if (good) out->insert(value[i].get<int64_t>() - 1);
      }
      return good ? Status()
                  : invalid_argument(path_, ": ", name, ": wanted numbers of layers from 1, got ", brief(value));
    }));
    if (out) return {};
    return each({"layer_types"}, [&](const char* name, const Json& value) -> Status {
      if (!value.is_array()) return invalid_argument(path_, ": ", name, ": wanted a list, got ", brief(value));
      out.emplace();
      for (size_t i = 0; i < value.size(); ++i) {
        if (value[i] == "linear_attention" || value[i] == "kda") out->insert(static_cast<int64_t>(i));
      }
      return {};
    });
  }

 private:
  void add(const Json& object) {
    if (!object.is_object()) return;
    places_.push_back(&object);
    const auto linear = object.find("linear_attn_config");
    if (linear != object.end() && linear->is_object()) places_.push_back(&*linear);
  }
  // Calls f for each name that stands somewhere and is not null.
  template <class F>
  Status each(std::initializer_list<const char*> names, const F& f) {
    for (const char* name : names) {
      for (const Json* place : places_) {
        const auto at = place->find(name);
        if (at != place->end() && !at->is_null()) KDA_RETURN_IF_ERROR(f(name, *at));
      }
    }
    return {};
  }
  template <class T>
  Status disagree(const char* name, const T& before, const T& now) const {
    return invalid_argument(path_, ": ", name, ": wanted ", before, " as another key says, got ", now);
  }

  const std::string& path_;
  std::vector<const Json*> places_;
};

Status read(const Json& root, Config& c) {
  Reader r(root, c.path);
  KDA_RETURN_IF_ERROR(r.number({"gate_lower_bound", "lower_bound", "linear_lower_bound"}, c.lower_bound));
  if (c.lower_bound && !(std::isfinite(*c.lower_bound) && *c.lower_bound < 0)) {
    return invalid_argument(c.path, ": gate lower bound: wanted a finite number < 0 (spec E-3), got ",
                            *c.lower_bound);
  }
  KDA_RETURN_IF_ERROR(r.number({"rms_norm_eps", "norm_eps"}, c.norm_eps));
  KDA_RETURN_IF_ERROR(r.integer({"hidden_size"}, 1, c.hidden));
  KDA_RETURN_IF_ERROR(r.integer({"short_conv_kernel_size", "linear_conv_kernel_dim", "conv_size"}, 1, c.conv_width));
  KDA_RETURN_IF_ERROR(r.integer({"linear_num_heads"}, 1, c.heads));
  KDA_RETURN_IF_ERROR(r.integer({"linear_head_dim"}, 1, c.key_dim));
  KDA_RETURN_IF_ERROR(r.integer({"num_v_heads"}, 1, c.value_heads));
  // `num_heads` and `head_dim` mean KDA only where they stand beside it: full attention uses the same words at the
  // top.
  for (const char* at : {"", "text_config"}) {
    const Json* place = &root;
    if (*at != '\0') {
      const auto found = root.find(at);
      if (found == root.end()) continue;
      place = &*found;
    }
    if (!place->is_object()) continue;
    const auto linear = place->find("linear_attn_config");
    const bool own = linear != place->end() && linear->is_object();
    const auto type = place->find("model_type");
    const bool fla = type != place->end() && *type == "kda";
    if (!own && !fla) continue;
    const Json& scope = own ? *linear : *place;
    Reader inner(scope, c.path);
    KDA_RETURN_IF_ERROR(inner.integer({"num_heads"}, 1, c.heads));
    KDA_RETURN_IF_ERROR(inner.integer({"head_dim"}, 1, c.key_dim));
  }
  KDA_RETURN_IF_ERROR(r.flag("use_short_conv", c.short_conv));
  KDA_RETURN_IF_ERROR(r.flag("allow_neg_eigval", c.allow_neg_eigval));
  return r.layers(c.kda_layers);
}

}  // namespace

Result<Config> parse_config(const std::string& text, const std::string& path) {
  Config config;
  config.path = path;
  try {
    const auto parsed = parse_json(text);
    if (!parsed.ok()) return parsed.status().with_context(path);
    const Json& root = parsed.value();
    if (!root.is_object()) return invalid_argument(path, ": wanted a JSON object, got ", root.type_name());
    KDA_RETURN_IF_ERROR(read(root, config));
  } catch (const std::exception& e) {  // the JSON library's own
    return invalid_argument(path, ": ", e.what());
  }
  return config;
}

}  // namespace kda::layer

#include "layer/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>

#include "base/json.h"
#include "base/tensor.h"

namespace kda::layer {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kMaxText = 256 << 20;

Result<std::string> read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return not_found(path, ": cannot be opened");
  std::string text(std::istreambuf_iterator<char>(in), {});
  if (in.bad()) return invalid_argument(path, ": cannot be read");
  if (static_cast<int64_t>(text.size()) > kMaxText) return invalid_argument(path, ": wanted at most 256 MiB of JSON");
  return text;
}

// shard -> one of its tensors, in the order of the names. `text` is the index.
Result<std::map<std::string, std::vector<std::string>>> shards_of(const std::string& text, const std::string& path) {
  std::map<std::string, std::vector<std::string>> shards;
  const auto parsed = parse_json(text);
  if (!parsed.ok()) return parsed.status().with_context(path);
  const Json& json = parsed.value();
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (!json.is_object() || map == json.end() || !map->is_object()) {
    return invalid_argument(path, ": weight_map: wanted an object of tensor names");
  }
  for (const auto& [tensor, file] : map->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || fs::path(name).filename() != name || name == "..") {
      return invalid_argument(path, ": weight_map: tensor '", tensor,
                              "': wanted the name of a file beside the index, got ", brief(file));
    }
    shards[name].push_back(tensor);
  }
  return shards;
}

// A layer's number and the prefix that its tensors share, from the name of its A_log; nothing if that is no KDA
// layer's.
struct Found {
  int64_t number;
  std::string prefix;  // "model.layers.3.self_attn."
};
std::optional<Found> kda_layer(const std::string& name) {
  constexpr std::string_view kTail = "A_log";
  if (!name.ends_with(kTail)) return std::nullopt;
  Found found{0, name.substr(0, name.size() - kTail.size())};
  const std::string& p = found.prefix;
  if (!p.empty() && !p.ends_with('.')) return std::nullopt;
  const bool own = p.empty() || p.ends_with("self_attn.") || p.ends_with("attn.");
  const size_t at = p.rfind("layers.");
  if (at == std::string::npos) return own || p.find('.') == p.size() - 1 ? std::optional(found) : std::nullopt;
  const size_t digits = at + 7, end = p.find_first_not_of("0123456789", digits);
  if (!own || end == digits || end == std::string::npos || end - digits > 9) return std::nullopt;
  if (p[end] != '.' || p.find('.', end + 1) != p.size() - 1) return std::nullopt;
  found.number = std::stoll(p.substr(digits, end - digits));
  return found;
}

}  // namespace

Status Checkpoint::open_shard(const std::string& path) {
  auto header = SafetensorsFile::open(path);
  if (!header.ok()) return header.status();
  auto memory = MappedFile::open(path);
  if (!memory.ok()) return memory.status();
  shards_.push_back({std::move(header.value()), std::move(memory.value())});
  return {};
}

Status Checkpoint::open_index(const std::string& path) {
  auto text = read_text(path);
  if (!text.ok()) return text.status();
  auto shards = shards_of(text.value(), path);
  if (!shards.ok()) return shards.status();
  if (shards.value().empty()) return invalid_argument(path, ": weight_map: wanted tensors, got none");
  for (const auto& [file, tensors] : shards.value()) {
    const std::string full = (fs::path(path).parent_path() / file).string();
    const Status status = open_shard(full);
    if (!status.ok()) {
      return Status(status.code(),
                    str_cat(status.message(), " (a shard of ", path, ", wanted for tensor '", tensors.front(), "')"));
    }
    for (const std::string& tensor : tensors) {
      if (shards_.back().header.find(tensor) != nullptr) continue;
      return invalid_argument(full, ": wanted tensor '", tensor, "' as ", path, " says, got none");
    }
  }
  return {};
}

Status Checkpoint::open_directory(const std::string& path) {
  std::error_code error;
  std::vector<std::string> files, indexes;
  for (fs::directory_iterator i(path, error), end; !error && i != end; i.increment(error)) {
    const std::string name = i->path().filename().string();
    if (name.ends_with(".safetensors")) files.push_back(i->path().string());
    if (name.ends_with(".safetensors.index.json")) indexes.push_back(i->path().string());
  }
  if (error) return not_found(path, ": cannot be listed: ", error.message());
  std::sort(files.begin(), files.end());
  std::sort(indexes.begin(), indexes.end());
  if (indexes.size() > 1) return invalid_argument(path, ": wanted one index, got ", indexes[0], " and ", indexes[1]);
  if (indexes.size() == 1) return open_index(indexes[0]);
  if (files.empty()) return not_found(path, ": wanted .safetensors files, got none");
  for (const std::string& file : files) KDA_RETURN_IF_ERROR(open_shard(file));
  return {};
}

Status Checkpoint::read_config(const std::string& path) {
  std::error_code error;
  if (!fs::exists(path, error)) return {};
  auto text = read_text(path);
  if (!text.ok()) return text.status();
  auto config = parse_config(text.value(), path);
  if (!config.ok()) return config.status();
  config_ = std::move(config.value());
  return {};
}

// Projections are multiplied as one matrix: a checkpoint whose shards disagree about their element type was put
// together wrongly. `first` is the first projection seen.
static Status check_projections(const TensorMap& tensors, TensorSource& first) {
  for (const auto& [name, source] : tensors) {
    if (source.shape.size() != 2 || name.find("proj") == std::string::npos) continue;
    if (first.dtype == KDA_DTYPE_NONE) first = source;
    if (source.dtype == first.dtype) continue;
    return invalid_argument(source.where, ": wanted dtype ", dtype_name(first.dtype), " as ", first.where,
                            " has, got ", dtype_name(source.dtype));
  }
  return {};
}

Status Checkpoint::find_layers(const std::string& path) {
  std::map<int64_t, Layer> layers;
  std::map<int64_t, std::string> prefixes;
  for (const Shard& shard : shards_) {
    for (const SafetensorsEntry& e : shard.header.entries()) {
      const auto found = kda_layer(e.name);
      if (!found) continue;
      const auto [at, fresh] = prefixes.emplace(found->number, found->prefix);
      if (!fresh) {
        return invalid_argument(shard.header.path(), ": tensor '", e.name, "': wanted one KDA layer ", found->number,
                                ", got '", at->second, "A_log' too");
      }
      layers[found->number] = {found->number, path + (found->prefix.empty() ? "" : ": " + found->prefix), {}, {}};
    }
  }
  for (const Shard& shard : shards_) {
    for (const SafetensorsEntry& e : shard.header.entries()) {
      for (const auto& [number, prefix] : prefixes) {
        // Vectors of expected values lie beside the weights of a bare layer: with no prefix every name is its own.
        if (!e.name.starts_with(prefix)) continue;
        TensorSource source{str_cat(shard.header.path(), ": tensor '", e.name, "'"), e.dtype, e.shape,
                            shard.memory.data() + shard.header.data_begin() + e.begin};
        if (e.dtype == KDA_DTYPE_NONE) {
          return unsupported(source.where,
                             ": wanted dtype bf16 or fp32 (KDA weights are not quantised, spec L-2), got ", e.type);
        }
        const auto [at, fresh] = layers[number].tensors.emplace(e.name.substr(prefix.size()), source);
        if (!fresh) return invalid_argument(source.where, ": wanted once, got it in ", at->second.where, " too");
      }
    }
  }
  TensorSource first;
  for (auto& [number, layer] : layers) {
    auto spec = derive_spec(layer.tensors, config_, layer.origin);
    if (!spec.ok()) return spec.status();
    layer.spec = spec.value();
    auto all = resolve(layer.tensors, layer.spec, layer.origin, config_.short_conv);
    if (!all.ok()) return all.status();
    KDA_RETURN_IF_ERROR(check_projections(layer.tensors, first));
    layers_.push_back(std::move(layer));
  }
  return {};
}

// Spec L-5.
Status Checkpoint::check_listed(const std::string& path) const {
  if (layers_.empty()) return invalid_argument(path, ": wanted tensors '...layers.<n>.self_attn.A_log', got none");
  if (!config_.kda_layers) return {};
  std::set<int64_t> found;
  for (const Layer& layer : layers_) found.insert(layer.number);
  std::set<int64_t> all = *config_.kda_layers;
  all.insert(found.begin(), found.end());
  for (int64_t n : all) {
    const bool listed = config_.kda_layers->contains(n);
    if (listed == found.contains(n)) continue;
    return invalid_argument(config_.path, ": layer ", n, " (from 0): the config says it is ", listed ? "" : "not ",
                            "KDA, but ", path, listed ? " has no" : " has a", " tensor '...layers.", n,
                            ".self_attn.A_log' (spec L-5)");
  }
  return {};
}

Result<Checkpoint> Checkpoint::open(const std::string& path) {
  Checkpoint c;
  std::error_code error;
  const fs::file_status kind = fs::status(path, error);
  if (!fs::exists(kind)) return not_found(path, ": no such file or directory");
  const bool directory = fs::is_directory(kind);
  const fs::path beside = directory ? fs::path(path) : fs::path(path).parent_path();
  KDA_RETURN_IF_ERROR(c.read_config((beside / "config.json").string()));
  if (directory) {
    KDA_RETURN_IF_ERROR(c.open_directory(path));
  } else if (path.ends_with(".json")) {
    KDA_RETURN_IF_ERROR(c.open_index(path));
  } else {
    KDA_RETURN_IF_ERROR(c.open_shard(path));
  }
  KDA_RETURN_IF_ERROR(c.find_layers(path));
  KDA_RETURN_IF_ERROR(c.check_listed(path));
  return c;
}

Result<const Checkpoint::Layer*> Checkpoint::layer(size_t i) const {
  if (i < layers_.size()) return &layers_[i];
  return not_found("layer: wanted below ", layers_.size(), ", got ", i);
}

}  // namespace kda::layer

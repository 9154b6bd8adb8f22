// Checkpoints of any names, shapes, indexes and configs (spec L-1 to L-6, L-10, L-11). The input is a text:
//
//   config {...}                             config.json, once at most
//   index {...}                              model.safetensors.index.json, once at most
//   shard a.safetensors                      a file; the tensors after it are its own, with data of zeros
//   BF16 [4, 8] model.layers.0.self_attn.q_proj.weight
//
// A checkpoint that opens can be described and loaded, or says why not; one that does not open says why.
#include <kda/kda.h>
#include <kda/layer.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "fuzz_target.h"

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kMostBytes = 1 << 20;  // of all data
constexpr size_t kMostLines = 100;

// The folder of this process, emptied for each input.
class Folder {
 public:
  Folder() {
    const fs::path base = fs::exists("/dev/shm") ? fs::path("/dev/shm") : fs::temp_directory_path();
    path_ = base / ("kda_checkpoint_fuzz_" + std::to_string(::getpid()));
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  void clear() const {
    for (const auto& entry : fs::directory_iterator(path_)) fs::remove_all(entry.path());
  }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

struct Shard {
  Json header = Json::object();
  int64_t bytes = 0;
};

int64_t element_size(const std::string& type) {
  static const std::map<std::string, int64_t> kSizes = {{"F32", 4}, {"BF16", 2}, {"F16", 2},
                                                        {"F64", 8}, {"I8", 1},   {"F8_E4M3", 1}};
  const auto at = kSizes.find(type);
  return at == kSizes.end() ? 0 : at->second;
}

// One tensor's line into its shard; false: not a tensor that a file of this size can hold.
bool add_tensor(const std::string& type, std::istringstream& line, Shard& shard, int64_t& total) {
  std::string shape_text, name;
  if (!std::getline(line >> std::ws, shape_text, ']')) return false;
  line >> std::ws;
  std::getline(line, name);
  const Json shape = Json::parse(shape_text + "]", nullptr, false);
  int64_t bytes = element_size(type);
  if (bytes == 0 || !shape.is_array() || shape.size() > 6) return false;
  for (const Json& side : shape) {
    if (!side.is_number_unsigned()) return false;
    if (__builtin_mul_overflow(bytes, side.get<int64_t>(), &bytes) || bytes < 0 || bytes > kMostBytes) return false;
  }
  total += bytes;
  if (total > kMostBytes || name.empty() || shard.header.contains(name)) return false;
  shard.header[name] = {{"dtype", type}, {"shape", shape}, {"data_offsets", {shard.bytes, shard.bytes + bytes}}};
  shard.bytes += bytes;
  return true;
}

bool write_shard(const std::string& path, const Shard& shard) {
  std::string header;
  try {
    header = shard.header.dump();
  } catch (const std::exception&) {  // a name that is no UTF-8
    return false;
  }
  std::ofstream out(path, std::ios::binary);
  const uint64_t size = header.size();
  out.write(reinterpret_cast<const char*>(&size), 8) << header;
  out.close();
  std::error_code error;
  fs::resize_file(path, 8 + size + static_cast<uint64_t>(shard.bytes), error);
  return out.good() && !error;
}

bool write_folder(const Folder& folder, const std::string& text) {
  std::istringstream lines(text);
  std::map<std::string, Shard> shards;
  Shard* open = nullptr;
  int64_t total = 0;
  size_t count = 0;
  for (std::string line; std::getline(lines, line);) {
    if (++count > kMostLines) return false;
    std::istringstream in(line);
    std::string word, rest;
    in >> word;
    if (word == "config" || word == "index") {
      std::getline(in >> std::ws, rest);
      std::ofstream(folder.file(word == "config" ? "config.json" : "model.safetensors.index.json")) << rest;
    } else if (word == "shard") {
      in >> rest;
      const bool plain = !rest.empty() && rest.size() < 64 && rest.find_first_of(std::string("/\0", 2)) == rest.npos;
      if (!plain || !rest.ends_with(".safetensors")) return false;
      open = &shards[rest];
    } else if (open == nullptr || !add_tensor(word, in, *open, total)) {
      return false;
    }
  }
  for (const auto& [name, shard] : shards) {
    if (!write_shard(folder.file(name), shard)) return false;
  }
  return true;
}

void expect_named(kda_status status) {
  must(status == KDA_INVALID_ARGUMENT || status == KDA_UNSUPPORTED || status == KDA_NOT_FOUND);
  must(std::strlen(kda_last_error()) > 0);
}

void load(kda_context* context, const kda_checkpoint* checkpoint) {
  int64_t number = 0, before = -1;
  kda_layer_spec spec{};
  for (size_t i = 0; kda_checkpoint_layer(checkpoint, i, &number, &spec) == KDA_OK; ++i) {
    must(number > before);
    before = number;
    for (const int32_t ranks : {1, 2}) {
      kda_layer_spec share{};
      const bool even = kda_layer_spec_share(&spec, ranks, 0, &share) == KDA_OK;
      kda_layer_load_options options{};
      options.struct_size = sizeof options;
      options.io_dtype = KDA_FP32;
      options.projection = "portable";
      options.ranks = ranks;
      options.rank = ranks - 1;
      kda_layer_weights* weights = nullptr;
      const kda_status status = kda_layer_weights_load(context, checkpoint, i, &options, &weights);
      if (status != KDA_OK) expect_named(status);
      must(even || status != KDA_OK);
      kda_layer_weights_destroy(weights);
    }
  }
  must(before >= 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  static kda_context* const context = [] {
    kda_context_options o{};
    o.struct_size = sizeof o;
    o.num_threads = 1;
    kda_context* c = nullptr;
    must(kda_context_create(&o, &c) == KDA_OK);
    return c;
  }();
  folder.clear();
  if (!write_folder(folder, std::string(reinterpret_cast<const char*>(data), size))) return -1;  // not for the corpus
  kda_checkpoint* checkpoint = nullptr;
  const kda_status status = kda_checkpoint_open(folder.path().c_str(), &checkpoint);
  if (status != KDA_OK) {
    expect_named(status);
    return 0;
  }
  load(context, checkpoint);
  kda_checkpoint_close(checkpoint);
  return 0;
}

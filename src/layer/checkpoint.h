// An opened checkpoint: its files, its config, and the tensors of each KDA layer.
#pragma once

#include <string>
#include <vector>

#include "base/mapped_file.h"
#include "base/safetensors.h"
#include "layer/config.h"
#include "layer/tensors.h"

namespace kda::layer {

class Checkpoint {
 public:
  struct Layer {
    int64_t number = 0;
    std::string origin;  // "DIR: model.layers.3.self_attn", for messages
    TensorMap tensors;
    kda_layer_spec spec{};
  };

  // As kda_checkpoint_open.
  static Result<Checkpoint> open(const std::string& path);

  const std::vector<Layer>& layers() const { return layers_; }
  const Config& config() const { return config_; }
  Result<const Layer*> layer(size_t i) const;

 private:
  struct Shard {
    SafetensorsFile header;
    MappedFile memory;
  };
  struct Place {
    size_t shard, entry;
  };
  Status open_directory(const std::string& path);
  Status open_index(const std::string& path);
  Status open_shard(const std::string& path);
  Status read_config(const std::string& path);
  Status find_layers(const std::string& path);
  Status check_listed(const std::string& path) const;

  std::vector<Shard> shards_;
  Config config_;
  std::vector<Layer> layers_;
};

}  // namespace kda::layer

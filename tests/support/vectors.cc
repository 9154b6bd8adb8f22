#include "support/vectors.h"

#include <stdexcept>

#include "base/safetensors.h"

namespace kda::test {

std::map<std::string, Tensor> load_vectors(const std::string& name) {
  const auto file = SafetensorsFile::open(std::string(KDA_TEST_DATA_DIR) + "/vectors/" + name + ".safetensors");
  if (!file.ok()) throw std::runtime_error(file.status().message());
  std::map<std::string, Tensor> tensors;
  for (const SafetensorsEntry& e : file.value().entries()) {
    const auto read = file.value().read(e.name);
    if (!read.ok()) throw std::runtime_error(read.status().message());
    Tensor t(e.dtype, e.shape);
    t.assign(values(read.value()->view()));
    tensors.emplace(e.name, std::move(t));
  }
  return tensors;
}

}  // namespace kda::test

#include "conformance/vectors.h"

#include <kda/kda.hpp>

namespace kda::conformance {

Vectors read_vectors(const std::string& path) {
  const TensorFile file(path);
  Vectors vectors;
  for (size_t i = 0; i < file.size(); ++i) {
    const TensorFile::Entry entry = file.entry(i);
    const kda_tensor& layout = entry.layout;
    Tensor t(layout.dtype, Shape(layout.shape, layout.shape + layout.rank));
    file.read(i, t);
    vectors.emplace(entry.name, std::move(t));
  }
  return vectors;
}

}  // namespace kda::conformance

// A file's bytes in the address space, read only.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "base/status.h"

namespace kda {

class MappedFile {
 public:
  // NOT_FOUND: it cannot be opened; OUT_OF_MEMORY: it cannot be mapped. An empty file has no data.
  static Result<MappedFile> open(const std::string& path);
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept { swap(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    swap(other);
    return *this;
  }
  ~MappedFile();

  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void swap(MappedFile& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kda

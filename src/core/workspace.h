// Workspace book and grant (spec R-30..R-35): sections are booked by name at plan creation, granted as
// pointers at run time; the size arithmetic exists here alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "kda/types.h"

namespace kda {

class WorkspaceBook {
 public:
  struct Section {
    std::string name;
    int64_t offset = 0;
    int64_t bytes = 0;
  };
  using Id = int;

  // Books `count` elements of `dtype`, aligned to 256 bytes. An overflow is remembered and makes the plan's
  // creation fail with gate `size`.
  Id book(std::string name, kda_dtype dtype, std::initializer_list<int64_t> shape);
  Id book_bytes(std::string name, int64_t bytes);

  bool overflowed() const { return overflowed_; }
  int64_t total_bytes() const { return total_; }
  const std::vector<Section>& sections() const { return sections_; }

 private:
  std::vector<Section> sections_;
  int64_t total_ = 0;
  bool overflowed_ = false;
};

// The caller's memory seen through the book. Made by core after the checks of R-35.
class WorkspaceGrant {
 public:
  WorkspaceGrant(const WorkspaceBook& book, void* data) : book_(&book), data_(static_cast<char*>(data)) {}
  template <class T>
  T* get(WorkspaceBook::Id id) const {
    return reinterpret_cast<T*>(data_ + book_->sections()[static_cast<size_t>(id)].offset);
  }

 private:
  const WorkspaceBook* book_;
  char* data_;
};

}  // namespace kda

#include "core/workspace.h"

#include "base/checked.h"
#include "base/tensor.h"

namespace kda {

WorkspaceBook::Id WorkspaceBook::book(std::string name, kda_dtype dtype, std::initializer_list<int64_t> shape) {
  const auto count = checked_product(shape);
  const auto bytes = count ? checked_mul(*count, static_cast<int64_t>(dtype_size(dtype))) : std::nullopt;
  if (!bytes) {
    overflowed_ = true;
    return book_bytes(std::move(name), 0);
  }
  return book_bytes(std::move(name), *bytes);
}

WorkspaceBook::Id WorkspaceBook::book_bytes(std::string name, int64_t bytes) {
  const auto padded = checked_add(bytes, KDA_WORKSPACE_ALIGNMENT - 1);
  const auto total = padded ? checked_add(total_, *padded / KDA_WORKSPACE_ALIGNMENT * KDA_WORKSPACE_ALIGNMENT)
                            : std::nullopt;
  sections_.push_back({std::move(name), total_, total ? bytes : 0});
  if (total) {
    total_ = *total;
  } else {
    overflowed_ = true;
  }
  return static_cast<Id>(sections_.size()) - 1;
}

}  // namespace kda

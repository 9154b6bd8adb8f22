// The one shape of all CPU candidates: name "portable", gates from a policy, a kernel made from the description.
#pragma once

#include <memory>

#include "core/backend.h"

namespace kda::cpu {

template <class Op, class KernelType, class Gates>
class Portable final : public Candidate<Op> {
 public:
  std::string_view name() const override { return "portable"; }
  kda_device_type device() const override { return KDA_CPU; }
  void check(const typename Op::Desc& desc, const Context&, Refusals& refusals) const override {
    Gates::check(desc, refusals);
  }
  Result<std::unique_ptr<Kernel<Op>>> create(const typename Op::Desc& desc, const Context& context,
                                             WorkspaceBook& book) const override {
    return std::unique_ptr<Kernel<Op>>(std::make_unique<KernelType>(desc, context, book));
  }
};

// Workspace section for `count` elements of a plain struct.
template <class T>
WorkspaceBook::Id book_array(WorkspaceBook& book, const char* name, int64_t count) {
  return book.book(name, KDA_INT8, {count, static_cast<int64_t>(sizeof(T))});
}

}  // namespace kda::cpu

// Candidates that this build lacks. They stand in the list all the same, so that asking for one says why it cannot
// serve (spec R-9 `not_built`). In every build; needs no CUDA header.
#pragma once

#include <string_view>

#include "core/backend.h"

namespace kda::cuda {

template <class Op>
class NotBuilt final : public Candidate<Op> {
 public:
  explicit NotBuilt(std::string_view name) : name_(name) {}
  std::string_view name() const override { return name_; }
  kda_device_type device() const override { return KDA_CUDA; }
  void check(const typename Op::Desc&, const Context&, Refusals& refusals) const override {
    refusals.add("not_built", "a library with this CUDA candidate", "one without");
  }
  Result<std::unique_ptr<Kernel<Op>>> create(const typename Op::Desc&, const Context&,
                                             WorkspaceBook&) const override {
    return internal_error("the CUDA candidate is not in this build");
  }

 private:
  std::string_view name_;
};

template <class Op>
void add_not_built(Backends& list) {
  static const NotBuilt<Op> fused("fused"), portable("portable");
  list.add<Op>(&fused);
  list.add<Op>(&portable);
}

}  // namespace kda::cuda

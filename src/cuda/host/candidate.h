// A candidate of the CUDA backend: its gates (plain host code) and how its kernel is made.
#pragma once

#include <memory>
#include <string_view>

#include "core/backend.h"
#include "cuda/host/device.h"

namespace kda::cuda {

template <class Op>
class CudaCandidate final : public Candidate<Op> {
 public:
  using Check = void (*)(const typename Op::Desc&, const Context&, Refusals&);
  using Create = Result<std::unique_ptr<Kernel<Op>>> (*)(const typename Op::Desc&, const Context&, WorkspaceBook&);

  CudaCandidate(std::string_view name, Check gates, Create make) : name_(name), check_(gates), create_(make) {}

  std::string_view name() const override { return name_; }
  kda_device_type device() const override { return KDA_CUDA; }
  void check(const typename Op::Desc& desc, const Context& context, Refusals& refusals) const override {
    check_(desc, context, refusals);
  }
  Result<std::unique_ptr<Kernel<Op>>> create(const typename Op::Desc& desc, const Context& context,
                                             WorkspaceBook& book) const override {
    const DeviceGuard guard(context.device.index);
    KDA_RETURN_IF_ERROR(guard.status());
    return create_(desc, context, book);
  }

 private:
  std::string_view name_;
  Check check_;
  Create create_;
};

}  // namespace kda::cuda

// Checked mode on a device (spec G-7): the values that it looks at are read back first. Allocates and waits; plans
// outside checked mode never come here.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "base/tensor.h"
#include "core/context.h"
#include "core/device_runtime.h"
#include "core/operators.h"

namespace kda {

// Host copies of device tensors, kept until the check is done.
class HostCopies {
 public:
  HostCopies(const DeviceRuntime& runtime, void* stream) : runtime_(runtime), stream_(stream) {}
  // Points `t` at a copy of its elements.
  void take(kda_tensor& t) {
    const ByteRange range = byte_range(t);
    if (!status_.ok() || range.first >= range.last) return;
    const size_t bytes = range.last - range.first;
    copies_.push_back(std::make_unique<char[]>(bytes));
    char* copy = copies_.back().get();
    const auto offset = reinterpret_cast<uintptr_t>(t.data) - range.first;  // of element 0; strides may be negative
    status_ = runtime_.read(copy, static_cast<const char*>(t.data) - offset, bytes, stream_);
    t.data = copy + offset;
    t.device = {KDA_CPU, 0};
  }
  const Status& status() const { return status_; }

 private:
  const DeviceRuntime& runtime_;
  void* stream_;
  Status status_;
  std::vector<std::unique_ptr<char[]>> copies_;
};

// Op::check_values where the values are: index vectors, flags and, for the plain gate form, gates.
template <class Op>
Status check_values(const Context& context, const typename Op::Desc& desc, typename Op::Args args, void* stream) {
  if (context.device.type == KDA_CPU) return Op::check_values(desc, args);
  if (context.runtime == nullptr) return internal_error("checked mode: the device's memory cannot be read");
  HostCopies copies(*context.runtime, stream);
  Op::visit_tensors(args, [&](const char* name, const kda_tensor& t, bool) {
    const bool index = t.dtype == KDA_INT32 || t.dtype == KDA_INT64 || t.dtype == KDA_BOOL;
    // `args` is this function's own copy.
    if (index || std::string_view(name) == "gate") copies.take(const_cast<kda_tensor&>(t));
  });
  KDA_RETURN_IF_ERROR(copies.status());
  return Op::check_values(desc, args);
}

}  // namespace kda

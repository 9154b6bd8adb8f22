// Checks on a device other than the CPU: every call's tensors travel there and back, guards included, so that a check
// written for host memory holds on the device as it stands. The device's memory comes from whoever has its runtime.
#pragma once

#include <kda/kda.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kda::conformance {

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual void* allocate(size_t bytes) = 0;  // aligned to 256; null if there is none
  virtual void release(void* p) = 0;
  virtual bool to_device(void* to, const void* from, size_t bytes) = 0;
  virtual bool to_host(void* to, const void* from, size_t bytes) = 0;
  // Waits for the default stream; "" or what went wrong.
  virtual std::string synchronize() = 0;
};

// The memory of a context's device by kda/device.h, on its default stream.
class ContextMemory final : public DeviceMemory {
 public:
  explicit ContextMemory(const kda_context* context) : context_(context) {}
  void* allocate(size_t bytes) override;
  void release(void* p) override;
  bool to_device(void* to, const void* from, size_t bytes) override;
  bool to_host(void* to, const void* from, size_t bytes) override;
  std::string synchronize() override;

 private:
  const kda_context* context_;
};

// Backend names "cuda_..." then mean the candidates of this context; its plans run through `memory`. Null undoes it.
void set_device(kda_context* context, DeviceMemory* memory);
kda_context* device_context();
DeviceMemory* memory_of(const kda_context* context);  // null: host memory

// Every tensor of an argument struct, for change.
std::vector<kda_tensor*> tensors_of(kda_prefill_args& a);
std::vector<kda_tensor*> tensors_of(kda_decode_args& a);
std::vector<kda_tensor*> tensors_of(kda_commit_args& a);
std::vector<kda_tensor*> tensors_of(kda_decode_step_args& a);
std::vector<kda_tensor*> tensors_of(kda_conv_args& a);
std::vector<kda_tensor*> tensors_of(kda_gated_norm_args& a);
std::vector<kda_tensor*> tensors_of(kda_residual_norm_args& a);
std::vector<kda_tensor*> tensors_of(kda_segment_summary_args& a);
std::vector<kda_tensor*> tensors_of(kda_segment_merge_args& a);
std::vector<kda_tensor*> tensors_of(kda_state_copy_args& a);
std::vector<kda_tensor*> tensors_of(kda_layer_args& a);     // but the weights'
std::vector<kda_tensor*> tensors_of(kda_metadata_args& a);  // but the host's

// An image of some tensors' host memory in device memory. Tensors that share memory share it there; addresses keep
// their place modulo 256; between the ranges lie guard bytes of a known pattern.
class Mirror {
 public:
  Mirror(DeviceMemory& memory, const std::vector<kda_tensor*>& tensors, size_t workspace_bytes);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  bool ok() const { return device_ != nullptr; }
  kda_workspace workspace() const;
  // Copies the tensors' host memory to the device again (values that changed there since).
  bool refresh();
  // Brings everything back into host memory. "" or the fault: a guard that was written, or the device's error.
  std::string back();

 private:
  struct Range {
    uintptr_t first, last;  // host bytes
    size_t at = 0;          // in the image
  };
  DeviceMemory& memory_;
  std::vector<Range> ranges_;
  std::vector<unsigned char> image_;
  size_t workspace_at_ = 0, workspace_bytes_ = 0;
  unsigned char* device_ = nullptr;
};

}  // namespace kda::conformance

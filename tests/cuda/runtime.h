// The CUDA runtime for test and bench programs.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "conformance/device.h"

namespace kda::cuda_test {

// Ends the program with a message unless the call succeeded.
void require(cudaError_t error, const char* call);
#define KDA_REQUIRE_CUDA(call) ::kda::cuda_test::require((call), #call)

// The context of device 0, made once; ends the program if there is none.
kda_context* context();

// One block that grows, so that a run of many small tests does not spend its time allocating.
class Memory final : public conformance::DeviceMemory {
 public:
  ~Memory() override;
  void* allocate(size_t bytes) override;
  void release(void*) override {}
  bool to_device(void* to, const void* from, size_t bytes) override;
  bool to_host(void* to, const void* from, size_t bytes) override;
  std::string synchronize() override;

 private:
  void* block_ = nullptr;
  size_t size_ = 0;
};

// "NVIDIA H200, sm_90, 132 multiprocessors, driver 13.0, library 0123456789abcdef"
std::string device_text();

}  // namespace kda::cuda_test

// The conformance suite over the CUDA candidates of the decode family, whose kernels run on the host: what they
// compute is checked where there is no device. Not their races, and not their speed.
#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdlib>

#include "capi/guard.h"
#include "conformance/device.h"
#include "core/backend.h"
#include "core/device_runtime.h"
#include "core/projection.h"
#include "cuda/host/candidates.h"
#include "cuda/host/device.h"
#include "cuda/host/launch.h"

namespace kda::cuda {

const ProjectionBackend* projection();  // of cuda/host/backend.h, which names the whole backend

// Dynamic shared memory, as the kernels name it.
thread_local __align__(1024) unsigned char s_dynamic[emulation::kSharedBytes];
unsigned char* dynamic_memory() { return s_dynamic; }

DeviceGuard::DeviceGuard(int32_t) {}
DeviceGuard::~DeviceGuard() = default;

}  // namespace kda::cuda

namespace {

class Memory final : public kda::conformance::DeviceMemory {
 public:
  void* allocate(size_t bytes) override { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }
  void release(void* p) override { std::free(p); }
  bool to_device(void* to, const void* from, size_t bytes) override {
    return std::memcpy(to, from, bytes) != nullptr;
  }
  bool to_host(void* to, const void* from, size_t bytes) override { return std::memcpy(to, from, bytes) != nullptr; }
  std::string synchronize() override { return ""; }
};

}  // namespace

int main(int argc, char** argv) {
  // Every block's bookkeeping comes from memory that stays.
  mallopt(M_MMAP_THRESHOLD, 64 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  testing::InitGoogleTest(&argc, argv);
  kda::Backends backends;
  backends.add(kda::cuda::portable_prefill());
  backends.add(kda::cuda::fused_decode());
  backends.add(kda::cuda::portable_decode());
  backends.add(kda::cuda::fused_commit());
  backends.add(kda::cuda::portable_commit());
  backends.add(kda::cuda::fused_decode_step());
  backends.add(kda::cuda::portable_decode_step());
  backends.add(kda::cuda::portable_conv());
  backends.add(kda::cuda::portable_gated_norm());
  backends.add(kda::cuda::portable_residual_norm());
  backends.add(kda::cuda::portable_segment_summary());
  backends.add(kda::cuda::portable_segment_merge());
  ::setenv("KDA_CUBLASLT_DIR", KDA_FAKE_CUBLASLT_DIR, 1);
  backends.projections.push_back(kda::cuda::projection());
  kda_context context;
  context.device = {KDA_CUDA, 0};
  context.isa = "sm_90";
  context.backends = &backends;
  context.runtime = &kda::host_runtime();
  context.facts.major = 9;
  context.facts.multiprocessors = 8;
  context.facts.driver_version = context.facts.runtime_version = 13000;
  Memory memory;
  kda::conformance::set_device(&context, &memory);
  const int result = RUN_ALL_TESTS();
  kda::conformance::set_device(nullptr, nullptr);
  return result;
}

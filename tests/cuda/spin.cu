#include "runtime.h"
#include "spin.h"

namespace kda::cuda_test {
namespace {

// Ends by itself after some seconds, should nobody stop it.
__global__ void spin_kernel(volatile int* flag) {
  const long long begin = clock64();
  while (*flag == 0 && clock64() - begin < 20000000000ll) {
  }
}

constexpr int kShared = 200 * 1024;

}  // namespace

Spinner::Spinner(int multiprocessors) {
  KDA_REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  KDA_REQUIRE_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&flag_), sizeof(int), cudaHostAllocMapped));
  *flag_ = 0;
  int* device = nullptr;
  KDA_REQUIRE_CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&device), flag_, 0));
  KDA_REQUIRE_CUDA(cudaFuncSetAttribute(spin_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  spin_kernel<<<multiprocessors, 1024, kShared, stream_>>>(device);
  KDA_REQUIRE_CUDA(cudaGetLastError());
}

void Spinner::stop() {
  if (flag_ == nullptr) return;
  *static_cast<volatile int*>(flag_) = 1;
  KDA_REQUIRE_CUDA(cudaStreamSynchronize(stream_));
}

Spinner::~Spinner() {
  stop();
  (void)cudaFreeHost(flag_);
  (void)cudaStreamDestroy(stream_);
}

}  // namespace kda::cuda_test

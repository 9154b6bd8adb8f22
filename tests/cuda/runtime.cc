#include "runtime.h"

#include <cstdio>
#include <cstdlib>

namespace kda::cuda_test {

void require(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s (%s)\n", call, cudaGetErrorName(error), cudaGetErrorString(error));
  std::exit(2);
}

kda_context* context() {
  static kda_context* made = [] {
    kda_context_options options{};
    options.struct_size = sizeof(options);
    options.device = {KDA_CUDA, 0};
    kda_context* c = nullptr;
    if (kda_context_create(&options, &c) != KDA_OK) {
      std::fprintf(stderr, "%s\n", kda_last_error());
      std::exit(2);
    }
    return c;
  }();
  return made;
}

Memory::~Memory() { (void)cudaFree(block_); }

void* Memory::allocate(size_t bytes) {
  if (bytes <= size_) return block_;
  (void)cudaFree(block_);
  size_ = 0;
  if (cudaMalloc(&block_, bytes + bytes / 2) != cudaSuccess) {
    (void)cudaGetLastError();
    return block_ = nullptr;
  }
  size_ = bytes + bytes / 2;
  return block_;
}

bool Memory::to_device(void* to, const void* from, size_t bytes) {
  // A small copy may still be on its way when the call returns, and other streams do not wait for it.
  return cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
}
bool Memory::to_host(void* to, const void* from, size_t bytes) {
  return cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
}

std::string Memory::synchronize() {
  const cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) return "";
  // Nothing works after a fault: say so once and stop.
  std::fprintf(stderr, "device fault: %s\n", cudaGetErrorString(error));
  std::exit(3);
}

std::string device_text() {
  kda_device_info info{};
  info.struct_size = sizeof(info);
  if (kda_device_get_info({KDA_CUDA, 0}, &info) != KDA_OK) return kda_last_error();
  char text[256];
  std::snprintf(text, sizeof text, "%s, sm_%d%d, %d multiprocessors, driver %d.%d, library %s", info.name,
                info.compute_major, info.compute_minor, info.multiprocessors, info.driver_version / 1000,
                info.driver_version % 1000 / 10, kda_source_hash());
  return text;
}

}  // namespace kda::cuda_test

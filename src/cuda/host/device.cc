#include "cuda/host/device.h"

#include <dlfcn.h>

#include <algorithm>

#include "cuda/host/error.h"

namespace kda::cuda {
namespace {

// Why the runtime finds no device: the loader's words if the driver library is not there, else the runtime's.
Status no_device(cudaError_t error) {
  (void)cudaGetLastError();
  std::string loader;
  if (void* driver = dlopen("libcuda.so.1", RTLD_LAZY)) {
    dlclose(driver);
  } else if (const char* message = dlerror()) {
    loader = str_cat("; loader: ", message);
  }
  return unsupported("device: wanted a CUDA device and its driver, got ", cudaGetErrorName(error), " (",
                     cudaGetErrorString(error), ")", loader);
}

}  // namespace

Result<int32_t> device_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return no_device(error);
  return static_cast<int32_t>(count);
}

Result<DeviceFacts> device_facts(int32_t index) {
  const auto count = device_count();
  if (!count.ok()) return count.status();
  if (index < 0 || index >= count.value()) {
    return invalid_argument("device: wanted an index below ", count.value(), " (CUDA devices), got ", index);
  }
  cudaDeviceProp prop{};
  KDA_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&prop, index));
  DeviceFacts facts;
  facts.name = prop.name;
  facts.major = prop.major;
  facts.minor = prop.minor;
  facts.multiprocessors = prop.multiProcessorCount;
  facts.memory_bytes = static_cast<int64_t>(prop.totalGlobalMem);
  facts.l2_bytes = prop.l2CacheSize;
  facts.shared_bytes = static_cast<int64_t>(prop.sharedMemPerBlockOptin);
  std::copy_n(reinterpret_cast<const uint8_t*>(prop.uuid.bytes), facts.uuid.size(), facts.uuid.begin());
  KDA_RETURN_IF_CUDA_ERROR(cudaDriverGetVersion(&facts.driver_version));
  KDA_RETURN_IF_CUDA_ERROR(cudaRuntimeGetVersion(&facts.runtime_version));
  return facts;
}

Result<DeviceFacts> open_device(int32_t index) {
  auto facts = device_facts(index);
  if (!facts.ok()) return facts;
  const DeviceGuard guard(index);
  KDA_RETURN_IF_ERROR(guard.status());
  KDA_RETURN_IF_CUDA_ERROR(cudaFree(nullptr));
  return facts;
}

DeviceGuard::DeviceGuard(int32_t index) {
  status_ = to_status(cudaGetDevice(&before_), "cudaGetDevice");
  if (!status_.ok() || before_ == index) return;
  status_ = to_status(cudaSetDevice(index), "cudaSetDevice");
  changed_ = status_.ok();
}

DeviceGuard::~DeviceGuard() {
  if (changed_) (void)cudaSetDevice(before_);
}

}  // namespace kda::cuda

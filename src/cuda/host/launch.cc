#include "cuda/host/launch.h"

namespace kda::cuda {
namespace {

constexpr int kMachineVersion = 90;  // of the images in this build, as the runtime reports them
constexpr int64_t kMostAlongY = 65535;
constexpr int32_t kDefaultShared = 48 * 1024;  // more shared memory than this must be asked for

}  // namespace

Status prepare_kernel(const void* kernel, const char* name, int32_t shared_bytes) {
  cudaFuncAttributes attributes{};
  KDA_RETURN_IF_ERROR(to_status(cudaFuncGetAttributes(&attributes, kernel), name));
  // PTX compiled by the driver shows an older PTX version (Y-21).
  if (attributes.binaryVersion != kMachineVersion || attributes.ptxVersion != kMachineVersion) {
    return Status(KDA_DEVICE_ERROR, str_cat(name, ": wanted machine code (", kMachineVersion, ", ", kMachineVersion,
                                            "), got (", attributes.binaryVersion, ", ", attributes.ptxVersion, ")"));
  }
  const auto fixed = static_cast<int32_t>(attributes.sharedSizeBytes);
  if (fixed + shared_bytes <= kDefaultShared) return {};
  // The attribute belongs to the function, which several plans may use: always all that a block can have.
  int device = 0, most = 0;
  KDA_RETURN_IF_ERROR(to_status(cudaGetDevice(&device), name));
  KDA_RETURN_IF_ERROR(
      to_status(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), name));
  if (fixed + shared_bytes > most) {
    return Status(KDA_UNSUPPORTED,
                  str_cat(name, ": wanted at most ", most, " bytes of shared memory, got ", fixed + shared_bytes));
  }
  return to_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - fixed), name);
}

Status launch_kernel(const void* kernel, const char* name, const LaunchShape& shape, void** arguments, void* stream) {
  if (shape.x == 0 || shape.rest == 0) return {};
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  const int64_t y = shape.rest < kMostAlongY ? shape.rest : kMostAlongY;
  config.gridDim =
      dim3(static_cast<unsigned>(shape.x), static_cast<unsigned>(y), static_cast<unsigned>((shape.rest + y - 1) / y));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = shape.cluster > 1 ? 2 : 1;
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel, arguments);
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // reported here; not left for the caller's next call
  return to_status(error, name);
}

}  // namespace kda::cuda

// CUDA error codes as Status (spec G-4): lack of memory is OUT_OF_MEMORY, all else DEVICE_ERROR.
#pragma once

#include <cuda_runtime_api.h>

#include "base/status.h"

namespace kda::cuda {

// `what` names the call: "decode_kernel: launch".
inline Status to_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  const kda_status code = error == cudaErrorMemoryAllocation ? KDA_OUT_OF_MEMORY : KDA_DEVICE_ERROR;
  return Status(
      code, str_cat(what, ": wanted success, got ", cudaGetErrorName(error), " (", cudaGetErrorString(error), ")"));
}

#define KDA_RETURN_IF_CUDA_ERROR(call) KDA_RETURN_IF_ERROR(::kda::cuda::to_status((call), #call))

}  // namespace kda::cuda

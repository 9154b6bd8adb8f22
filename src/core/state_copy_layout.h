// Which pools a state copy accepts (spec C-3), which kind serves them (Y-1..Y-4) and the layout key (Y-9).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "core/select.h"

namespace kda {

enum class CopyKind { fused, bytes };
const char* copy_kind_name(CopyKind kind);

// What routing has to know of a device. Backends fill it in; tests make their own (spec T-9).
struct CopyDevice {
  kda_device_type type = KDA_CPU;
  bool has_image = true;  // machine code for this device is embedded in the library
  std::string name;       // for messages: "NVIDIA H200 (sm_90)"
};

// Everything that a prepared variant depends on. Data pointers, streams and request tensors are not in it.
struct CopyKey {
  CopyKind kind = CopyKind::fused;
  kda_device_type device_type = KDA_CPU;
  int32_t device_index = 0;
  kda_dtype pool_dtype = KDA_DTYPE_NONE;
  kda_dtype packed_dtype = KDA_DTYPE_NONE;
  int64_t shape[4] = {};
  int64_t strides[4] = {};  // of a dimension of size 1: what a dense view would have
  int32_t alignment = 0;    // base address mod 16

  bool operator==(const CopyKey&) const = default;
};

constexpr int kCopyAlignmentClass = 16;

// NULL and "auto", "fused", "bytes", "triton", "torch" (spec Y-3).
Result<std::string> parse_copy_backend(const char* name);

// C-3 and Y-26: bound, a tensor, on `device`, rank 4, not empty, inner dense, rows apart, sizes below 2^63.
Status check_copy_pool(const kda_tensor& pool, const kda_device& device);

// The packed dtype of a plan: the pool's, or fp32 for a 16-bit float pool (spec C-16).
Result<kda_dtype> copy_packed_dtype(kda_dtype pool, kda_dtype requested);

// Table Y-2: the first kind that fits, or the one that was asked for. `refused` receives the kinds passed over.
Result<CopyKind> route_copy(const kda_tensor& pool, kda_dtype packed_dtype, const CopyDevice& device,
                            const std::string& request, std::vector<Refused>& refused);
// The unmet conditions of one kind.
Refusals copy_refusals(CopyKind kind, const kda_tensor& pool, kda_dtype packed_dtype, const CopyDevice& device);

CopyKey make_copy_key(CopyKind kind, const kda_tensor& pool, kda_dtype packed_dtype);

// Y-13: the view has the prepared layout, else FAILED_PRECONDITION that says what differs.
Status check_prepared_layout(const CopyKey& key, const kda_tensor& view);

}  // namespace kda

#include "core/state_copy_layout.h"

#include <cstring>

#include "base/checked.h"

namespace kda {
namespace {

bool is_float_pool(kda_dtype dtype) { return dtype == KDA_FP32 || dtype == KDA_BF16 || dtype == KDA_FP16; }

// Strides as the key holds them: those of a dimension of size 1 say nothing about the layout.
void normalized_strides(const kda_tensor& pool, int64_t (&strides)[4]) {
  int64_t dense = 1;
  for (int i = 3; i >= 1; --i) {
    strides[i] = pool.shape[i] == 1 ? dense : pool.strides[i];
    dense *= pool.shape[i];
  }
  strides[0] = pool.strides[0];
}

}  // namespace

const char* copy_kind_name(CopyKind kind) { return kind == CopyKind::fused ? "fused" : "bytes"; }

Result<std::string> parse_copy_backend(const char* name) {
  if (name == nullptr || std::strcmp(name, "auto") == 0) return std::string("auto");
  if (std::strcmp(name, "fused") == 0 || std::strcmp(name, "triton") == 0) return std::string("fused");
  if (std::strcmp(name, "bytes") == 0 || std::strcmp(name, "torch") == 0) return std::string("bytes");
  return invalid_argument(
      "kda_state_copy_backend: wanted auto, fused, bytes, triton (= fused), torch (= bytes); got \"", name, "\"");
}

Status check_copy_pool(const kda_tensor& pool, const kda_device& device) {
  if (!present(pool)) return failed_precondition("pool: wanted a bound pool, got none");
  if (dtype_size(pool.dtype) == 0 || pool.rank < 0 || pool.rank > KDA_MAX_RANK) {
    return failed_precondition("pool: wanted a tensor, got dtype ", static_cast<int>(pool.dtype), " and rank ",
                               pool.rank);
  }
  if (pool.device.type != device.type || (device.type != KDA_CPU && pool.device.index != device.index)) {
    return invalid_argument("pool: wanted the context's device ", device_name(device.type), ":", device.index,
                            ", got ", device_name(pool.device.type), ":", pool.device.index);
  }
  if (pool.rank != 4) return invalid_argument("pool: wanted rank 4 [rows, HV, V, K], got ", describe(pool));
  for (int i = 0; i < 4; ++i) {
    if (pool.shape[i] < 1) return invalid_argument("pool: wanted no empty dimension, got ", shape_string(pool));
  }
  if (pool.data == nullptr) return failed_precondition("pool: wanted memory, got NULL for ", describe(pool));
  const auto payload = checked_product({pool.shape[1], pool.shape[2], pool.shape[3]});
  const auto size = static_cast<int64_t>(dtype_size(pool.dtype));
  const auto reach = payload ? checked_product({pool.shape[0] - 1, pool.strides[0]}) : std::nullopt;
  const auto elements = reach ? checked_add(*reach, *payload) : std::nullopt;
  if (!elements || !checked_mul(*elements, size)) {
    return invalid_argument("pool: wanted a size below 2^63 bytes, got ", describe(pool));
  }
  if (!inner_dense(pool, 3))
    return invalid_argument("pool: wanted the inner three dimensions dense, got ", describe(pool));
  if (pool.strides[0] < *payload) {
    return invalid_argument("pool: wanted stride(0) >= ", *payload, " (rows may not overlap), got ", pool.strides[0]);
  }
  return {};
}

Result<kda_dtype> copy_packed_dtype(kda_dtype pool, kda_dtype requested) {
  if (requested == KDA_DTYPE_NONE || requested == pool) return pool;
  if (requested == KDA_FP32 && (pool == KDA_BF16 || pool == KDA_FP16)) return requested;
  return invalid_argument("packed_dtype: wanted ", dtype_name(pool), " (the pool's)",
                          pool == KDA_BF16 || pool == KDA_FP16 ? " or fp32" : "", ", got ", dtype_name(requested));
}

Refusals copy_refusals(CopyKind kind, const kda_tensor& pool, kda_dtype packed_dtype, const CopyDevice& device) {
  Refusals r;
  if (!device.has_image) r.add("no_device_image", "machine code for this device in the library", device.name);
  if (kind == CopyKind::bytes) {
    if (packed_dtype != pool.dtype) {
      r.add("cast", "packed dtype equal to the pool's",
            str_cat(dtype_name(packed_dtype), " and ", dtype_name(pool.dtype)));
    }
    return r;
  }
  if (!is_float_pool(pool.dtype)) r.add("pool_dtype", "fp32, bf16 or fp16", dtype_name(pool.dtype));
  if (device.type != KDA_CPU) {  // CPU kernels load at any address
    const auto misaligned = reinterpret_cast<uintptr_t>(pool.data) % dtype_size(pool.dtype);
    if (misaligned != 0) {
      r.add("alignment", str_cat("a base address aligned to the element of ", dtype_size(pool.dtype), " bytes"),
            str_cat(misaligned, " bytes past it"));
    }
  }
  return r;
}

Result<CopyKind> route_copy(const kda_tensor& pool, kda_dtype packed_dtype, const CopyDevice& device,
                            const std::string& request, std::vector<Refused>& refused) {
  for (CopyKind kind : {CopyKind::fused, CopyKind::bytes}) {
    if (request != "auto" && request != copy_kind_name(kind)) continue;
    const Refusals r = copy_refusals(kind, pool, packed_dtype, device);
    if (r.empty()) return kind;
    refused.push_back({copy_kind_name(kind), r.text()});
  }
  return unsupported("state_copy: kind '", request, "' cannot serve ", describe(pool), list_refusals(refused));
}

CopyKey make_copy_key(CopyKind kind, const kda_tensor& pool, kda_dtype packed_dtype) {
  CopyKey key;
  key.kind = kind;
  key.device_type = pool.device.type;
  key.device_index = pool.device.index;
  key.pool_dtype = pool.dtype;
  key.packed_dtype = packed_dtype;
  for (int i = 0; i < 4; ++i) key.shape[i] = pool.shape[i];
  normalized_strides(pool, key.strides);
  key.alignment = static_cast<int32_t>(reinterpret_cast<uintptr_t>(pool.data) % kCopyAlignmentClass);
  return key;
}

Status check_prepared_layout(const CopyKey& key, const kda_tensor& view) {
  if (present(view) && view.rank == 4) {
    const CopyKey got = make_copy_key(key.kind, view, key.packed_dtype);
    if (got == key && view.data != nullptr) return {};
  }
  kda_tensor prepared{};
  prepared.dtype = key.pool_dtype;
  prepared.rank = 4;
  for (int i = 0; i < 4; ++i) {
    prepared.shape[i] = key.shape[i];
    prepared.strides[i] = key.strides[i];
  }
  return failed_precondition("pool: layout not prepared: wanted ", describe(prepared), " on ",
                             device_name(key.device_type), ":", key.device_index, " at an address of ", key.alignment,
                             " mod ", kCopyAlignmentClass, ", got ", describe(view), " on ",
                             device_name(view.device.type), ":", view.device.index, " at ", view.data);
}

}  // namespace kda

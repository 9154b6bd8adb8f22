// The built lean kernels of one pool dtype.
#pragma once

#include "cuda/kernels/decode/launch.h"
#include "cuda/kernels/decode/lean.cuh"
#include "cuda/kernels/decode/lean_records.cuh"

namespace kda::cuda {

template <class C>
KernelInfo lean_columns_kernel() {
  return {reinterpret_cast<const void*>(decode_lean_kernel<C>),
          "decode_lean_kernel",
          C::kThreads,
          C::Tile::kRows,
          0,
          C::kBlocks};
}

template <class C>
KernelInfo lean_records_kernel() {
  return {reinterpret_cast<const void*>(verify_record_lean_kernel<C>),
          "verify_record_lean_kernel",
          C::kThreads,
          C::Tile::kRows,
          static_cast<int32_t>(sizeof(LeanRecordToken)),
          C::kBlocks};
}

template <class Pool>
KernelInfo lean_kernel_of(LeanCall call) {
  switch (call) {
    case LeanCall::kToken: return lean_columns_kernel<LeanConfig<Pool, false, true>>();
    case LeanCall::kTokenOfFew:
      if constexpr (sizeof(Pool) == 4) return lean_columns_kernel<LeanConfig<Pool, false, true, 8>>();
      else return lean_columns_kernel<LeanConfig<Pool, false, true>>();
    case LeanCall::kTokenOfMany: return lean_columns_kernel<LeanConfig<Pool, false, false>>();
    case LeanCall::kWindow: return lean_columns_kernel<LeanConfig<Pool, true, true>>();
    case LeanCall::kRecords: return lean_records_kernel<LeanRecordConfig<Pool, true>>();
    case LeanCall::kRecordsOfMany:  // 16-bit states lose without hints (decode.md)
      return lean_records_kernel<LeanRecordConfig<Pool, (sizeof(Pool) < 4)>>();
  }
  return {};
}

}  // namespace kda::cuda

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

template <class Pool>
KernelInfo lean_kernel_of(LeanCall call) {
  using Records = LeanRecordConfig<Pool>;
  switch (call) {
    case LeanCall::kToken: return lean_columns_kernel<LeanConfig<Pool, false, true>>();
    case LeanCall::kTokenOfFew:
      if constexpr (sizeof(Pool) == 4) return lean_columns_kernel<LeanConfig<Pool, false, true, 8>>();
      else return lean_columns_kernel<LeanConfig<Pool, false, true>>();
    case LeanCall::kTokenOfMany: return lean_columns_kernel<LeanConfig<Pool, false, false>>();
    case LeanCall::kWindow: return lean_columns_kernel<LeanConfig<Pool, true, true>>();
    case LeanCall::kRecords:
      return {reinterpret_cast<const void*>(verify_record_lean_kernel<Records>),
              "verify_record_lean_kernel",
              Records::kThreads,
              Records::Tile::kRows,
              static_cast<int32_t>(sizeof(LeanRecordToken)),
              Records::kBlocks};
  }
  return {};
}

}  // namespace kda::cuda

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
KernelInfo lean_kernel_of(Flow flow, bool many) {
  if (flow == Flow::kRecords) {
    using C = LeanRecordConfig<Pool>;
    return {reinterpret_cast<const void*>(verify_record_lean_kernel<C>),
            "verify_record_lean_kernel",
            C::kThreads,
            C::Tile::kRows,
            static_cast<int32_t>(sizeof(LeanRecordToken)),
            C::kBlocks,
            C::kStateBytes};
  }
  return many ? lean_columns_kernel<LeanConfig<Pool, true>>() : lean_columns_kernel<LeanConfig<Pool, false>>();
}

}  // namespace kda::cuda

// Gates that all attention operators of the CPU backend have in common (spec, Z-9).
#pragma once

#include "base/tensor.h"
#include "core/backend.h"

namespace kda::cpu {

constexpr int64_t kMaxKeyDim = 256;
constexpr int64_t kMaxValueDim = 1024;

inline void check_attention_gates(const kda_attention_spec& a, Refusals& refusals) {
  if (a.key_dim > kMaxKeyDim) refusals.add("head_dim", str_cat("K of 1 to ", kMaxKeyDim), a.key_dim);
  if (a.value_dim > kMaxValueDim) refusals.add("head_dim", str_cat("V of 1 to ", kMaxValueDim), a.value_dim);
  if (a.state_dtype == KDA_FP64) refusals.add("pool_dtype", "fp32, bf16 or fp16", dtype_name(a.state_dtype));
  if (a.out_dtype != a.io_dtype) refusals.add("out_dtype", dtype_name(a.io_dtype), dtype_name(a.out_dtype));
}

}  // namespace kda::cpu

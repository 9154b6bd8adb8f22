// Gates that the attention operators of the CPU backend have in common (spec, Z-9).
#pragma once

#include "base/tensor.h"
#include "core/backend.h"
#include "cpu/common.h"

namespace kda::cpu {

inline void check_head_dims(int64_t key_dim, int64_t value_dim, Refusals& refusals) {
  if (key_dim > kMaxKeyDim) refusals.add("head_dim", str_cat("K <= ", kMaxKeyDim), key_dim);
  if (value_dim > kMaxValueDim) refusals.add("head_dim", str_cat("V <= ", kMaxValueDim), value_dim);
}

// Outputs have the dtype of the inputs; fp64 belongs to the reference.
inline void check_out_dtype(kda_dtype io, kda_dtype out, Refusals& refusals) {
  if (out != io) refusals.add("io_dtype", str_cat("out in ", dtype_name(io), " as the inputs"), dtype_name(out));
}

inline void check_attention_gates(const kda_attention_spec& a, Refusals& refusals) {
  check_head_dims(a.key_dim, a.value_dim, refusals);
  check_out_dtype(a.io_dtype, a.out_dtype, refusals);
  if (a.state_dtype == KDA_FP64) refusals.add("pool_dtype", "fp32, bf16 or fp16", dtype_name(a.state_dtype));
}

}  // namespace kda::cpu

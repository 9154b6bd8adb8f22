// Prefill of any shape, token by token (spec R-14): arguments of its kernel.
#pragma once

#include "cuda/kernels/common/kernel_info.h"
#include "cuda/kernels/recurrence/params.h"

namespace kda::cuda {

// Checkpoints of a call (K-1): into slots of a pool, or packed rows (n, c).
struct CheckpointRef {
  IndexRef offsets;  // [N, Ck]; absent: none
  IndexRef slots;    // absent: packed
  void* data = nullptr;
  Dtype dtype = Dtype::kFp32;
  int64_t row_stride = 0;  // of n, packed
  int64_t stride = 0;      // of a slot, or of c
  int64_t slot_count = 0;
};

struct PrefillParams {
  AttentionForm form;
  HeadSplit split;
  SequenceRef sequences;
  DecodeRule rule;  // its slots alone
  GateRef gate_rule;
  TokenRef q, k;  // [T, H, K]
  TokenRef v;     // [T, HV, V]
  TokenRef gate;  // [T, HV, K] raw
  TokenRef beta;  // [T, HV]
  PoolRef pool;   // [slots, HV, V, K]
  Dtype pool_dtype = Dtype::kFp32;
  int32_t has_pool = 0;
  int32_t stores = 0;  // final states are wanted
  PoolRef final;       // packed final states [N, HV, V, K]; absent: write slots of the pool
  Dtype final_dtype = Dtype::kFp32;
  CheckpointRef checkpoints;
  OutRef out;  // [T, HV, V]
};

KernelInfo prefill_portable_kernel_info(Shape shape);

}  // namespace kda::cuda

// Decode, verify and verify_record (spec V-1..V-10b), and commit (V-10): arguments of their kernels.
#pragma once

#include "cuda/kernels/recurrence/params.h"

namespace kda::cuda {

struct DecodeParams {
  AttentionForm form;
  HeadSplit split;
  SequenceRef sequences;
  DecodeRule rule;
  GateRef gate_rule;
  TokenRef q, k;  // [T, H, K]
  TokenRef v;     // [T, HV, V]
  TokenRef gate;  // [T, HV, K] raw
  TokenRef beta;  // [T, HV]
  PoolRef pool;   // [slots, HV, V, K]
  RecordRef records;
  OutRef out;           // [T, HV, V]
  int32_t vectors = 0;  // rows of the pool are whole, aligned 16-byte pieces
};

struct CommitParams {
  AttentionForm form;
  HeadSplit split;
  SlotRef slots;
  const int32_t* accepted = nullptr;  // [N]
  int64_t accepted_stride = 0;
  const int32_t* num_active = nullptr;
  int32_t sequences = 0;  // N
  int32_t width = 1;
  GateRef gate_rule;
  Dtype gate_dtype = Dtype::kBf16;
  PoolRef pool;
  RecordRef records;
  int32_t vectors = 0;
  // Conv windows (W-4): blocks behind those of the states move them.
  int32_t conv_parts = 0, conv_width = 0;
  WindowRef window[3];
  int32_t channels[3] = {};
};

}  // namespace kda::cuda

// Arguments of the lean kernels: the common decode, verify and verify_record call in 32-bit terms.
#pragma once

#include "cuda/kernels/recurrence/params.h"

namespace kda::cuda {

// Rows [row, head, 128], strides in bytes; every row is whole, aligned groups of four elements.
struct LeanTensor {
  char* data = nullptr;
  uint32_t row_bytes = 0, head_bytes = 0;

  KDA_HOST_DEVICE char* at(int32_t row, int32_t head) const {
    return data + static_cast<uint64_t>(static_cast<uint32_t>(row)) * row_bytes +
           static_cast<uint64_t>(static_cast<uint32_t>(head)) * head_bytes;
  }
};

// Usual forms: every tensor bf16, q and k normalised, beta as logits.
enum class LeanForm : int32_t { kOther, kBounded, kSoftplus };

struct LeanParams {
  LeanForm form = LeanForm::kOther;
  float scale = 1;
  int32_t qk_norm = 1, beta_logits = 1, beta_doubled = 0;
  Dtype io = Dtype::kBf16;  // of q, k, v: 16-bit
  Dtype gate_dtype = Dtype::kBf16, beta_dtype = Dtype::kBf16, out_dtype = Dtype::kBf16;
  int32_t query_shift = 0;            // query head = value head >> this
  int32_t sequences = 0;              // N
  int32_t tokens = 0;                 // T
  int32_t wave = 0;                   // blocks that run at once, at least
  int32_t asks = 1;                   // of them, each asks the L2 for its state early
  const int32_t* slots = nullptr;     // [N, columns], or more columns that are not looked at
  const int32_t* cu = nullptr;        // [N + 1]; null: sequence n is row n
  const int32_t* accepted = nullptr;  // [N]; null: 1
  const int32_t* active = nullptr;    // null: N
  int32_t slots_row = 0, slots_column = 0, columns = 1;
  int32_t cu_stride = 1, accepted_stride = 1;
  int32_t pool_slots = 0, null_slot = -1;
  LeanTensor q, k, v, gate, beta, out;
  LeanTensor pool;  // of a row and a head: its state
  GateRef gate_rule;
};

struct LeanRecordParams {
  LeanParams call;
  LeanTensor u, kg;  // row: of the records
  uint32_t u_token_bytes = 0, kg_token_bytes = 0;
  const int32_t* count = nullptr;
  const int32_t* record_rows = nullptr;  // [N]; null: the slot
  int32_t count_stride = 1, record_rows_stride = 1;
  int32_t rows = 0;
  int32_t fold = 0;
};

}  // namespace kda::cuda

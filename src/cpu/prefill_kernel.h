// The boundary between the prefill glue (slots, offsets, tasks: cpu/prefill.cc, cpu/segments.cc) and its SIMD
// kernels (cpu/simd/prefill_simd.cc): plain structs, one table of functions per instruction set.
#pragma once

#include <cstdint>

#include "base/tensor.h"
#include "cpu/common.h"
#include "cpu/isa.h"
#include "kda/kda.h"

namespace kda::cpu {

// Rows of one head: row t starts at data + t * stride and holds dense elements. Absent: data == nullptr.
struct TokenRows {
  const char* data = nullptr;
  kda_dtype dtype = KDA_DTYPE_NONE;
  int64_t stride = 0;  // bytes
};

// A dense [V, K] state of one value head in some dtype. Absent: data == nullptr.
struct StateRef {
  char* data = nullptr;
  kda_dtype dtype = KDA_DTYPE_NONE;
};

// What a plan's attention spec means to the kernels.
struct AttentionForm {
  float beta_gain = 1;  // 2 with allow_neg_eigval (E-5)
  bool beta_logits = true;
  bool normalize = true;  // E-4
  float scale = 1;        // E-6
};

// Where states at checkpoint offsets go (K-1): into slots, or into a packed tensor whose row c is `base` +
// c * stride.
struct CheckpointRows {
  IndexView offsets;      // empty: none
  IndexView slots;        // empty: packed
  int64_t num_slots = 0;  // of the pool
  int64_t null_slot = -1;
  char* base = nullptr;  // this head's state in slot 0, or in packed row 0
  int64_t stride = 0;    // bytes from slot to slot, or row to row
  kda_dtype dtype = KDA_DTYPE_NONE;
};

// One value head of one sequence, or a block of its value columns: the unit of parallel work.
struct HeadTask {
  AttentionForm form;
  int64_t length = 0;  // tokens, >= 1
  int64_t key_dim = 0, value_dim = 0;
  // Value columns [column_begin, column_end) of the task; column_begin is a multiple of the panel width.
  // Columns >= value_dim are those of a segment map (S-3): v = 0, and they start from the identity.
  int64_t column_begin = 0, column_end = 0;
  TokenRows q, k, v, gate, beta;  // q absent: no output
  GateHead gate_head;
  const float* gate_bias = nullptr;  // [K], may be absent
  StateRef initial;                  // absent: zero (fresh)
  StateRef final;                    // absent: not stored
  CheckpointRows checkpoints;
  // Output row of token t: out.data + row * out.stride, row = out_rows[t] if given, else t; entries outside
  // [0, num_out_rows) are skipped.
  char* out = nullptr;
  kda_dtype out_dtype = KDA_DTYPE_NONE;
  int64_t out_stride = 0;  // bytes
  IndexView out_rows;
  int64_t num_out_rows = 0;
};

// One value head of a segment merge (S-4), rows [row_begin, row_end) of its states.
struct MergeTask {
  int64_t key_dim = 0, value_dim = 0, row_begin = 0, row_end = 0, segments = 0;
  const float* initial = nullptr;    // [V, K], absent: zero
  const float* summaries = nullptr;  // segment 0: B [V, K], then M [K, K]
  int64_t summary_stride = 0;        // elements from segment to segment
  const uint8_t* present = nullptr;  // absent: all are
  int64_t present_stride = 0;
  float* starts = nullptr;  // segment 0's start state [V, K], absent: not wanted
  int64_t start_stride = 0;
  float* final = nullptr;  // [V, K], absent: not wanted
};

// Most heads of one sequence that are run together.
constexpr int64_t kMaxHeadGroup = 4;

struct PrefillFunctions {
  // Value columns that a task's block may be divided into: blocks begin at multiples of it.
  int64_t panel_columns;
  int64_t (*scratch_bytes)(int64_t key_dim, int64_t columns, int64_t heads);
  // Heads of one sequence, alike in length, sizes and columns.
  void (*run_heads)(const HeadTask* tasks, int64_t heads, void* scratch);
  int64_t (*merge_scratch_bytes)(int64_t key_dim);
  void (*merge)(const MergeTask& task, void* scratch);
};

const PrefillFunctions& prefill_functions(Isa isa);

}  // namespace kda::cpu

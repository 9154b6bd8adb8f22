// State pools and records (P-3) as a decode, verify or commit call finds them.
#pragma once

#include <kda/kda.h>

#include "conformance/attention.h"
#include "conformance/cases.h"
#include "conformance/decode_rows.h"
#include "conformance/tensor.h"

namespace kda::conformance {

struct Records {
  Tensor u, kg, count, record_rows;
  kda_records view() const { return {u, kg, count, record_rows}; }
};

struct RecordsMade {
  RowTables tables;
  Tensor pool;      // canaries; random states where rows start
  Records records;  // absent without records
};

// Pools of `rows` rows. With `records`, record tensors; with `filled` they hold what an earlier verify of 0 to width
// tokens a row left (made by the reference), as a fold or a commit wants them.
RecordsMade make_rows(const AttentionChoice& attention, const RowChoice& choice, int64_t rows, int64_t columns,
                      kda_dtype pool, bool records, bool filled, bool record_rows);

// u within the limit, keys and raw gates by their bits, counts equal, untouched rows untouched.
void check_records(Report& report, const Records& before, const Records& after, const Records& oracle, double limit);

}  // namespace kda::conformance

// The comparison of spec N-9: relative L2 over the tensor and over every head, NaN and Inf masks first, the
// worst place named. No correlation (F07).
#pragma once

#include <kda/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kda::serve {

struct TensorError {
  double rel = 0;       // over the tensor
  double head_rel = 0;  // largest over one head
  double row_rel = 0;   // largest over one (row, head), relative to that row's own norm
  int64_t head = 0;     // of the largest head_rel
  int64_t row = 0;      // of the largest difference in that head
  bool masks_equal = true;
  int64_t mask_row = 0, mask_head = 0;  // first place where the masks differ

  // The tensor within `limit`, a head within twice that (spec N-9). NaN errors never pass.
  bool within(double limit) const { return masks_equal && rel <= limit && head_rel <= 2 * limit; }
  std::string describe(double limit) const;
};

// got: [rows, heads, dim] of `dtype`; want: the same in fp64.
TensorError compare(const void* got, kda_dtype dtype, const double* want, int64_t rows, int64_t heads, int64_t dim);

}  // namespace kda::serve

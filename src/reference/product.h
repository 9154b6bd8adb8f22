// fp64 products of row tiles with a panel of columns: the inner part of the oracle's projections.
#pragma once

#include <cstdint>

namespace kda::reference {

constexpr int64_t kPanelColumns = 16;

// y[r, c] += sum over k of x[r, k] * panel[k, c], k < n, c < kPanelColumns; `panel` and `y` are 64-byte aligned, the
// row strides are in elements, y's a multiple of 8. Each element is one chain of fused multiply-adds in order of k,
// so that its bits depend on nothing else: not on the tile, the number of rows, a cut of k, or the machine.
void add_product(const double* x, int64_t x_stride, int64_t rows, const double* panel, int64_t n, double* y,
                 int64_t y_stride);

}  // namespace kda::reference

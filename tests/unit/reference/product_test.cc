// The tiles of the oracle's projections: every element is one chain of fused multiply-adds, whatever the machine
// takes.
#include "reference/product.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "conformance/random.h"

namespace kda::conformance::test {

struct Aligned {
  explicit Aligned(int64_t n)
      : p(static_cast<double*>(std::aligned_alloc(64, static_cast<size_t>(n + 7) / 8 * 64))) {}
  ~Aligned() { std::free(p); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  double* p;
};

TEST(Product, E11_EveryElementIsOneChainOfFusedMultiplyAdds) {
  constexpr int64_t kColumns = reference::kPanelColumns, kStride = 24;
  for (const int64_t rows : {1, 2, 3, 4, 7, 8, 9, 17}) {
    for (const int64_t n : {1, 5, 64, 301}) {
      const int64_t x_stride = n + 3;
      const std::vector<double> x = uniform_vector(1, rows * x_stride), w = uniform_vector(2, n * kColumns);
      const Aligned panel(n * kColumns), y(rows * kStride);
      std::copy(w.begin(), w.end(), panel.p);
      std::fill_n(y.p, rows * kStride, 0.25);
      // In two pieces, as a cut of the inner dimension has it.
      const int64_t cut = n / 2;
      reference::add_product(x.data(), x_stride, rows, panel.p, cut, y.p, kStride);
      reference::add_product(x.data() + cut, x_stride, rows, panel.p + cut * kColumns, n - cut, y.p, kStride);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < kStride; ++c) {
          double sum = 0.25;
          for (int64_t k = 0; c < kColumns && k < n; ++k) {
            sum = std::fma(x[static_cast<size_t>(r * x_stride + k)], w[static_cast<size_t>(k * kColumns + c)], sum);
          }
          ASSERT_EQ(y.p[r * kStride + c], sum) << rows << " rows, n " << n << ": " << r << ", " << c;
        }
      }
    }
  }
}

}  // namespace kda::conformance::test

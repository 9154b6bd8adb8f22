// y = x·Wᵀ + bias in fp64, rounded once to y's dtype (spec L-7, E-11). A weight is kept as it came, dense, and
// widened by blocks of rows; the dot products run over eight partial sums, which lets any compiler use vectors
// without changing what is computed from machine to machine.
#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/sanitizer.h"
#include "reference/projections.h"
#include "reference/scalar.h"

namespace kda::reference {
namespace {

constexpr int64_t kColumns = 16;  // rows of W that a task widens

struct Part {
  kda_dtype dtype = KDA_FP32;
  int64_t rows = 0;
  std::vector<char> data;  // [rows, cols] dense
  std::vector<double> bias;
};

struct DenseMatrix final : PackedMatrix {
  std::vector<Part> parts;
  int64_t cols = 0, size = 0;
  int64_t bytes() const override { return size; }
};

constexpr int kSums = 8;

#if defined(__x86_64__) && !defined(KDA_ADDRESS_SANITIZER) && !defined(KDA_THREAD_SANITIZER)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void dot_tile(const double* x, int64_t x_stride, int64_t rows, const double* w, int64_t n, double* y) {
  for (int64_t r = 0; r < rows; ++r) {
    const double* a = x + r * x_stride;
    for (int64_t c = 0; c < kColumns; ++c) {
      const double* b = w + c * n;
      double sums[kSums] = {};
      for (int64_t k = 0; k < n; k += kSums) {
        for (int i = 0; i < kSums; ++i) sums[i] += a[k + i] * b[k + i];
      }
      double total = 0;
      for (double s : sums) total += s;
      y[r * kColumns + c] = total;
    }
  }
}

class Fp64Projection final : public ProjectionBackend {
 public:
  std::string_view name() const override { return "reference"; }
  kda_device_type device() const override { return KDA_CPU; }
  void check(kda_dtype, const Context&, Refusals&) const override {}

  Result<std::unique_ptr<PackedMatrix>> pack(const Context&, kda_dtype, std::span<const ProjectionPart> parts,
                                             int64_t) const override {
    auto m = std::make_unique<DenseMatrix>();
    m->cols = parts.front().weight.cols;
    for (const ProjectionPart& from : parts) {
      const MatrixView& w = from.weight;
      const auto element = static_cast<int64_t>(dtype_size(w.dtype));
      Part part{w.dtype, w.rows, std::vector<char>(static_cast<size_t>(w.rows * w.cols * element)), {}};
      for (int64_t r = 0; r < w.rows; ++r) {
        std::memcpy(part.data.data() + r * w.cols * element,
                    static_cast<const char*>(w.data) + r * w.stride * element, static_cast<size_t>(w.cols * element));
      }
      if (from.bias != nullptr) part.bias.assign(from.bias, from.bias + w.rows);
      m->size += static_cast<int64_t>(part.data.size());
      m->parts.push_back(std::move(part));
    }
    return std::unique_ptr<PackedMatrix>(std::move(m));
  }

  Result<std::unique_ptr<PreparedProjection>> prepare(const Context& context, const ProjectionShape& shape,
                                                      const ProjectionOptions& options) const override {
    return plain_projection(*this, context, shape, options);
  }
  int64_t workspace_bytes(const Context& context, kda_dtype, int64_t tokens, int64_t cols) const {
    return 8 * (tokens * width(cols) + context.parallel.num_threads * kColumns * (width(cols) + kBlockRows));
  }

  Status run(const Context& context, const ProjectionCall& call) const {
    const auto& m = static_cast<const DenseMatrix&>(*call.weights);
    const int64_t tokens = call.x.shape[0], n = width(m.cols);
    auto* x = static_cast<double*>(call.workspace);
    double* const scratch = x + tokens * n;
    context.parallel.for_each(tokens, [&](int64_t t, int32_t) {
      load_row(at(call.x, t), call.x.dtype, m.cols, x + t * n);
      std::fill(x + t * n + m.cols, x + (t + 1) * n, 0.0);
    });
    for (size_t i = 0; i < m.parts.size(); ++i) {
      const Part& part = m.parts[i];
      context.parallel.for_each(ceil_div(part.rows, kColumns), [&](int64_t block, int32_t worker) {
        double* w = scratch + worker * kColumns * (n + kBlockRows);
        run_block(m.cols, part, block * kColumns, x, tokens, call.outputs[i], w);
      });
    }
    return {};
  }

 private:
  static constexpr int64_t kBlockRows = 8;  // of x that are multiplied at a time
  static int64_t width(int64_t cols) { return round_up(cols, kSums); }

  // Columns [first, first + kColumns) of y.
  static void run_block(int64_t cols, const Part& part, int64_t first, const double* x, int64_t tokens,
                        const kda_tensor& y, double* w) {
    const int64_t n = width(cols), count = std::min(kColumns, part.rows - first);
    const auto element = static_cast<int64_t>(dtype_size(part.dtype));
    std::fill(w, w + kColumns * n, 0.0);
    for (int64_t c = 0; c < count; ++c) {
      load_row(part.data.data() + (first + c) * cols * element, part.dtype, cols, w + c * n);
    }
    double* const sums = w + kColumns * n;
    for (int64_t t = 0; t < tokens; t += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, tokens - t);
      dot_tile(x + t * n, n, rows, w, n, sums);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < count; ++c) {
          const double bias = part.bias.empty() ? 0 : part.bias[static_cast<size_t>(first + c)];
          store(advance(at(y, t + r), y.dtype, first + c), y.dtype, sums[r * kColumns + c] + bias);
        }
      }
    }
  }
};

}  // namespace

const ProjectionBackend* projection() {
  static const Fp64Projection backend;
  return &backend;
}

}  // namespace kda::reference

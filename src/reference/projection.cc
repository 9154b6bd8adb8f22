// y = x·Wᵀ + bias in fp64, rounded once to y's dtype (spec L-7, E-11). A weight is kept as it came, dense; a task
// widens a block of its rows, a piece of the inner dimension at a time, and adds that piece's products to the block's
// sums for all tokens. Every element of y is one chain of fused multiply-adds in order of the inner dimension.
#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "reference/product.h"
#include "reference/projections.h"
#include "reference/scalar.h"

namespace kda::reference {
namespace {

constexpr int64_t kColumns = 64;  // rows of W that a task takes: x is read once for so many
constexpr int64_t kDepth =
    256;  // of the inner dimension at a time, so that the widened block stays in a core's cache
static_assert(kColumns % kPanelColumns == 0);

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

// w[r, c] -> panel[c, r] of `depth` columns, widened. Rows behind the last are zero.
template <class T>
void widen(const T* w, int64_t stride, int64_t rows, int64_t depth, double* panel) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < depth; ++c) {
      panel[c * kPanelColumns + r] = static_cast<double>(to_float(w[r * stride + c]));
    }
  }
  for (int64_t c = 0; rows < kPanelColumns && c < depth; ++c) {
    std::fill(panel + c * kPanelColumns + rows, panel + (c + 1) * kPanelColumns, 0.0);
  }
}

void widen(const Part& part, int64_t cols, int64_t row, int64_t col, int64_t depth, double* panel) {
  const int64_t rows = std::clamp<int64_t>(part.rows - row, 0, kPanelColumns);
  const char* const from = advance(part.data.data(), part.dtype, row * cols + col);
  if (part.dtype == KDA_BF16) widen(reinterpret_cast<const bf16*>(from), cols, rows, depth, panel);
  else widen(reinterpret_cast<const float*>(from), cols, rows, depth, panel);
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
    return 8 * (tokens * row_stride(cols) + context.parallel.num_threads * worker_doubles(tokens));
  }

  Status run(const Context& context, const ProjectionCall& call) const {
    const auto& m = static_cast<const DenseMatrix&>(*call.weights);
    const int64_t tokens = call.x.shape[0], n = row_stride(m.cols);
    auto* x = static_cast<double*>(call.workspace);
    double* const scratch = x + tokens * n;
    context.parallel.for_each(tokens,
                              [&](int64_t t, int32_t) { load_row(at(call.x, t), call.x.dtype, m.cols, x + t * n); });
    int64_t blocks = 0;
    for (const Part& part : m.parts) blocks += ceil_div(part.rows, kColumns);
    context.parallel.for_each(blocks, [&](int64_t block, int32_t worker) {
      size_t i = 0;
      for (; block >= ceil_div(m.parts[i].rows, kColumns); ++i) block -= ceil_div(m.parts[i].rows, kColumns);
      run_block(m.cols, m.parts[i], block * kColumns, x, tokens, call.outputs[i],
                scratch + worker * worker_doubles(tokens));
    });
    return {};
  }

 private:
  static int64_t row_stride(int64_t cols) {
    return round_up(cols, 8) + 8;
  }  // no power of two: rows of a tile would
     // meet in the same cache sets
  static int64_t worker_doubles(int64_t tokens) { return kColumns * (kDepth + tokens); }

  // Columns [first, first + kColumns) of y.
  static void run_block(int64_t cols, const Part& part, int64_t first, const double* x, int64_t tokens,
                        const kda_tensor& y, double* scratch) {
    const int64_t count = std::min(kColumns, part.rows - first), panels = ceil_div(count, kPanelColumns);
    double* const sums = scratch + kColumns * kDepth;  // [tokens, kColumns]
    std::fill(sums, sums + tokens * kColumns, 0.0);
    for (int64_t col = 0; col < cols; col += kDepth) {
      const int64_t depth = std::min(kDepth, cols - col);
      for (int64_t p = 0; p < panels; ++p) {
        widen(part, cols, first + p * kPanelColumns, col, depth, scratch + p * kPanelColumns * kDepth);
      }
      for (int64_t t = 0; t < tokens; t += kRows) {
        const int64_t rows = std::min(kRows, tokens - t);
        for (int64_t p = 0; p < panels; ++p) {
          add_product(x + t * row_stride(cols) + col, row_stride(cols), rows, scratch + p * kPanelColumns * kDepth,
                      depth, sums + t * kColumns + p * kPanelColumns, kColumns);
        }
      }
    }
    for (int64_t t = 0; t < tokens; ++t) {
      double* const row = sums + t * kColumns;
      for (int64_t c = 0; c < count && !part.bias.empty(); ++c) row[c] += part.bias[static_cast<size_t>(first + c)];
      store_row(advance(at(y, t), y.dtype, first), y.dtype, count, row);
    }
  }

  static constexpr int64_t kRows = 8;  // of x that stay in the first-level cache for all panels
};

}  // namespace

const ProjectionBackend* projection() {
  static const Fp64Projection backend;
  return &backend;
}

}  // namespace kda::reference

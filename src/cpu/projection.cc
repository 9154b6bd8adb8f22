// Projection backend "portable": packing and tasks; the kernel is cpu/projection_kernel.cc.
//
// Weights lie in panels of 32 rows of W, so that one pass over a panel serves up to 12 rows of x; bf16 weights stay
// bf16 (half the memory traffic where few rows are multiplied) and are widened in registers. A task is a group of
// panels that stays in L2 times a range of rows.
#include "core/projection.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/checked.h"
#include "base/half.h"
#include "cpu/common.h"
#include "cpu/denormals.h"
#include "cpu/projection_call.h"
#include "cpu/projections.h"

namespace kda::cpu {
namespace {

constexpr int64_t kGroupBytes = 512 << 10;  // of panels that a task keeps in L2
constexpr int64_t kTaskRows = 768;

struct AlignedFree {
  void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
};

struct PanelPart {
  int64_t rows = 0;  // of W
  int64_t first_panel = 0;
  std::vector<float> bias;  // empty: none
};

struct PanelMatrix final : PackedMatrix {
  ProjectionPanels panels;
  int64_t panel_count = 0;
  std::vector<PanelPart> parts;
  std::vector<size_t> part_of;  // panel -> part
  std::unique_ptr<std::byte[], AlignedFree> memory;
  int64_t bytes() const override {
    return panel_count * panels.cols * kProjectionPanel * static_cast<int64_t>(dtype_size(panels.dtype));
  }
};

// Panel element (k, c) = W[first + c][k], zero past the last row.
template <class To, class From>
void fill_panel(const MatrixView& w, int64_t first, To* panel) {
  for (int64_t c = 0; c < kProjectionPanel; ++c) {
    const bool inside = first + c < w.rows;
    const int64_t row = (first + c) * w.stride;
    for (int64_t k = 0; k < w.cols; ++k) {
      To& to = panel[k * kProjectionPanel + c];
      if constexpr (std::is_same_v<To, From>) {
        to = inside ? unaligned<From>(w.data, row + k) : To{};
      } else {
        to = inside ? to_float(unaligned<From>(w.data, row + k)) : 0.0f;
      }
    }
  }
}

class PortableProjection final : public ProjectionBackend {
 public:
  std::string_view name() const override { return "portable"; }
  kda_device_type device() const override { return KDA_CPU; }
  void check(kda_dtype, const Context&, Refusals&) const override {}

  Result<std::unique_ptr<PackedMatrix>> pack(const Context& context, kda_dtype, std::span<const ProjectionPart> parts,
                                             int64_t) const override {
    auto m = std::make_unique<PanelMatrix>();
    m->panels.cols = parts.front().weight.cols;
    const bool narrow =
        std::all_of(parts.begin(), parts.end(), [](const auto& p) { return p.weight.dtype == KDA_BF16; });
    m->panels.dtype = narrow ? KDA_BF16 : KDA_FP32;
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t rows = parts[i].weight.rows, count = ceil_div(rows, kProjectionPanel);
      PanelPart part{rows, m->panel_count, {}};
      if (parts[i].bias != nullptr) part.bias.assign(parts[i].bias, parts[i].bias + rows);
      m->parts.push_back(std::move(part));
      m->part_of.insert(m->part_of.end(), static_cast<size_t>(count), i);
      m->panel_count += count;
    }
    auto* data = ::operator new[](static_cast<size_t>(m->bytes()), std::align_val_t{64}, std::nothrow);
    if (data == nullptr) return Status(KDA_OUT_OF_MEMORY, str_cat("packed weights: ", m->bytes(), " bytes"));
    m->memory.reset(static_cast<std::byte*>(data));
    m->panels.data = data;
    const int64_t elements = m->panels.cols * kProjectionPanel;
    context.parallel.for_each(m->panel_count, [&](int64_t panel, int32_t) {
      const size_t i = m->part_of[static_cast<size_t>(panel)];
      const MatrixView& w = parts[i].weight;
      const int64_t first = (panel - m->parts[i].first_panel) * kProjectionPanel;
      if (narrow) return fill_panel<bf16, bf16>(w, first, static_cast<bf16*>(data) + panel * elements);
      float* to = static_cast<float*>(data) + panel * elements;
      if (w.dtype == KDA_BF16) return fill_panel<float, bf16>(w, first, to);
      fill_panel<float, float>(w, first, to);
    });
    return std::unique_ptr<PackedMatrix>(std::move(m));
  }

  Result<std::unique_ptr<PreparedProjection>> prepare(const Context& context, const ProjectionShape& shape,
                                                      const ProjectionOptions& options) const override {
    return plain_projection(*this, context, shape, options);
  }
  int64_t workspace_bytes(const Context& context, kda_dtype, int64_t, int64_t cols) const {
    return context.parallel.num_threads * scratch_floats(cols) * 4;
  }

  Status run(const Context& context, const ProjectionCall& call) const {
    const auto& m = static_cast<const PanelMatrix&>(*call.weights);
    const ProjectionFunctions& functions = projection_functions(context_isa(context.isa));
    const int64_t panel_bytes = m.bytes() / std::max<int64_t>(1, m.panel_count);
    const int64_t group = std::clamp<int64_t>(kGroupBytes / std::max<int64_t>(1, panel_bytes), 1, 16);
    const int64_t groups = ceil_div(m.panel_count, group), tokens = call.x.shape[0];
    const int64_t ranges = ceil_div(tokens, kTaskRows);
    context.parallel.for_each(groups * ranges, [&](int64_t task, int32_t worker) {
      const FlushDenormals flush;
      const int64_t p0 = task / ranges * group, p1 = std::min(m.panel_count, p0 + group);
      const int64_t r0 = task % ranges * kTaskRows, r1 = std::min(tokens, r0 + kTaskRows);
      float* scratch = static_cast<float*>(call.workspace) + worker * scratch_floats(m.panels.cols);
      for (int64_t r = r0; r < r1; r += kProjectionRows) {
        run_rows(functions, m, call, r, std::min(kProjectionRows, r1 - r), p0, p1, scratch);
      }
    });
    return {};
  }

 private:
  // One worker's: rows of x in fp32 and a tile of y.
  static int64_t scratch_floats(int64_t cols) { return kProjectionRows * (padded(cols) + kProjectionPanel); }

  static void run_rows(const ProjectionFunctions& functions, const PanelMatrix& m, const ProjectionCall& call,
                       int64_t first, int64_t rows, int64_t p0, int64_t p1, float* scratch) {
    const int64_t cols = m.panels.cols, size = static_cast<int64_t>(dtype_size(call.x.dtype));
    const char* from = static_cast<const char*>(call.x.data) + first * call.x.strides[0] * size;
    float* const tile = scratch + kProjectionRows * padded(cols);
    const float* x = scratch;
    int64_t stride = padded(cols);
    if (call.x.dtype == KDA_FP32) {
      x = reinterpret_cast<const float*>(from);
      stride = call.x.strides[0];
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        functions.load(call.x.dtype, from + r * call.x.strides[0] * size, cols, scratch + r * stride);
      }
    }
    for (int64_t panel = p0; panel < p1; ++panel) {
      functions.multiply(x, stride, rows, m.panels, panel, tile);
      const size_t i = m.part_of[static_cast<size_t>(panel)];
      const PanelPart& part = m.parts[i];
      const int64_t column = (panel - part.first_panel) * kProjectionPanel;
      const int64_t n = std::min(kProjectionPanel, part.rows - column);
      const kda_tensor& y = call.outputs[i];
      const float* bias = part.bias.empty() ? nullptr : part.bias.data() + column;
      for (int64_t r = 0; r < rows; ++r) {
        char* to = static_cast<char*>(y.data) +
                   ((first + r) * y.strides[0] + column) * static_cast<int64_t>(dtype_size(y.dtype));
        functions.store(y.dtype, tile + r * kProjectionPanel, bias, n, to);
      }
    }
  }
};

}  // namespace

const ProjectionBackend* portable_projection() {
  static const PortableProjection backend;
  return &backend;
}

}  // namespace kda::cpu

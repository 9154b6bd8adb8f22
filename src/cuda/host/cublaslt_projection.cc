// Projection backend "cublaslt": one product for all parts of a matrix (spec L-7, L-10, N-13).
//
// A matrix whose weights the io dtype holds exactly is one product in that dtype. Any other one, and FLA's bias,
// takes the exact way: rows widened to fp32, an fp32 product, bias added, rounded once; in pieces of kPiece rows, so
// that its workspace stays small.
#include <algorithm>
#include <optional>

#include "base/checked.h"
#include "base/tensor.h"
#include "cuda/host/backend.h"
#include "cuda/host/cublaslt_matrix.h"
#include "cuda/host/cublaslt_plan.h"
#include "cuda/host/device.h"
#include "cuda/host/gates.h"
#include "cuda/host/launch.h"
#include "cuda/host/views.h"
#include "cuda/kernels/projection_rows/params.h"

namespace kda::cuda {
namespace {

constexpr int64_t kPiece = 128;

class CublasLtProjection final : public PreparedProjection {
 public:
  CublasLtProjection(const Context& context, const ProjectionShape& shape, const ProjectionOptions& options)
      : context_(context), shape_(shape), options_(options), rows_kernel_(projection_rows_kernel_info()) {}

  Status prepare() {
    const DeviceGuard guard(context_.device.index);
    KDA_RETURN_IF_ERROR(guard.status());
    KDA_RETURN_IF_ERROR(prepare_kernel(rows_kernel_.function, rows_kernel_.name));
    const int64_t m = shape_.width, k = shape_.cols;
    KDA_RETURN_IF_ERROR(make({options_.io, m, k, shape_.x_stride, shape_.y_stride}, options_.max_tokens, narrow_));
    if (options_.io == KDA_FP32) return {};
    return make({KDA_FP32, m, k, k, m}, kPiece, wide_);
  }

  int64_t workspace_bytes() const override { return gemm_bytes() + x_bytes() + y_bytes(); }

  Status run(const ProjectionCall& call, void* stream) const override {
    const auto& m = static_cast<const CublasLtMatrix&>(*call.weights);
    const int64_t n = call.x.shape[0];
    if (m.width != shape_.width || m.cols != shape_.cols) {
      return invalid_argument("weights: wanted a matrix of ", shape_.width, " x ", shape_.cols,
                              " as the plan has, got ", m.width, " x ", m.cols);
    }
    if (n == 0) return {};
    const DeviceGuard guard(context_.device.index);
    KDA_RETURN_IF_ERROR(guard.status());
    kda_tensor y = call.outputs[0];  // the whole row begins with the first part
    y.shape[1] = shape_.width;
    return m.dtype == options_.io ? run_narrow(m, call, y, stream) : run_wide(m, call, y, stream);
  }

 private:
  int64_t gemm_bytes() const {
    return round_up(std::max(narrow_.workspace_bytes(), wide_ ? wide_->workspace_bytes() : 0), 256);
  }
  int64_t piece_bytes(int64_t cols) const {
    return wide_ ? round_up(std::min(kPiece, options_.max_tokens) * cols * 4, 256) : 0;
  }
  int64_t x_bytes() const { return piece_bytes(shape_.cols); }
  int64_t y_bytes() const { return piece_bytes(shape_.width); }

  template <class Out>
  Status make(const ProductShape& shape, int64_t most, Out& out) const {
    auto made = PlannedProduct::create(context_, shape, most, options_.batch_invariant);
    if (!made.ok()) return made.status();
    out = std::move(made.value());
    return {};
  }

  // Rows where the algorithms were chosen for them to be; never copied there (spec G-8).
  static Status check_rows(const char* what, const kda_tensor& t, int64_t alignment) {
    const auto size = static_cast<int64_t>(dtype_size(t.dtype));
    if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(alignment) == 0 &&
        (t.shape[0] == 1 || t.strides[0] * size % alignment == 0)) {
      return {};
    }
    return unsupported("projection 'cublaslt': ", what, ": wanted rows that begin at multiples of ", alignment,
                       " bytes, got ", describe(t), " at byte ", reinterpret_cast<uintptr_t>(t.data) % 16, " of 16");
  }

  // A row stride that a matrix of one row may have is of no use to anyone.
  static int64_t stride_of_rows(const kda_tensor& t) { return std::max(t.strides[0], t.shape[1]); }

  Status run_narrow(const CublasLtMatrix& m, const ProjectionCall& call, const kda_tensor& y, void* stream) const {
    KDA_RETURN_IF_ERROR(check_rows("x", call.x, narrow_.product().x_alignment()));
    KDA_RETURN_IF_ERROR(check_rows("y", y, narrow_.product().y_alignment()));
    KDA_RETURN_IF_ERROR(narrow_.run(y.shape[0],
                                    {m.memory.data(), call.x.data, y.data, stride_of_rows(call.x), stride_of_rows(y)},
                                    call.workspace, stream));
    if (m.bias.data() == nullptr) return {};
    return convert(y.data, y.dtype, stride_of_rows(y), y.data, y.dtype, stride_of_rows(y), bias_of(m), y.shape[0],
                   shape_.width, stream);
  }

  Status run_wide(const CublasLtMatrix& m, const ProjectionCall& call, const kda_tensor& y, void* stream) const {
    char* const xs = static_cast<char*>(call.workspace) + gemm_bytes();
    char* const ys = xs + x_bytes();
    const auto size = static_cast<int64_t>(dtype_size(options_.io));
    const int64_t x_stride = stride_of_rows(call.x), y_stride = stride_of_rows(y);
    for (int64_t first = 0; first < y.shape[0]; first += kPiece) {
      const int64_t rows = std::min(kPiece, y.shape[0] - first);
      KDA_RETURN_IF_ERROR(convert(static_cast<const char*>(call.x.data) + first * x_stride * size, call.x.dtype,
                                  x_stride, xs, KDA_FP32, shape_.cols, nullptr, rows, shape_.cols, stream));
      KDA_RETURN_IF_ERROR(
          wide_->run(rows, {m.memory.data(), xs, ys, shape_.cols, shape_.width}, call.workspace, stream));
      KDA_RETURN_IF_ERROR(convert(ys, KDA_FP32, shape_.width, static_cast<char*>(y.data) + first * y_stride * size,
                                  y.dtype, y_stride, bias_of(m), rows, shape_.width, stream));
    }
    return {};
  }

  static const float* bias_of(const CublasLtMatrix& m) { return reinterpret_cast<const float*>(m.bias.data()); }

  Status convert(const void* from, kda_dtype from_dtype, int64_t from_stride, void* to, kda_dtype to_dtype,
                 int64_t to_stride, const float* bias, int64_t rows, int64_t cols, void* stream) const {
    ProjectionRowsParams p;
    p.from = from;
    p.to = to;
    p.from_stride = from_stride;
    p.to_stride = to_stride;
    p.bias = bias;
    p.rows = rows;
    p.cols = static_cast<int32_t>(cols);
    p.from_dtype = kda::cuda::to_dtype(from_dtype);
    p.to_dtype = kda::cuda::to_dtype(to_dtype);
    return launch(rows_kernel_, {ceil_div(cols, kProjectionRowsColumns), rows}, p, stream);
  }

  const Context& context_;
  ProjectionShape shape_;
  ProjectionOptions options_;
  KernelInfo rows_kernel_;
  PlannedProduct narrow_;
  std::optional<PlannedProduct> wide_;  // 16-bit io
};

class CublasLtBackend final : public ProjectionBackend {
 public:
  std::string_view name() const override { return "cublaslt"; }
  kda_device_type device() const override { return KDA_CUDA; }

  void check(kda_dtype io, const Context& context, Refusals& refusals) const override {
    if (context.device.type != KDA_CUDA) return;  // nothing is loaded for other devices
    check_device(context, refusals);
    if (io != KDA_FP32 && io != KDA_BF16 && io != KDA_FP16) refusals.add("io_dtype", "fp32, bf16 or fp16", io);
    const lt::Library& library = lt::library();
    if (!library.missing.empty()) {
      refusals.add("cublaslt",
                   "libcublasLt.so.13 or libcublasLt.so.12 in the folder KDA_CUBLASLT_DIR, or else where the loader "
                   "looks or in /usr/local/cuda/lib64",
                   library.missing);
      return;
    }
    if (!refusals.empty()) return;
    const DeviceGuard guard(context.device.index);
    const auto handle = guard.status().ok() ? lt::handle(context.device.index) : Result<lt::Handle*>(guard.status());
    if (!handle.ok()) refusals.add("cublaslt", "a library that serves this device", handle.status().message());
  }

  Result<std::unique_ptr<PackedMatrix>> pack(const Context& context, kda_dtype io,
                                             std::span<const ProjectionPart> parts, int64_t width) const override {
    return pack_cublaslt(context, io, parts, width);
  }

  Result<std::unique_ptr<PreparedProjection>> prepare(const Context& context, const ProjectionShape& shape,
                                                      const ProjectionOptions& options) const override {
    auto prepared = std::make_unique<CublasLtProjection>(context, shape, options);
    KDA_RETURN_IF_ERROR(prepared->prepare());
    return std::unique_ptr<PreparedProjection>(std::move(prepared));
  }
};

}  // namespace

const ProjectionBackend* projection() {
  static const CublasLtBackend backend;
  return &backend;
}

}  // namespace kda::cuda

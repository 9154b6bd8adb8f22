#include "cuda/host/cublaslt_product.h"

#include "base/tensor.h"

namespace kda::cuda {
namespace {

lt::Type type_of(kda_dtype dtype) {
  return dtype == KDA_FP32 ? lt::kFp32 : dtype == KDA_FP16 ? lt::kFp16 : lt::kBf16;
}

// The largest power of two up to 16 that rows `stride` elements apart can start at multiples of, in bytes.
int64_t alignment_of(int64_t stride, kda_dtype dtype) {
  int64_t alignment = 16;
  while (stride * static_cast<int64_t>(dtype_size(dtype)) % alignment != 0) alignment /= 2;
  return alignment;
}

#define KDA_RETURN_IF_LT_ERROR(call) KDA_RETURN_IF_ERROR(lt::to_status((call), #call))

}  // namespace

Product::Product(lt::Handle* handle, const ProductShape& shape)
    : handle_(handle),
      shape_(shape),
      x_alignment_(alignment_of(shape.x_stride, shape.dtype)),
      y_alignment_(alignment_of(shape.y_stride, shape.dtype)) {}

Product::~Product() {
  if (desc_ != nullptr) lt::library().call.desc_destroy(desc_);
}

Result<std::unique_ptr<Product>> Product::create(const Context& context, const ProductShape& shape) {
  auto handle = lt::handle(context.device.index);
  if (!handle.ok()) return handle.status();
  std::unique_ptr<Product> p(new Product(handle.value(), shape));
  const lt::Functions& call = lt::library().call;
  // fp32 means fp32: "pedantic" rules out tf32 and emulation, whatever the environment asks for.
  const lt::Compute compute = shape.dtype == KDA_FP32 ? lt::kCompute32Pedantic : lt::kCompute32;
  KDA_RETURN_IF_LT_ERROR(call.desc_create(&p->desc_, compute, lt::kFp32));
  const int32_t transposed = lt::kTransposed, plain = lt::kPlain;
  KDA_RETURN_IF_LT_ERROR(call.desc_set(p->desc_, lt::kDescTransA, &transposed, sizeof transposed));
  KDA_RETURN_IF_LT_ERROR(call.desc_set(p->desc_, lt::kDescTransB, &plain, sizeof plain));
  return p;
}

Status Product::layouts(int64_t n, int64_t x_stride, int64_t y_stride, lt::Layout& w, lt::Layout& x,
                        lt::Layout& y) const {
  const auto init = lt::library().call.layout_init;
  const lt::Type type = type_of(shape_.dtype);
  const auto m = static_cast<uint64_t>(shape_.m), k = static_cast<uint64_t>(shape_.k),
             rows = static_cast<uint64_t>(n);
  KDA_RETURN_IF_LT_ERROR(init(&w, sizeof w, type, k, m, shape_.k));
  KDA_RETURN_IF_LT_ERROR(init(&x, sizeof x, type, k, rows, x_stride));
  return lt::to_status(init(&y, sizeof y, type, m, rows, y_stride), "layout of y");
}

Result<std::vector<lt::Heuristic>> Product::propose(int64_t n, bool whole) const {
  const lt::Functions& call = lt::library().call;
  lt::Layout w{}, x{}, y{};
  KDA_RETURN_IF_ERROR(layouts(n, shape_.x_stride, shape_.y_stride, w, x, y));
  lt::Preference* preference = nullptr;
  KDA_RETURN_IF_LT_ERROR(call.preference_create(&preference));
  struct Owner {
    lt::Preference* p;
    ~Owner() { lt::library().call.preference_destroy(p); }
  } const owner{preference};
  const auto set = [&](lt::PreferenceAttribute attribute, auto value) {
    return lt::to_status(call.preference_set(preference, attribute, &value, sizeof value), "preference");
  };
  KDA_RETURN_IF_ERROR(set(lt::kPreferWorkspace, static_cast<uint64_t>(kWorkspace)));
  KDA_RETURN_IF_ERROR(set(lt::kPreferReductions, uint32_t{whole ? lt::kReduceNone : lt::kReduceComputeType}));
  KDA_RETURN_IF_ERROR(set(lt::kPreferAlignmentA, uint32_t{256}));
  KDA_RETURN_IF_ERROR(set(lt::kPreferAlignmentB, static_cast<uint32_t>(x_alignment_)));
  KDA_RETURN_IF_ERROR(set(lt::kPreferAlignmentC, static_cast<uint32_t>(y_alignment_)));
  KDA_RETURN_IF_ERROR(set(lt::kPreferAlignmentD, static_cast<uint32_t>(y_alignment_)));
  std::vector<lt::Heuristic> found(16);
  int32_t count = 0;
  KDA_RETURN_IF_ERROR(lt::to_status(call.get_heuristic(handle_, desc_, &w, &x, &y, &y, preference,
                                                       static_cast<int32_t>(found.size()), found.data(), &count),
                                    "cublasLtMatmulAlgoGetHeuristic")
                          .with_context(str_cat("product of ", n, " rows, ", shape_.k, " -> ", shape_.m)));
  found.resize(static_cast<size_t>(count));
  std::vector<lt::Heuristic> usable;
  for (const lt::Heuristic& h : found) {
    int32_t parts = 0;
    size_t written = 0;
    if (h.state != 0 || h.workspace > static_cast<size_t>(kWorkspace)) continue;
    if (whole && (call.config_get(&h.algorithm, lt::kConfigSplitK, &parts, sizeof parts, &written) != 0 || parts > 1))
      continue;
    usable.push_back(h);
  }
  return usable;
}

Status Product::run(int64_t n, const ProductOperands& o, const lt::Algorithm& algorithm, void* workspace,
                    int64_t workspace_bytes, void* stream) const {
  lt::Layout w{}, x{}, y{};
  KDA_RETURN_IF_ERROR(layouts(n, o.x_stride, o.y_stride, w, x, y));
  const float one = 1, zero = 0;
  return lt::to_status(lt::library().call.matmul(handle_, desc_, &one, o.w, &w, o.x, &x, &zero, o.y, &y, o.y, &y,
                                                 &algorithm, workspace, static_cast<size_t>(workspace_bytes), stream),
                       "cublasLtMatmul");
}

}  // namespace kda::cuda

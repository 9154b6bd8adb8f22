// Gated norm plans on CUDA.
#include "base/checked.h"
#include "base/tensor.h"
#include "cuda/host/candidate.h"
#include "cuda/host/candidates.h"
#include "cuda/host/gates.h"
#include "cuda/host/launch.h"
#include "cuda/host/views.h"
#include "cuda/kernels/gated_norm/params.h"

namespace kda::cuda {
namespace {

bool rows_are_vectors(const kda_tensor& t) {
  const int last = t.rank - 1;
  return rows_of_16_bytes(t.data, t.dtype, t.shape[last],
                          {t.strides[last - 1], t.strides[last - 2], t.rank > 3 ? t.strides[0] : 0});
}

class GatedNormKernel final : public Kernel<GatedNorm> {
 public:
  GatedNormKernel(const kda_gated_norm_desc& desc, const Context& context)
      : desc_(desc), device_(context.device.index) {}

  Status prepare() {
    const Dtype io = to_dtype(desc_.io_dtype);
    const auto values = static_cast<int32_t>(desc_.value_dim);
    exact_ = gated_norm_kernel_info(io, values, true);
    masked_ = gated_norm_kernel_info(io, values, false);
    KDA_RETURN_IF_ERROR(prepare_kernel(exact_.function, exact_.name));
    return prepare_kernel(masked_.function, masked_.name);
  }

  Status run(const kda_gated_norm_args& args, const WorkspaceGrant&, void* stream) const override {
    GatedNormParams p;
    p.o = to_token(args.o, 3);
    p.z = to_token(args.z, 3);
    p.out = to_token(args.out, 3);
    p.weight = static_cast<const float*>(args.weight.data);
    const bool batched = args.o.rank > 3;
    p.tokens = static_cast<int32_t>(args.o.shape[batched ? 1 : 0]);
    p.heads = static_cast<int32_t>(desc_.num_value_heads);
    p.values = static_cast<int32_t>(desc_.value_dim);
    p.rows = static_cast<int32_t>((batched ? args.o.shape[0] : 1) * p.tokens * p.heads);
    p.eps = static_cast<float>(desc_.eps);
    p.dense = 1;
    for (const kda_tensor* t : {&args.o, &args.z, &args.out}) p.dense = p.dense && inner_dense(*t, t->rank);
    const bool exact = p.values == 128 && rows_are_vectors(args.o) && rows_are_vectors(args.z) &&
                       rows_are_vectors(args.out) && reinterpret_cast<uintptr_t>(p.weight) % 16 == 0;
    const DeviceGuard guard(device_);
    KDA_RETURN_IF_ERROR(guard.status());
    return launch(exact ? exact_ : masked_, {ceil_div(p.rows, kNormBlockRows)}, p, stream);
  }

 private:
  kda_gated_norm_desc desc_;
  int32_t device_;
  KernelInfo exact_, masked_;
};

Result<std::unique_ptr<Kernel<GatedNorm>>> create(const kda_gated_norm_desc& desc, const Context& context,
                                                  WorkspaceBook&) {
  auto kernel = std::make_unique<GatedNormKernel>(desc, context);
  KDA_RETURN_IF_ERROR(kernel->prepare());
  return std::unique_ptr<Kernel<GatedNorm>>(std::move(kernel));
}

}  // namespace

const Candidate<GatedNorm>* portable_gated_norm() {
  static const CudaCandidate<GatedNorm> candidate("portable", check_gated_norm, create);
  return &candidate;
}

}  // namespace kda::cuda

// Residual norm plans on CUDA.
#include "base/tensor.h"
#include "cuda/host/candidate.h"
#include "cuda/host/candidates.h"
#include "cuda/host/gates.h"
#include "cuda/host/launch.h"
#include "cuda/host/views.h"
#include "cuda/kernels/residual_norm/params.h"

namespace kda::cuda {
namespace {

class ResidualNormKernel final : public Kernel<ResidualNorm> {
 public:
  ResidualNormKernel(const kda_residual_norm_desc& desc, const Context& context)
      : desc_(desc),
        device_(context.device.index),
        held_(residual_norm_kernel_info(to_dtype(desc.io_dtype), true)),
        general_(residual_norm_kernel_info(to_dtype(desc.io_dtype), false)) {}

  Status prepare() const {
    KDA_RETURN_IF_ERROR(prepare_kernel(held_.function, held_.name));
    return prepare_kernel(general_.function, general_.name);
  }

  Status run(const kda_residual_norm_args& args, const WorkspaceGrant&, void* stream) const override {
    ResidualNormParams p;
    p.residual = args.residual.data;
    p.add = present(args.add) ? args.add.data : nullptr;
    p.weight = present(args.weight) ? static_cast<const float*>(args.weight.data) : nullptr;
    p.out = args.out.data;
    p.residual_row = args.residual.strides[0];
    p.add_row = present(args.add) ? args.add.strides[0] : 0;
    p.out_row = args.out.strides[0];
    p.cols = static_cast<int32_t>(desc_.hidden);
    p.eps = static_cast<float>(desc_.eps);
    const DeviceGuard guard(device_);
    KDA_RETURN_IF_ERROR(guard.status());
    return launch(is_held(args) ? held_ : general_, {args.residual.shape[0]}, p, stream);
  }

 private:
  bool is_held(const kda_residual_norm_args& args) const {
    if (desc_.hidden > kMostHeldColumns || desc_.hidden % 8 != 0) return false;
    for (const kda_tensor* t : {&args.residual, &args.add, &args.out}) {
      if (present(*t) && !rows_of_16_bytes(t->data, t->dtype, desc_.hidden, {t->strides[0]})) return false;
    }
    return true;
  }

  kda_residual_norm_desc desc_;
  int32_t device_;
  KernelInfo held_, general_;
};

Result<std::unique_ptr<Kernel<ResidualNorm>>> create(const kda_residual_norm_desc& desc, const Context& context,
                                                     WorkspaceBook&) {
  auto kernel = std::make_unique<ResidualNormKernel>(desc, context);
  KDA_RETURN_IF_ERROR(kernel->prepare());
  return std::unique_ptr<Kernel<ResidualNorm>>(std::move(kernel));
}

}  // namespace

const Candidate<ResidualNorm>* portable_residual_norm() {
  static const CudaCandidate<ResidualNorm> candidate("portable", check_residual_norm, create);
  return &candidate;
}

}  // namespace kda::cuda

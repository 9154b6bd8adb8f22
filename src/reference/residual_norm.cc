// Residual sum and RMS norm in fp64: the residual is rounded where it is stored, and the norm is of what is stored.
#include <algorithm>
#include <cmath>

#include "reference/candidates.h"
#include "reference/kernel.h"
#include "reference/scalar.h"

namespace kda::reference {
namespace {

class ResidualNormKernel final : public Kernel<ResidualNorm> {
 public:
  ResidualNormKernel(const kda_residual_norm_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc), context_(context), scratch_(context, book, 3 * desc.hidden) {}

  static void check(const kda_residual_norm_desc&, Refusals&) {}

  Status run(const kda_residual_norm_args& args, const WorkspaceGrant& workspace, void*) const override {
    const int64_t n = desc_.hidden;
    context_.parallel.for_each(args.residual.shape[0], [&](int64_t r, int32_t worker) {
      double* const h = scratch_.of(workspace, worker);
      double* const add = h + n;
      double* const weight = add + n;
      load_row(at(args.residual, r), args.residual.dtype, n, h);
      if (present(args.add)) {
        load_row(at(args.add, r), args.add.dtype, n, add);
        for (int64_t i = 0; i < n; ++i) {
          store(advance(at(args.residual, r), args.residual.dtype, i), args.residual.dtype, h[i] + add[i]);
        }
        load_row(at(args.residual, r), args.residual.dtype, n, h);
      }
      std::fill(weight, weight + n, 1.0);
      if (present(args.weight)) load_row(static_cast<const char*>(args.weight.data), KDA_FP32, n, weight);
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += h[i] * h[i];
      const double scale = 1 / std::sqrt(sum / static_cast<double>(n) + desc_.eps);
      for (int64_t i = 0; i < n; ++i) {
        store(advance(at(args.out, r), args.out.dtype, i), args.out.dtype, h[i] * scale * weight[i]);
      }
    });
    return {};
  }

 private:
  kda_residual_norm_desc desc_;
  const Context& context_;
  WorkerScratch scratch_;
};

}  // namespace

const Candidate<ResidualNorm>* residual_norm() {
  static const ReferenceCandidate<ResidualNorm, ResidualNormKernel> candidate;
  return &candidate;
}

}  // namespace kda::reference

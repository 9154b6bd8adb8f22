// Host half of residual_norm: blocks of token rows in parallel.
#include <algorithm>

#include "base/checked.h"
#include "cpu/attention_gates.h"
#include "cpu/candidates.h"
#include "cpu/common.h"
#include "cpu/denormals.h"
#include "cpu/portable.h"
#include "cpu/residual_norm_call.h"

namespace kda::cpu {
namespace {

class ResidualNormKernel final : public Kernel<ResidualNorm> {
 public:
  ResidualNormKernel(const kda_residual_norm_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc), parallel_(context.parallel), functions_(residual_norm_functions(context_isa(context.isa))) {
    scratch_ = book.book("scratch", KDA_FP32, {parallel_.num_threads, 2, padded(desc.hidden)});
  }

  Status run(const kda_residual_norm_args& args, const WorkspaceGrant& workspace, void*) const override {
    const ResidualNormCall call{&desc_, &args};
    const int64_t rows = args.residual.shape[0];
    // About 64 KiB of input a task.
    const int64_t block = std::max<int64_t>(1, 16384 / padded(desc_.hidden));
    auto* scratch = workspace.get<float>(scratch_);
    parallel_.for_each(ceil_div(rows, block), [&](int64_t task, int32_t worker) {
      const FlushDenormals flush;
      functions_.run(call, task * block, std::min(rows, (task + 1) * block),
                     scratch + worker * 2 * padded(desc_.hidden));
    });
    return {};
  }

 private:
  kda_residual_norm_desc desc_;
  Parallel parallel_;
  const ResidualNormFunctions& functions_;
  WorkspaceBook::Id scratch_;
};

struct ResidualNormGates {
  static void check(const kda_residual_norm_desc& d, Refusals& refusals) {
    check_out_dtype(d.io_dtype, d.out_dtype, refusals);
  }
};

}  // namespace

const Candidate<ResidualNorm>* portable_residual_norm() {
  static const Portable<ResidualNorm, ResidualNormKernel, ResidualNormGates> candidate;
  return &candidate;
}

}  // namespace kda::cpu

// Host half of gated_norm: blocks of token rows in parallel.
#include <algorithm>

#include "base/checked.h"
#include "base/tensor.h"
#include "cpu/attention_gates.h"
#include "cpu/candidates.h"
#include "cpu/common.h"
#include "cpu/denormals.h"
#include "cpu/gated_norm_call.h"
#include "cpu/portable.h"

namespace kda::cpu {
namespace {

class GatedNormKernel final : public Kernel<GatedNorm> {
 public:
  GatedNormKernel(const kda_gated_norm_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc), parallel_(context.parallel), functions_(gated_norm_functions(context_isa(context.isa))) {
    scratch_ = book.book("scratch", KDA_FP32, {parallel_.num_threads, 2, padded(desc.value_dim)});
  }

  Status run(const kda_gated_norm_args& args, const WorkspaceGrant& workspace, void*) const override {
    const GatedNormCall call{&desc_, &args};
    const kda_tensor& o = args.o;
    const int64_t rows = (o.rank > 3 ? o.shape[0] : 1) * o.shape[o.rank - 3];
    // About 64 KiB of input a task.
    const int64_t block = std::max<int64_t>(1, 16384 / (desc_.num_value_heads * padded(desc_.value_dim)));
    auto* scratch = workspace.get<float>(scratch_);
    parallel_.for_each(ceil_div(rows, block), [&](int64_t task, int32_t worker) {
      const FlushDenormals flush;
      functions_.run(call, task * block, std::min(rows, (task + 1) * block),
                     scratch + worker * 2 * padded(desc_.value_dim));
    });
    return {};
  }

 private:
  kda_gated_norm_desc desc_;
  Parallel parallel_;
  const GatedNormFunctions& functions_;
  WorkspaceBook::Id scratch_;
};

struct GatedNormGates {
  static void check(const kda_gated_norm_desc& d, Refusals& refusals) {
    check_out_dtype(d.io_dtype, d.out_dtype, refusals);
  }
};

}  // namespace

const Candidate<GatedNorm>* portable_gated_norm() {
  static const Portable<GatedNorm, GatedNormKernel, GatedNormGates> candidate;
  return &candidate;
}

}  // namespace kda::cpu

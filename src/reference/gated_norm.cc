// Gated RMS norm per value head (spec L-7.4): y = o * rsqrt(mean_v(o^2) + eps) * w_v * sigmoid(z), rounded once.
#include "reference/candidates.h"
#include "reference/head_input.h"
#include "reference/kernel.h"

namespace kda::reference {
namespace {

class GatedNormKernel final : public Kernel<GatedNorm> {
 public:
  GatedNormKernel(const kda_gated_norm_desc& desc, const Context& context, WorkspaceBook& book)
      : desc_(desc), context_(context), scratch_(context, book, 3 * desc.value_dim) {}

  static void check(const kda_gated_norm_desc&, Refusals&) {}

  Status run(const kda_gated_norm_args& args, const WorkspaceGrant& workspace, void*) const override {
    const SequenceTable table({}, args.o, 3);
    const int64_t tokens = args.o.shape[args.o.rank - 3], V = desc_.value_dim;
    context_.parallel.for_each(table.count() * tokens, [&](int64_t task, int32_t worker) {
      const TokenSpan span = table.span(task / std::max<int64_t>(1, tokens));
      double* o = scratch_.of(workspace, worker);
      double* z = o + V;
      double* weight = z + V;
      load_row(static_cast<const char*>(args.weight.data), args.weight.dtype, V, weight);
      for (int64_t head = 0; head < desc_.num_value_heads; ++head) {
        load_row(head_row(args.o, span, task % tokens, head), args.o.dtype, V, o);
        load_row(head_row(args.z, span, task % tokens, head), args.z.dtype, V, z);
        gated_norm(o, z, weight, V, desc_.eps);
        store_output(args.out, {}, span, task % tokens, head, V, o);
      }
    });
    return {};
  }

 private:
  static const char* head_row(const kda_tensor& x, const TokenSpan& span, int64_t t, int64_t head) {
    return advance(token_row(x, span, 3, t), x.dtype, head * x.strides[x.rank - 2]);
  }

  kda_gated_norm_desc desc_;
  const Context& context_;
  WorkerScratch scratch_;
};

}  // namespace

const Candidate<GatedNorm>* gated_norm() {
  static const ReferenceCandidate<GatedNorm, GatedNormKernel> candidate;
  return &candidate;
}

}  // namespace kda::reference

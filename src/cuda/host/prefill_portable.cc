// Prefill plans on CUDA: any shape, token by token.
#include "base/tensor.h"
#include "cuda/host/candidate.h"
#include "cuda/host/candidates.h"
#include "cuda/host/gates.h"
#include "cuda/host/launch.h"
#include "cuda/host/recurrence.h"
#include "cuda/host/views.h"
#include "cuda/kernels/prefill_portable/params.h"

namespace kda::cuda {
namespace {

class PortablePrefillKernel final : public Kernel<Prefill> {
 public:
  PortablePrefillKernel(const kda_prefill_desc& desc, const Context& context)
      : desc_(desc),
        device_(context.device.index),
        multiprocessors_(context.facts.multiprocessors),
        kernel_(prefill_portable_kernel_info(masked_shape(desc.attention))) {}

  Status prepare() const { return prepare_kernel(kernel_.function, kernel_.name, kWalkChunk * kernel_.token_bytes); }

  Status run(const kda_prefill_args& args, const WorkspaceGrant&, void* stream) const override {
    PrefillParams p;
    fill_walk(desc_.attention, args, p);
    p.q = to_token(args.q, 3);
    p.out = to_out(args.out, args.out_rows, 3);
    fill_states(args, p);
    if (present(args.checkpoint_offsets)) fill_checkpoints(args, p);
    return launch_walk(kernel_, device_, multiprocessors_, p, stream);
  }

 private:
  void fill_states(const kda_prefill_args& args, PrefillParams& p) const {
    p.has_pool = present(args.state);
    p.rule.slots = to_slots(args.slots, args.write_slots, args.has_initial_state,
                            p.has_pool ? args.state.shape[0] : 0, desc_.null_slot, desc_.initial_state);
    if (p.has_pool) {
      p.pool = to_pool(args.state);
      p.pool_dtype = to_dtype(args.state.dtype);
    }
    p.stores = args.no_final_state == 0;
    if (!present(args.final_state)) return;
    p.final = to_pool(args.final_state);
    p.final_dtype = to_dtype(args.final_state.dtype);
  }

  static void fill_checkpoints(const kda_prefill_args& args, PrefillParams& p) {
    CheckpointRef& c = p.checkpoints;
    c.offsets = to_index(args.checkpoint_offsets);
    c.slots = to_index(args.checkpoint_slots);
    const bool packed = !c.slots.present();
    const kda_tensor& to = packed ? args.checkpoint_states : args.state;
    c.data = to.data;
    c.dtype = to_dtype(to.dtype);
    c.row_stride = packed ? to.strides[0] : 0;
    c.stride = to.strides[packed ? 1 : 0];
    c.slot_count = to.shape[0];
  }

  kda_prefill_desc desc_;
  int32_t device_, multiprocessors_;
  KernelInfo kernel_;
};

Result<std::unique_ptr<Kernel<Prefill>>> create(const kda_prefill_desc& desc, const Context& context,
                                                WorkspaceBook&) {
  auto kernel = std::make_unique<PortablePrefillKernel>(desc, context);
  KDA_RETURN_IF_ERROR(kernel->prepare());
  return std::unique_ptr<Kernel<Prefill>>(std::move(kernel));
}

}  // namespace

const Candidate<Prefill>* portable_prefill() {
  static const CudaCandidate<Prefill> candidate(
      "portable", [](const auto& d, const auto& c, auto& r) { check_prefill(kPortablePrefill, d, c, r); }, create);
  return &candidate;
}

}  // namespace kda::cuda

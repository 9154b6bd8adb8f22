// Conv plans on CUDA: prefill, columns and records.
#include "cuda/host/conv.h"

#include <algorithm>

#include "base/checked.h"
#include "base/tensor.h"
#include "cuda/host/candidate.h"
#include "cuda/host/candidates.h"
#include "cuda/host/gates.h"
#include "cuda/host/launch.h"
#include "cuda/host/views.h"

namespace kda::cuda {
namespace {

constexpr int32_t kBlockWarps = 4;

bool rows_are_vectors(const kda_tensor& x, int64_t channels) {
  const bool batched = x.rank > 2;
  return channels % 4 == 0 &&
         groups_of_four(x.data, x.dtype, {x.strides[batched ? 1 : 0], batched ? x.strides[0] : 0});
}

// Rows of a tile; `columns`: blocks side by side. A tile begins with a wait of about twenty rows' time, but many
// short ones end together and read neighbouring memory: 24 rows beat whole waves of long tiles (conv.md). Calls of
// few rows are cut finer, so that all multiprocessors have some.
int32_t tile_rows(int64_t rows, int64_t columns, int64_t wave) {
  constexpr int64_t kLeast = 16, kMost = 24;
  return static_cast<int32_t>(std::clamp(rows * columns / wave, kLeast, kMost));
}

class ConvKernel final : public Kernel<Conv> {
 public:
  ConvKernel(const kda_conv_desc& desc, const Context& context, bool final_window)
      : desc_(desc),
        device_(context.device.index),
        multiprocessors_(context.facts.multiprocessors),
        final_window_(final_window) {}

  Status prepare() {
    const Dtype io = to_dtype(desc_.io_dtype);
    vectors_ = conv_prefill_kernel_info(io, true);
    scalars_ = conv_prefill_kernel_info(io, false);
    step_vectors_ = conv_step_kernel_info(io, true);
    step_scalars_ = conv_step_kernel_info(io, false);
    for (const KernelInfo* k : {&vectors_, &scalars_, &step_vectors_, &step_scalars_}) {
      KDA_RETURN_IF_ERROR(prepare_kernel(k->function, k->name));
    }
    return {};
  }

  Status run(const kda_conv_args& args, const WorkspaceGrant&, void* stream) const override {
    ConvParams p;
    fill(args, p);
    if (p.sequences.count == 0) return {};
    const DeviceGuard guard(device_);
    KDA_RETURN_IF_ERROR(guard.status());
    LaunchShape shape;
    if (desc_.mode != KDA_CONV_PREFILL) {
      const KernelInfo& kernel = can_use_vectors(args) && windows_are_io(p) ? step_vectors_ : step_scalars_;
      int64_t channels = 0;
      for (int i = 0; i < p.parts; ++i) channels += p.part[i].channels;
      if (kernel.warp_rows == 1) shape.x = ceil_div(channels, kernel.threads);
      else shape.x = count_groups(kernel, p);
      shape.rest = p.sequences.count;
      return launch(kernel, shape, p, stream);
    }
    const int64_t rows = p.sequences.rows();
    const KernelInfo& kernel = can_use_vectors(args) ? vectors_ : scalars_;
    shape.x = count_groups(kernel, p);
    p.tile_rows = tile_rows(rows, shape.x, int64_t{kernel.blocks} * multiprocessors_);
    shape.rest = std::max<int64_t>(1, ceil_div(rows, p.tile_rows)) + p.sequences.count - 1;
    return launch(kernel, shape, p, stream);
  }

 private:
  // Groups of a warp's channels in all parts; returns blocks.
  static int64_t count_groups(const KernelInfo& kernel, ConvParams& p) {
    for (int i = 0; i < p.parts; ++i) {
      p.part[i].groups = static_cast<int32_t>(ceil_div(p.part[i].channels, 32 * int64_t{kernel.warp_rows}));
      p.groups += p.part[i].groups;
    }
    return ceil_div(p.groups, kBlockWarps);
  }

  static bool windows_are_io(const ConvParams& p) {
    for (int i = 0; i < p.parts; ++i)
      if (p.part[i].in.window.dtype != p.io) return false;
    return true;
  }

  void fill(const kda_conv_args& args, ConvParams& p) const {
    p.parts = desc_.parts;
    p.width = desc_.width;
    p.has_pool = present(args.state[0]);
    p.activation = desc_.no_activation == 0;
    p.io = to_dtype(desc_.io_dtype);
    p.sequences = to_sequences(args.sequences, args.x[0], 2);
    p.rule.slots = to_slots(args.slots, args.write_slots, args.has_initial_state,
                            p.has_pool ? args.state[0].shape[0] : 0, desc_.null_slot, desc_.initial_state);
    p.rule.accepted = int32_data(args.accepted);
    p.rule.accepted_stride = stride_of(args.accepted);
    p.rule.mode = static_cast<ConvMode>(desc_.mode);
    p.rule.fold = desc_.fold;
    p.rule.final_window = final_window_;
    p.rule.width = desc_.verify_width;
    if (present(args.record_count)) {
      p.records.count = const_cast<int32_t*>(int32_data(args.record_count));  // read only here
      p.records.count_stride = stride_of(args.record_count);
      p.records.rows = args.record_count.shape[0];
      p.records.record_rows = to_index(args.record_rows);
    }
    p.out_rows = to_index(args.out_rows);
    p.out_count = args.out[0].shape[args.out[0].rank > 2 ? 1 : 0];
    if (present(args.checkpoint_offsets)) {
      p.checkpoints = static_cast<int32_t>(args.checkpoint_offsets.shape[1]);
      p.checkpoint_offsets = to_index(args.checkpoint_offsets);
      p.checkpoint_slots = to_index(args.checkpoint_slots);
    }
    p.taps_aligned = p.width == 4;
    for (int i = 0; i < 3 && i < p.parts; ++i) {
      p.taps_aligned = p.taps_aligned && reinterpret_cast<uintptr_t>(args.weight[i].data) % 16 == 0;
      ConvPart& part = p.part[i];
      part.in = to_channels(args.x[i], args.weight[i], args.bias[i], args.state[i], desc_.layout, desc_.width, 0);
      const bool batched = args.out[i].rank > 2;
      part.out = args.out[i].data;
      part.out_batch = batched ? args.out[i].strides[0] : 0;
      part.out_row = args.out[i].strides[batched ? 1 : 0];
      part.channels = static_cast<int32_t>(desc_.channels[i]);
    }
  }

  bool can_use_vectors(const kda_conv_args& args) const {
    bool whole = desc_.width == 4;
    for (int i = 0; i < desc_.parts; ++i) {
      whole =
          whole && rows_are_vectors(args.x[i], desc_.channels[i]) && rows_are_vectors(args.out[i], desc_.channels[i]);
    }
    return whole;
  }

  kda_conv_desc desc_;
  int32_t device_, multiprocessors_;
  bool final_window_;
  KernelInfo vectors_, scalars_, step_vectors_, step_scalars_;
};

}  // namespace

ConvChannels to_channels(const kda_tensor& x, const kda_tensor& weight, const kda_tensor& bias,
                         const kda_tensor& pool, kda_conv_layout layout, int64_t width, int64_t first) {
  ConvChannels c;
  const bool batched = x.rank > 2;
  c.x = static_cast<const char*>(x.data) + first * static_cast<int64_t>(dtype_size(x.dtype));
  c.x_batch = batched ? x.strides[0] : 0;
  c.x_row = x.strides[batched ? 1 : 0];
  c.x_vectors = groups_of_four(c.x, x.dtype, {c.x_batch, c.x_row});
  c.weight = static_cast<const float*>(weight.data) + first * width;
  c.bias = present(bias) ? static_cast<const float*>(bias.data) + first : nullptr;
  c.window = to_window(pool, layout, first);
  return c;
}

Result<std::unique_ptr<Kernel<Conv>>> make_conv(const kda_conv_desc& desc, const Context& context,
                                                bool final_window) {
  auto kernel = std::make_unique<ConvKernel>(desc, context, final_window);
  KDA_RETURN_IF_ERROR(kernel->prepare());
  return std::unique_ptr<Kernel<Conv>>(std::move(kernel));
}

const Candidate<Conv>* portable_conv() {
  static const CudaCandidate<Conv> candidate(
      "portable", check_conv,
      [](const kda_conv_desc& d, const Context& c, WorkspaceBook&) { return make_conv(d, c, false); });
  return &candidate;
}

}  // namespace kda::cuda

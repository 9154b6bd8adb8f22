// What the recurrent operators' plans share.
#pragma once

#include <memory>

#include "core/backend.h"
#include "cuda/host/launch.h"
#include "cuda/host/views.h"
#include "cuda/kernels/decode/params.h"

namespace kda::cuda {

// The masked kernel that holds K keys.
inline Shape masked_shape(const kda_attention_spec& spec) {
  return spec.key_dim <= 128 ? Shape::kMasked128 : Shape::kMasked256;
}

// What the kernels that walk whole sequences (portable prefill, segment summaries) read of a run besides queries.
template <class Args, class Params>
void fill_walk(const kda_attention_spec& spec, const Args& args, Params& p) {
  p.form = to_form(spec);
  p.sequences = to_sequences(args.sequences, args.k, 3);
  p.gate_rule = to_gate(spec, args.A_log, args.dt_bias);
  p.k = to_token(args.k, 3);
  p.v = to_token(args.v, 3);
  p.gate = to_token(args.gate, 3);
  p.beta = to_token(args.beta, 2);
}

// Launches such a kernel: heads are split over blocks, pieces of kWalkChunk tokens are prepared at once.
constexpr int32_t kWalkChunk = 8;
template <class Params>
Status launch_walk(const KernelInfo& kernel, int32_t device, int32_t multiprocessors, Params& p, void* stream) {
  p.split = split_head(int64_t{p.sequences.count} * p.form.value_heads, p.form.values, kernel.warp_rows,
                       kernel.threads / 32, multiprocessors);
  p.split.chunk = kWalkChunk;
  LaunchShape shape;
  shape.x = int64_t{p.form.value_heads} * p.split.slices;
  shape.rest = p.sequences.count;
  shape.shared_bytes = kWalkChunk * kernel.token_bytes;
  const DeviceGuard guard(device);
  KDA_RETURN_IF_ERROR(guard.status());
  return launch(kernel, shape, p, stream);
}

// Everything of a run but q, k and v. `token`: the tensor that has the call's rows.
void fill_decode_params(const kda_decode_desc& desc, const kda_decode_args& args, const kda_tensor& token,
                        int row_dims, DecodeParams& p);

// A decode kernel. `exact`: the tuned kernels of K = V = 128 may be used; where a run's layout does not fit them, the
// masked ones give the same bits.
Result<std::unique_ptr<Kernel<Decode>>> make_decode(const kda_decode_desc& desc, const Context& context, bool exact);

}  // namespace kda::cuda

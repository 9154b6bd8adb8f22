// What the recurrent operators' plans share.
#pragma once

#include <memory>

#include "core/backend.h"
#include "cuda/kernels/decode/params.h"

namespace kda::cuda {

// The masked kernel that holds K keys.
inline Shape masked_shape(const kda_attention_spec& spec) {
  return spec.key_dim <= 128 ? Shape::kMasked128 : Shape::kMasked256;
}

// Everything of a run but q, k and v. `token`: the tensor that has the call's rows.
void fill_decode_params(const kda_decode_desc& desc, const kda_decode_args& args, const kda_tensor& token,
                        int row_dims, DecodeParams& p);

// A decode kernel. `exact`: the tuned kernels of K = V = 128 may be used; where a run's layout does not fit them, the
// masked ones give the same bits.
Result<std::unique_ptr<Kernel<Decode>>> make_decode(const kda_decode_desc& desc, const Context& context, bool exact);

}  // namespace kda::cuda

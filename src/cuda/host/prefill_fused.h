// What the operators that run the tensor-core prefill kernel share.
#pragma once

#include "base/status.h"
#include "cuda/kernels/prefill_fused/params.h"
#include "kda/kda.h"

namespace kda::cuda {

struct FusedTokens {
  const kda_tensor &q, &k, &v, &gate, &beta, &A_log, &dt_bias;
};

// Where a run's layout is seen first: a plan made without an example could not refuse it.
Status check_fused_rows(const char* name, const kda_tensor& t);

void fill_fused_tokens(const kda_attention_spec& spec, const FusedTokens& tokens, prefill_fused::Params& p);
// `token`: the tensor that has the call's rows, [T, H, K] or batched.
void fill_fused_sequences(const kda_sequences& s, const kda_tensor& token, prefill_fused::Params& p);

// The stages of a segment summary that a prefill goes on from; after the sequences.
Status give_stages(const kda_tensor& stages, prefill_fused::Params& p);

// Loads the kernels of a gate and launches them.
Status prepare_fused(const kda_attention_spec& spec);
Status launch_fused(const prefill_fused::Params& p, const kda_attention_spec& spec, int32_t device,
                    int32_t multiprocessors, void* stream);

}  // namespace kda::cuda

// What the attention operators share: groups of arguments that stand together in their schemas (schemas.cc), in
// order.
#pragma once

#include "plans.h"
#include "words.h"

namespace kda::torch_ops {

// A_log, dt_bias
struct GateParameters {
  kda_tensor A_log, dt_bias;
};
GateParameters read_gate_parameters(Arguments& a);
kda_sequences read_sequences(Arguments& a);  // cu_seqlens, begin, length, num_active

// A dimension counted from the end; 0 if the tensor has fewer.
int64_t size_from_end(const kda_tensor& t, int i);
// Sequences and tokens of a call; `row_dims` is the token tensor's rank without a batch dimension.
struct Counts {
  int64_t tokens, sequences;
};
Counts count(const kda_sequences& s, const kda_tensor& token, int row_dims);

// The description's numeric part. H from `heads`, HV and K from the gate, V from `values` [..., HV, V].
kda_attention_spec attention_spec(const Words& words, int64_t heads, const kda_tensor& gate, const kda_tensor& values,
                                  kda_dtype io, kda_dtype beta, kda_dtype state);

// Boxed kernels, one per operator.
void prefill(StableIValue* stack, uint64_t arguments, uint64_t results);
void decode(StableIValue* stack, uint64_t arguments, uint64_t results);
void verify_record(StableIValue* stack, uint64_t arguments, uint64_t results);
void commit(StableIValue* stack, uint64_t arguments, uint64_t results);
void decode_step(StableIValue* stack, uint64_t arguments, uint64_t results);
void conv_prefill(StableIValue* stack, uint64_t arguments, uint64_t results);
void conv_update(StableIValue* stack, uint64_t arguments, uint64_t results);
void gated_norm(StableIValue* stack, uint64_t arguments, uint64_t results);
void segment_summary(StableIValue* stack, uint64_t arguments, uint64_t results);
void segment_prepare(StableIValue* stack, uint64_t arguments, uint64_t results);
void segment_merge(StableIValue* stack, uint64_t arguments, uint64_t results);
void metadata(StableIValue* stack, uint64_t arguments, uint64_t results);
void metadata_out(StableIValue* stack, uint64_t arguments, uint64_t results);
void state_gather(StableIValue* stack, uint64_t arguments, uint64_t results);
void state_scatter(StableIValue* stack, uint64_t arguments, uint64_t results);

}  // namespace kda::torch_ops

#include "attention.h"

namespace kda::torch_ops {

GateParameters read_gate_parameters(Arguments& a) {
  GateParameters g;
  g.A_log = a.optional_tensor("A_log");
  g.dt_bias = a.optional_tensor("dt_bias");
  return g;
}

kda_sequences read_sequences(Arguments& a) {
  kda_sequences s;
  s.cu_seqlens = a.optional_tensor("cu_seqlens");
  s.begin = a.optional_tensor("begin");
  s.length = a.optional_tensor("length");
  s.num_active = a.optional_tensor("num_active");
  return s;
}

int64_t size_from_end(const kda_tensor& t, int i) { return t.rank >= i ? t.shape[t.rank - i] : 0; }

Counts count(const kda_sequences& s, const kda_tensor& token, int row_dims) {
  const bool batched = token.rank > row_dims;
  Counts c;
  c.tokens = token.rank == 0 ? 0 : token.shape[0] * (batched ? token.shape[1] : 1);
  c.sequences = batched ? token.shape[0] : 1;
  if (present(s.cu_seqlens)) c.sequences = s.cu_seqlens.shape[0] - 1;
  else if (present(s.begin)) c.sequences = s.begin.shape[0];
  return c;
}

kda_attention_spec attention_spec(const Words& words, int64_t heads, const kda_tensor& gate, const kda_tensor& values,
                                  kda_dtype io, kda_dtype beta, kda_dtype state) {
  kda_attention_spec s;
  std::memset(static_cast<void*>(&s), 0, sizeof s);
  if (gate.rank < 3) bad_argument("gate: wanted [T, HV, K] or [B, T, HV, K], got rank " + std::to_string(gate.rank));
  s.num_heads = heads;
  s.num_value_heads = size_from_end(gate, 2);
  s.key_dim = size_from_end(gate, 1);
  s.value_dim = size_from_end(values, 1);
  s.io_dtype = io;
  s.gate_dtype = gate.dtype;
  s.beta_dtype = beta;
  s.state_dtype = state;
  s.gate_family = words.gate_family;
  s.lower_bound = words.lower_bound;
  s.beta_form = words.beta_is_logits ? KDA_BETA_LOGITS : KDA_BETA_PLAIN;
  s.allow_neg_eigval = words.allow_neg_eigval ? 1 : 0;
  s.no_qk_norm = words.qk_norm ? 0 : 1;
  s.scale = words.scale;
  return s;
}

}  // namespace kda::torch_ops

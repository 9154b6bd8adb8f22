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

Form read_form(Arguments& a) {
  Form f;
  f.gate_family = a.text();
  f.lower_bound = a.optional_number(0);
  f.beta_is_logits = a.flag();
  f.allow_neg_eigval = a.flag();
  f.qk_norm = a.flag();
  f.scale = a.optional_number(0);
  return f;
}

PlanOptions read_plan_options(Arguments& a) {
  PlanOptions o;
  o.null_slot = a.integer();
  const bool batch_invariant = a.flag(), checked = a.flag();
  o.flags = (batch_invariant ? KDA_PLAN_BATCH_INVARIANT : 0u) | (checked ? KDA_PLAN_CHECKED : 0u);
  o.backend = a.optional_text();
  o.max_tokens = a.integer();
  o.max_sequences = a.integer();
  return o;
}

int64_t size_from_end(const kda_tensor& t, int i) { return t.rank >= i ? t.shape[t.rank - i] : 0; }

Counts count(const kda_sequences& s, const kda_tensor& token, int row_dims) {
  const bool batched = token.rank > row_dims;
  Counts c;
  c.tokens = token.rank == 0 ? 0 : token.shape[0] * (batched ? token.shape[1] : 1);
  c.sequences = batched ? token.shape[0] : 1;
  if (s.cu_seqlens.dtype != KDA_DTYPE_NONE) c.sequences = s.cu_seqlens.shape[0] - 1;
  else if (s.begin.dtype != KDA_DTYPE_NONE) c.sequences = s.begin.shape[0];
  return c;
}

kda_attention_spec attention_spec(const Form& form, int64_t heads, const kda_tensor& gate, const kda_tensor& values,
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
  if (form.gate_family == "softplus") s.gate_family = KDA_GATE_SOFTPLUS;
  else if (form.gate_family == "bounded") s.gate_family = KDA_GATE_BOUNDED;
  else if (form.gate_family == "plain") s.gate_family = KDA_GATE_PLAIN;
  else
    bad_argument("gate_family: wanted 'softplus', 'bounded' or 'plain', got '" + std::string(form.gate_family) + "'");
  if (s.gate_family != KDA_GATE_BOUNDED && form.lower_bound != 0) {
    bad_argument("lower_bound: wanted none with gate_family '" + std::string(form.gate_family) + "', got " +
                 std::to_string(form.lower_bound));
  }
  s.lower_bound = form.lower_bound;
  s.beta_form = form.beta_is_logits ? KDA_BETA_LOGITS : KDA_BETA_PLAIN;
  s.allow_neg_eigval = form.allow_neg_eigval ? 1 : 0;
  s.no_qk_norm = form.qk_norm ? 0 : 1;
  s.scale = form.scale;
  return s;
}

kda_conv_layout conv_layout(std::string_view name) {
  if (name == "SD") return KDA_CONV_SD;
  if (name == "DS") return KDA_CONV_DS;
  bad_argument("layout: wanted 'SD' ([slots, L, channels]) or 'DS' ([slots, channels, L]), got '" +
               std::string(name) + "'");
}

}  // namespace kda::torch_ops

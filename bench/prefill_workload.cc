#include "bench/workload.h"

namespace kda::bench {
namespace {

const char* gate_name(kda_gate_family gate) {
  return gate == KDA_GATE_SOFTPLUS ? "softplus" : gate == KDA_GATE_BOUNDED ? "bounded" : "plain";
}

struct Memory {
  Arena arena;
  Plan plan;
  kda_prefill_args args = make<kda_prefill_args>();
  kda_workspace workspace{};
};

// g <= 0 for the plain form.
void make_decays(const kda_tensor& gate, int64_t count) {
  auto* const g = static_cast<float*>(gate.data);
  for (int64_t i = 0; i < count; ++i) g[i] = -g[i] * g[i];
}

}  // namespace

Workload prefill(const Setting& setting, const PrefillShape& s) {
  const auto m = std::make_shared<Memory>();
  const int64_t T = s.tokens, H = s.heads, K = s.key_dim, V = s.value_dim;
  const bool plain = s.gate == KDA_GATE_PLAIN;
  auto d = make<kda_prefill_desc>();
  d.backend = setting.backend.c_str();
  d.attention.num_heads = H;
  d.attention.key_dim = K;
  d.attention.value_dim = V;
  d.attention.io_dtype = s.io;
  d.attention.gate_dtype = plain ? KDA_FP32 : s.io;
  d.attention.gate_family = s.gate;
  d.attention.lower_bound = s.gate == KDA_GATE_BOUNDED ? -5 : 0;
  d.max_tokens = T;
  d.max_sequences = s.sequences;
  d.flags = s.batch_invariant ? KDA_PLAN_BATCH_INVARIANT : 0;
  m->plan = Plan(setting.context, d);

  kda_prefill_args& a = m->args;
  a.q = m->arena.random(s.io, {T, H, K});
  a.k = m->arena.random(s.io, {T, H, K});
  a.v = m->arena.random(s.io, {T, H, V});
  a.gate = m->arena.random(d.attention.gate_dtype, {T, H, K});
  a.beta = m->arena.random(s.io, {T, H}, 2);
  if (plain) make_decays(a.gate, T * H * K);
  if (!plain) a.A_log = m->arena.random(KDA_FP32, {H});
  if (!plain) a.dt_bias = m->arena.random(KDA_FP32, {H * K});
  a.state = m->arena.zeros(KDA_FP32, {s.sequences, H, V, K});
  a.out = m->arena.zeros(s.io, {T, H, V});
  std::vector<int64_t> cu;
  for (int64_t n = 0; n <= s.sequences; ++n) cu.push_back(T * n / s.sequences);
  a.sequences.cu_seqlens = m->arena.ints(cu);
  m->workspace = m->arena.workspace(m->plan);

  Workload w;
  w.name = "prefill";
  w.parameters = {{"tokens", std::to_string(T)},     {"sequences", std::to_string(s.sequences)},
                  {"heads", std::to_string(H)},      {"key_dim", std::to_string(K)},
                  {"value_dim", std::to_string(V)},  {"io", kda_dtype_name(s.io)},
                  {"gate_family", gate_name(s.gate)}};
  w.tokens = T;
  w.backend = m->plan.backend();
  w.isa = m->plan.isa();
  w.variants.push_back({"prefill", [m] { m->plan.run(m->args, m->workspace); },
                        7.0 * static_cast<double>(K * V * T * H), Unit::kFlop,
                        m->plan.backend() + " " + m->plan.isa()});
  std::vector<std::string> over;
  for (Variant& v : sgemm_variants(setting.context.num_threads(), setting.context.isa(), w.notes)) {
    over.push_back(v.label);
    w.variants.push_back(std::move(v));
  }
  if (!over.empty()) w.ratios.push_back({"prefill / sgemm", "prefill", over});
  return w;
}

}  // namespace kda::bench

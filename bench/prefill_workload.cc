#include "bench/workload.h"

namespace kda::bench {
namespace {

const char* gate_name(kda_gate_family gate) {
  return gate == KDA_GATE_SOFTPLUS ? "softplus" : gate == KDA_GATE_BOUNDED ? "bounded" : "plain";
}

struct Memory {
  explicit Memory(const Setting& setting) : arena(setting) {}
  Arena arena;
  Plan plan;
  std::vector<kda_prefill_args> args;  // that calls go through in turn
  kda_workspace workspace{};
};

}  // namespace

Workload prefill(const Setting& setting, const PrefillShape& s) {
  const auto m = std::make_shared<Memory>(setting);
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

  const double io = static_cast<double>(kda_dtype_size(s.io)), rows = static_cast<double>(T) * static_cast<double>(H);
  const double gates = static_cast<double>(K) * static_cast<double>(kda_dtype_size(d.attention.gate_dtype));
  const double tokens = rows * (io * static_cast<double>(2 * K + 2 * V + 1) + gates);
  const double states =
      2.0 * 4 * static_cast<double>(s.sequences) * static_cast<double>(H) * static_cast<double>(K * V);
  const int64_t sets = setting.sets(static_cast<int64_t>(std::min(tokens, 1e18)));
  auto a = make<kda_prefill_args>();
  for (int64_t i = 0; i < sets; ++i) {
    a.q = m->arena.random(s.io, {T, H, K});
    a.k = m->arena.random(s.io, {T, H, K});
    a.v = m->arena.random(s.io, {T, H, V});
    a.gate = m->arena.random(d.attention.gate_dtype, {T, H, K}, 1, plain);
    a.beta = m->arena.random(s.io, {T, H}, 2);
    a.out = m->arena.room(s.io, {T, H, V});
    m->args.push_back(a);
  }
  if (!plain) a.A_log = m->arena.random(KDA_FP32, {H});
  if (!plain) a.dt_bias = m->arena.random(KDA_FP32, {H * K});
  a.state = m->arena.zeros(KDA_FP32, {s.sequences, H, V, K});
  std::vector<int64_t> cu;
  for (int64_t n = 0; n <= s.sequences; ++n) cu.push_back(T * n / s.sequences);
  a.sequences.cu_seqlens = m->arena.ints(cu);
  for (kda_prefill_args& x : m->args)
    x.A_log = a.A_log, x.dt_bias = a.dt_bias, x.state = a.state, x.sequences = a.sequences;
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
  const auto call = [m](int64_t i, void* stream) {
    m->plan.run(m->args[static_cast<size_t>(i) % m->args.size()], m->workspace, stream);
  };
  w.variants.push_back({"prefill", call, 7.0 * static_cast<double>(K * V) * rows, Unit::kFlop,
                        m->plan.backend() + " " + m->plan.isa(), tokens + states});
  if (setting.on_device()) return w;
  std::vector<std::string> over;
  for (Variant& v : sgemm_variants(setting.workers, setting.context.isa(), w.notes)) {
    over.push_back(v.label);
    w.variants.push_back(std::move(v));
  }
  if (!over.empty()) w.ratios.push_back({"prefill / sgemm", "prefill", over});
  return w;
}

}  // namespace kda::bench

#include "bench/workload.h"

namespace kda::bench {
namespace {

struct Memory {
  Arena arena;
  Plan plan;
  kda_decode_args args = make<kda_decode_args>();
  kda_decode_step_args step = make<kda_decode_step_args>();
  kda_workspace workspace{};
};

kda_decode_desc decode_desc(const DecodeShape& s, const std::string& backend) {
  auto d = make<kda_decode_desc>();
  d.backend = backend.c_str();
  d.attention.num_heads = s.heads;
  d.attention.key_dim = s.key_dim;
  d.attention.value_dim = s.value_dim;
  d.attention.io_dtype = s.io;
  d.attention.gate_family = KDA_GATE_BOUNDED;
  d.attention.lower_bound = -5;
  d.attention.state_dtype = s.state;
  d.max_tokens = s.sequences * s.width;
  d.max_sequences = s.sequences;
  d.width = static_cast<int32_t>(s.width);
  return d;
}

void fill_args(const DecodeShape& s, Arena& arena, kda_decode_args& a) {
  const int64_t T = s.sequences * s.width, H = s.heads, K = s.key_dim, V = s.value_dim;
  if (!s.step) {
    a.q = arena.random(s.io, {T, H, K});
    a.k = arena.random(s.io, {T, H, K});
    a.v = arena.random(s.io, {T, H, V});
  }
  a.gate = arena.random(s.io, {T, H, K});
  a.beta = arena.random(s.io, {T, H});
  a.A_log = arena.random(KDA_FP32, {H});
  a.out = arena.zeros(s.io, {T, H, V});
  a.state = arena.random(s.state, {T, H, V, K});  // a column a token (V-5)
  std::vector<int64_t> cu, columns;
  for (int64_t n = 0; n <= s.sequences; ++n) cu.push_back(n * s.width);
  for (int64_t i = 0; i < T; ++i) columns.push_back(i);
  a.sequences.cu_seqlens = arena.ints(cu);
  a.slots = arena.ints(columns);
  a.slots.rank = 2;
  a.slots.shape[0] = s.sequences, a.slots.shape[1] = s.width;
  a.slots.strides[0] = s.width, a.slots.strides[1] = 1;
}

void fill_step(const DecodeShape& s, Arena& arena, kda_decode_step_args& a) {
  const int64_t T = s.sequences * s.width, channels = s.heads * (2 * s.key_dim + s.value_dim);
  a.x[0] = arena.random(s.io, {T, channels});
  a.conv_weight[0] = arena.random(KDA_FP32, {channels, 4});
  a.conv_state[0] = arena.random(s.io, {T, 2 + s.width, channels});
  a.z = arena.random(s.io, {T, s.heads, s.value_dim});
  a.norm_weight = arena.random(KDA_FP32, {s.value_dim});
}

}  // namespace

Workload decode(const Setting& setting, const DecodeShape& s) {
  const auto m = std::make_shared<Memory>();
  const kda_decode_desc d = decode_desc(s, setting.backend);
  fill_args(s, m->arena, m->args);
  Workload w;
  w.name = s.step ? "decode_step" : "decode";
  std::function<void()> run;
  if (s.step) {
    auto sd = make<kda_decode_step_desc>();
    sd.decode = d;
    sd.conv_width = 4;
    sd.conv_parts = 1;
    sd.conv_layout = KDA_CONV_SD;
    m->plan = Plan(setting.context, sd);
    fill_step(s, m->arena, m->step);
    m->step.decode = m->args;
    run = [m] { m->plan.run(m->step, m->workspace); };
  } else {
    m->plan = Plan(setting.context, d);
    run = [m] { m->plan.run(m->args, m->workspace); };
  }
  m->workspace = m->arena.workspace(m->plan);
  w.parameters = {{"sequences", std::to_string(s.sequences)}, {"width", std::to_string(s.width)},
                  {"heads", std::to_string(s.heads)},         {"key_dim", std::to_string(s.key_dim)},
                  {"value_dim", std::to_string(s.value_dim)}, {"io", kda_dtype_name(s.io)},
                  {"state", kda_dtype_name(s.state)}};
  w.tokens = s.sequences * s.width;
  w.backend = m->plan.backend();
  w.isa = m->plan.isa();
  // A row reads one state and writes one a token: as many bytes as an in-place scale of (1 + width) / 2 states.
  const auto states = static_cast<size_t>(s.sequences * s.heads * s.value_dim * s.key_dim * (1 + s.width) / 2) *
                      kda_dtype_size(s.state);
  w.variants.push_back({w.name, std::move(run), 2.0 * static_cast<double>(states), Unit::kByte,
                        m->plan.backend() + " " + m->plan.isa()});
  w.variants.push_back(scale_variant(setting.workers, states));
  w.ratios.push_back({w.name + " / in-place scale", w.name, {"in-place scale"}});
  return w;
}

}  // namespace kda::bench

#include "bench/workload.h"

namespace kda::bench {
namespace {

struct Memory {
  explicit Memory(const Setting& setting) : arena(setting) {}
  Arena arena;
  Plan plan;
  std::vector<kda_decode_args> args;  // that calls go through in turn
  std::vector<kda_decode_step_args> steps;
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
  d.mode = s.records ? KDA_DECODE_RECORDS : KDA_DECODE_COLUMNS;
  d.fold = s.records;
  return d;
}

// States of a row: a column a token (V-5), or one and records.
int64_t columns_of(const DecodeShape& s) { return s.records ? 1 : s.width; }

// Records of the verify window before, all but the last token of which are committed now (V-10b).
void make_records(const DecodeShape& s, Arena& arena, int64_t rows, kda_decode_args& a) {
  a.records.u = arena.random(KDA_FP32, {rows, s.heads, s.width, s.value_dim});
  a.records.kg = arena.random(s.io, {rows, s.heads, s.width, 2 * s.key_dim});
  a.records.count = arena.ints(std::vector<int64_t>(static_cast<size_t>(rows), s.width));
}

// `sets` disjoint sets of states over the same tokens.
std::vector<kda_decode_args> make_args(const DecodeShape& s, Arena& arena, int64_t sets) {
  const int64_t T = s.sequences * s.width, H = s.heads, K = s.key_dim, V = s.value_dim;
  auto a = make<kda_decode_args>();
  if (!s.step) {
    a.q = arena.random(s.io, {T, H, K});
    a.k = arena.random(s.io, {T, H, K});
    a.v = arena.random(s.io, {T, H, V});
  }
  a.gate = arena.random(s.io, {T, H, K});
  a.beta = arena.random(s.io, {T, H});
  a.A_log = arena.random(KDA_FP32, {H});
  a.out = arena.room(s.io, {T, H, V});
  const int64_t N = s.sequences, width = columns_of(s), pool = sets * N * width;
  a.state = arena.random(s.state, {pool, H, V, K});
  if (s.records) make_records(s, arena, pool, a);
  if (s.width > 1) a.accepted = arena.ints(std::vector<int64_t>(static_cast<size_t>(N), s.width - 1));
  std::vector<int64_t> cu, columns;
  for (int64_t n = 0; n <= N; ++n) cu.push_back(n * s.width);
  // Spread over the pool, as a server's are.
  const int64_t step = pool % 7919 == 0 ? 1 : 7919;
  for (int64_t i = 0; i < pool; ++i) columns.push_back(sets > 1 ? i * step % pool : i);
  a.sequences.cu_seqlens = arena.ints(cu);
  kda_tensor slots = arena.ints(columns);
  slots.rank = 2;
  slots.shape[0] = sets * N, slots.shape[1] = width;
  slots.strides[0] = width, slots.strides[1] = 1;
  std::vector<kda_decode_args> all;
  for (int64_t i = 0; i < sets; ++i) {
    a.slots = part(slots, i, sets);
    all.push_back(a);
  }
  return all;
}

std::vector<kda_decode_step_args> make_steps(const DecodeShape& s, Arena& arena,
                                             const std::vector<kda_decode_args>& decode) {
  const int64_t T = s.sequences * s.width, channels = s.heads * (2 * s.key_dim + s.value_dim);
  auto a = make<kda_decode_step_args>();
  a.x[0] = arena.random(s.io, {T, channels});
  a.conv_weight[0] = arena.random(KDA_FP32, {channels, 4});
  a.conv_state[0] = arena.random(s.io, {static_cast<int64_t>(decode.size()) * T, 2 + s.width, channels});
  a.z = arena.random(s.io, {T, s.heads, s.value_dim});
  a.norm_weight = arena.random(KDA_FP32, {s.value_dim});
  std::vector<kda_decode_step_args> all;
  for (const kda_decode_args& d : decode) {
    a.decode = d;
    all.push_back(a);
  }
  return all;
}

// States that a row reads and writes.
double states_of(const DecodeShape& s) { return s.records ? 2 : 1 + static_cast<double>(s.width); }

// What a call must move once: states, token rows, of recover mode records written and committed, and of a step
// projections, windows, taps and z.
double floor_of(const DecodeShape& s) {
  const double io = static_cast<double>(kda_dtype_size(s.io)), N = static_cast<double>(s.sequences);
  const double H = static_cast<double>(s.heads), K = static_cast<double>(s.key_dim);
  const double V = static_cast<double>(s.value_dim), width = static_cast<double>(s.width);
  const double states = N * H * K * V * static_cast<double>(kda_dtype_size(s.state)) * states_of(s);
  const double tokens = N * width * H * io * (3 * K + 2 * V + 1);
  const double records = s.records ? N * H * (2 * width - 1) * (4 * V + 2 * io * K) : 0;
  if (!s.step) return states + tokens + records;
  const double channels = H * (2 * K + V), windows = N * channels * io * (3 + 2 + width);
  return states + tokens + windows + channels * 16 + N * width * H * V * io;
}

}  // namespace

Workload decode(const Setting& setting, const DecodeShape& s) {
  const auto m = std::make_shared<Memory>(setting);
  const kda_decode_desc d = decode_desc(s, setting.backend);
  const double set_bytes = static_cast<double>(s.sequences * columns_of(s) * s.heads) *
                           static_cast<double>(s.key_dim * s.value_dim) *
                           static_cast<double>(kda_dtype_size(s.state));
  m->args = make_args(s, m->arena, setting.sets(static_cast<int64_t>(std::min(set_bytes, 1e18))));
  Workload w;
  w.name = s.step ? "decode_step" : "decode";
  std::function<void(int64_t, void*)> call;
  if (s.step) {
    auto sd = make<kda_decode_step_desc>();
    sd.decode = d;
    sd.conv_width = 4;
    sd.conv_parts = 1;
    sd.conv_layout = KDA_CONV_SD;
    m->plan = Plan(setting.context, sd);
    m->steps = make_steps(s, m->arena, m->args);
    call = [m](int64_t i, void* stream) {
      m->plan.run(m->steps[static_cast<size_t>(i) % m->steps.size()], m->workspace, stream);
    };
  } else {
    m->plan = Plan(setting.context, d);
    call = [m](int64_t i, void* stream) {
      m->plan.run(m->args[static_cast<size_t>(i) % m->args.size()], m->workspace, stream);
    };
  }
  m->workspace = m->arena.workspace(m->plan);
  w.parameters = {{"sequences", std::to_string(s.sequences)}, {"width", std::to_string(s.width)},
                  {"heads", std::to_string(s.heads)},         {"key_dim", std::to_string(s.key_dim)},
                  {"value_dim", std::to_string(s.value_dim)}, {"io", kda_dtype_name(s.io)},
                  {"state", kda_dtype_name(s.state)},         {"mode", s.records ? "records" : "columns"}};
  w.tokens = s.sequences * s.width;
  w.backend = m->plan.backend();
  w.isa = m->plan.isa();
  // As many bytes as an in-place scale of half the states that are read and written.
  const auto states =
      static_cast<size_t>(static_cast<double>(s.sequences * s.heads * s.value_dim * s.key_dim) * states_of(s) / 2) *
      kda_dtype_size(s.state);
  w.variants.push_back({w.name, std::move(call), 2.0 * static_cast<double>(states), Unit::kByte,
                        m->plan.backend() + " " + m->plan.isa(), floor_of(s)});
  if (setting.on_device()) return w;
  w.variants.push_back(scale_variant(setting.workers, states));
  w.ratios.push_back({w.name + " / in-place scale", w.name, {"in-place scale"}});
  return w;
}

}  // namespace kda::bench

// Convolution and gated norm: their bytes over memcpy of as many.
#include "bench/workload.h"

namespace kda::bench {
namespace {

constexpr int64_t kDim = 128;

struct Memory {
  explicit Memory(const Setting& setting) : arena(setting) {}
  Arena arena;
  Plan plan;
  std::vector<kda_conv_args> conv;  // that calls go through in turn
  std::vector<kda_gated_norm_args> norm;
  kda_workspace workspace{};
};

template <class Args>
void finish(Workload& w, const Setting& setting, const std::shared_ptr<Memory>& m, std::vector<Args> Memory::*args,
            double bytes) {
  m->workspace = m->arena.workspace(m->plan);
  w.backend = m->plan.backend();
  w.isa = m->plan.isa();
  const auto call = [m, args](int64_t i, void* stream) {
    const std::vector<Args>& all = (*m).*args;
    m->plan.run(all[static_cast<size_t>(i) % all.size()], m->workspace, stream);
  };
  w.variants.push_back({w.name, call, bytes, Unit::kByte, w.backend + " " + w.isa, bytes});
  if (setting.on_device()) return;
  w.variants.push_back(copy_variant(setting.workers, static_cast<size_t>(bytes / 2)));
  w.ratios.push_back({w.name + " / memcpy", w.name, {"memcpy"}});
}

}  // namespace

Workload conv(const Setting& setting, const ConvShape& s) {
  const auto m = std::make_shared<Memory>(setting);
  const int64_t T = s.tokens, C = 3 * s.heads * kDim, N = s.columns ? T : s.sequences;
  auto d = make<kda_conv_desc>();
  d.backend = setting.backend.c_str();
  d.mode = s.columns ? KDA_CONV_COLUMNS : KDA_CONV_PREFILL;
  d.width = 4;
  d.channels[0] = C;
  d.io_dtype = s.io;
  d.layout = s.layout;
  d.max_tokens = T;
  d.max_sequences = N;
  d.initial_state = KDA_INITIAL_ALL;
  m->plan = Plan(setting.context, d);
  const double io = static_cast<double>(kda_dtype_size(s.io));
  const double bytes = io * static_cast<double>(C) * static_cast<double>(2 * T + 6 * N);
  auto a = make<kda_conv_args>();
  a.weight[0] = m->arena.random(KDA_FP32, {C, 4});
  std::vector<int64_t> cu;
  for (int64_t n = 0; n <= N; ++n) cu.push_back(T * n / N);
  a.sequences.cu_seqlens = m->arena.ints(cu);
  for (int64_t i = setting.sets(static_cast<int64_t>(std::min(bytes, 1e18))); i > 0; --i) {
    a.x[0] = m->arena.random(s.io, {T, C});
    a.state[0] = m->arena.random(
        s.io, s.layout == KDA_CONV_SD ? std::vector<int64_t>{N, 3, C} : std::vector<int64_t>{N, C, 3});
    a.out[0] = m->arena.room(s.io, {T, C});
    m->conv.push_back(a);
  }
  Workload w;
  w.name = "conv";
  w.parameters = {{"mode", s.columns ? "columns" : "prefill"},
                  {"tokens", std::to_string(T)},
                  {"sequences", std::to_string(N)},
                  {"channels", std::to_string(C)},
                  {"io", kda_dtype_name(s.io)},
                  {"layout", s.layout == KDA_CONV_SD ? "SD" : "DS"}};
  finish(w, setting, m, &Memory::conv, bytes);
  return w;
}

Workload gated_norm(const Setting& setting, const NormShape& s) {
  const auto m = std::make_shared<Memory>(setting);
  auto d = make<kda_gated_norm_desc>();
  d.backend = setting.backend.c_str();
  d.num_value_heads = s.heads;
  d.value_dim = kDim;
  d.io_dtype = s.io;
  d.max_tokens = s.tokens;
  m->plan = Plan(setting.context, d);
  const double io = static_cast<double>(kda_dtype_size(s.io));
  const double bytes = 3 * io * static_cast<double>(s.tokens) * static_cast<double>(s.heads * kDim);
  auto a = make<kda_gated_norm_args>();
  a.weight = m->arena.random(KDA_FP32, {kDim});
  for (int64_t i = setting.sets(static_cast<int64_t>(std::min(bytes, 1e18))); i > 0; --i) {
    a.o = m->arena.random(s.io, {s.tokens, s.heads, kDim});
    a.z = m->arena.random(s.io, {s.tokens, s.heads, kDim});
    a.out = m->arena.room(s.io, {s.tokens, s.heads, kDim});
    m->norm.push_back(a);
  }
  Workload w;
  w.name = "gated_norm";
  w.parameters = {
      {"tokens", std::to_string(s.tokens)}, {"heads", std::to_string(s.heads)}, {"io", kda_dtype_name(s.io)}};
  finish(w, setting, m, &Memory::norm, bytes);
  return w;
}

}  // namespace kda::bench

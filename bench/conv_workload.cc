// Convolution and gated norm: their bytes over memcpy of as many.
#include "bench/workload.h"

namespace kda::bench {
namespace {

constexpr int64_t kDim = 128;

struct Memory {
  Arena arena;
  Plan plan;
  kda_conv_args conv = make<kda_conv_args>();
  kda_gated_norm_args norm = make<kda_gated_norm_args>();
  kda_workspace workspace{};
};

void finish(Workload& w, const Setting& setting, const std::shared_ptr<Memory>& m, std::function<void()> run,
            double bytes) {
  m->workspace = m->arena.workspace(m->plan);
  w.backend = m->plan.backend();
  w.isa = m->plan.isa();
  w.variants.push_back({w.name, std::move(run), bytes, Unit::kByte, w.backend + " " + w.isa});
  w.variants.push_back(copy_variant(setting.workers, static_cast<size_t>(bytes / 2)));
  w.ratios.push_back({w.name + " / memcpy", w.name, {"memcpy"}});
}

}  // namespace

Workload conv(const Setting& setting, const ConvShape& s) {
  const auto m = std::make_shared<Memory>();
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
  m->conv.x[0] = m->arena.random(s.io, {T, C});
  m->conv.weight[0] = m->arena.random(KDA_FP32, {C, 4});
  m->conv.state[0] =
      m->arena.random(s.io, s.layout == KDA_CONV_SD ? std::vector<int64_t>{N, 3, C} : std::vector<int64_t>{N, C, 3});
  m->conv.out[0] = m->arena.zeros(s.io, {T, C});
  std::vector<int64_t> cu;
  for (int64_t n = 0; n <= N; ++n) cu.push_back(T * n / N);
  m->conv.sequences.cu_seqlens = m->arena.ints(cu);
  Workload w;
  w.name = "conv";
  w.parameters = {{"mode", s.columns ? "columns" : "prefill"},
                  {"tokens", std::to_string(T)},
                  {"sequences", std::to_string(N)},
                  {"channels", std::to_string(C)},
                  {"io", kda_dtype_name(s.io)},
                  {"layout", s.layout == KDA_CONV_SD ? "SD" : "DS"}};
  const auto io = static_cast<double>(kda_dtype_size(s.io));
  finish(
      w, setting, m, [m] { m->plan.run(m->conv, m->workspace); }, io * static_cast<double>(C * (2 * T + 6 * N)));
  return w;
}

Workload gated_norm(const Setting& setting, const NormShape& s) {
  const auto m = std::make_shared<Memory>();
  auto d = make<kda_gated_norm_desc>();
  d.backend = setting.backend.c_str();
  d.num_value_heads = s.heads;
  d.value_dim = kDim;
  d.io_dtype = s.io;
  d.max_tokens = s.tokens;
  m->plan = Plan(setting.context, d);
  m->norm.o = m->arena.random(s.io, {s.tokens, s.heads, kDim});
  m->norm.z = m->arena.random(s.io, {s.tokens, s.heads, kDim});
  m->norm.weight = m->arena.random(KDA_FP32, {kDim});
  m->norm.out = m->arena.zeros(s.io, {s.tokens, s.heads, kDim});
  Workload w;
  w.name = "gated_norm";
  w.parameters = {
      {"tokens", std::to_string(s.tokens)}, {"heads", std::to_string(s.heads)}, {"io", kda_dtype_name(s.io)}};
  const auto io = static_cast<double>(kda_dtype_size(s.io));
  finish(
      w, setting, m, [m] { m->plan.run(m->norm, m->workspace); },
      3 * io * static_cast<double>(s.tokens * s.heads * kDim));
  return w;
}

}  // namespace kda::bench

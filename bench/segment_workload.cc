#include "bench/workload.h"

namespace kda::bench {
namespace {

constexpr int64_t kDim = 128;

struct Memory {
  explicit Memory(const Setting& setting) : arena(setting) {}
  Arena arena;
  Plan summary, merge;
  std::vector<kda_segment_summary_args> args;  // that calls go through in turn
  kda_segment_merge_args merge_args = make<kda_segment_merge_args>();
  kda_workspace summary_workspace{}, merge_workspace{};
};

void make_summary(const Setting& setting, const SegmentShape& s, Memory& m) {
  auto d = make<kda_prefill_desc>();
  d.backend = setting.backend.c_str();
  d.attention.num_heads = s.heads;
  d.attention.key_dim = d.attention.value_dim = kDim;
  d.attention.gate_family = s.gate;
  d.attention.lower_bound = s.gate == KDA_GATE_BOUNDED ? -5 : 0;
  d.max_tokens = s.tokens;
  d.max_sequences = 1;
  m.summary = Plan::segment_summary(setting.context, d);
  m.summary_workspace = m.arena.workspace(m.summary);
  auto a = make<kda_segment_summary_args>();
  a.A_log = m.arena.random(KDA_FP32, {s.heads});
  a.dt_bias = m.arena.random(KDA_FP32, {s.heads * kDim});
  a.sequences.cu_seqlens = m.arena.ints({0, s.tokens});
  a.summary = m.arena.room(KDA_FP32, {1, s.heads, 2 * kDim, kDim});
  for (int64_t i = setting.sets(6 * s.tokens * s.heads * kDim); i > 0; --i) {
    a.k = m.arena.random(KDA_BF16, {s.tokens, s.heads, kDim});
    a.v = m.arena.random(KDA_BF16, {s.tokens, s.heads, kDim});
    a.gate = m.arena.random(KDA_BF16, {s.tokens, s.heads, kDim});
    a.beta = m.arena.random(KDA_BF16, {s.tokens, s.heads}, 2);
    m.args.push_back(a);
  }
}

void make_merge(const Setting& setting, const SegmentShape& s, Memory& m) {
  auto d = make<kda_segment_merge_desc>();
  d.backend = setting.backend.c_str();
  d.num_value_heads = s.heads;
  d.key_dim = d.value_dim = kDim;
  d.max_segments = s.segments;
  m.merge = Plan(setting.context, d);
  m.merge_workspace = m.arena.workspace(m.merge);
  kda_segment_merge_args& a = m.merge_args;
  a.summaries = m.arena.random(KDA_FP32, {s.segments, s.heads, 2 * kDim, kDim}, 0.05);
  a.start_states = m.arena.room(KDA_FP32, {s.segments, s.heads, kDim, kDim});
  a.final_state = m.arena.room(KDA_FP32, {s.heads, kDim, kDim});
}

}  // namespace

Workload segments(const Setting& setting, const SegmentShape& s) {
  const auto m = std::make_shared<Memory>(setting);
  make_summary(setting, s, *m);
  make_merge(setting, s, *m);
  const double rows = static_cast<double>(s.tokens * s.heads), state = static_cast<double>(s.heads * kDim * kDim * 4);
  Workload w;
  w.name = "segments";
  w.parameters = {{"tokens", std::to_string(s.tokens)},
                  {"heads", std::to_string(s.heads)},
                  {"segments", std::to_string(s.segments)},
                  {"gate_family", s.gate == KDA_GATE_BOUNDED ? "bounded" : "softplus"}};
  w.backend = m->summary.backend();
  w.isa = m->summary.isa();
  const auto summary = [m](int64_t i, void* stream) {
    m->summary.run(m->args[static_cast<size_t>(i) % m->args.size()], m->summary_workspace, stream);
  };
  const auto merge = [m](int64_t, void* stream) { m->merge.run(m->merge_args, m->merge_workspace, stream); };
  w.variants.push_back(
      {"summary", summary, 1, Unit::kCall, w.backend + " " + w.isa, rows * (6 * kDim + 2) + 2 * state});
  w.variants.push_back({"merge", merge, 1, Unit::kCall, m->merge.backend() + " " + m->merge.isa(),
                        state * static_cast<double>(3 * s.segments + 1)});
  return w;
}

}  // namespace kda::bench

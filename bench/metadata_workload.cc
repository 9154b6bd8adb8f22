#include "bench/workload.h"

namespace kda::bench {
namespace {

struct Memory {
  explicit Memory(const Setting& setting) : arena(setting) {}
  Arena arena;
  std::shared_ptr<kda_plan> plan;
  kda_metadata_args args = make<kda_metadata_args>();
  kda_workspace workspace{};
};

// Prompts among decodes.
std::vector<int64_t> offsets(const MetadataShape& s) {
  std::vector<int64_t> cu = {0};
  for (int64_t n = 0; n < s.sequences; ++n) {
    const bool prompt = s.prompt_every > 0 && n % s.prompt_every == 0;
    cu.push_back(cu.back() + (!prompt ? 1 : s.prompt_tokens > 0 ? s.prompt_tokens : 64 + n % 256));
  }
  return cu;
}

void make_tables(Arena& a, int64_t N, int64_t T, int64_t width, int64_t chunk, kda_step_tables& t) {
  int64_t chunks = 0;
  check(kda_chunk_bound(T, N, chunk, &chunks));
  t.counts = a.room(KDA_INT32, {KDA_METADATA_COUNTS});
  for (kda_tensor* x :
       {&t.prefill_rows, &t.decode_rows, &t.spec_rows, &t.prefill_begin, &t.prefill_length, &t.decode_begin,
        &t.decode_length, &t.spec_begin, &t.spec_length, &t.prefill_slots, &t.decode_slots, &t.num_accepted}) {
    *x = a.room(KDA_INT32, {N});
  }
  for (kda_tensor* x : {&t.non_spec_query_start_loc, &t.spec_query_start_loc, &t.prefill_query_start_loc}) {
    *x = a.room(KDA_INT32, {N + 1});
  }
  t.non_spec_token_indx = a.room(KDA_INT32, {T});
  t.spec_token_indx = a.room(KDA_INT32, {std::min(T, N * width)});
  t.spec_slots = a.room(KDA_INT32, {N, width});
  t.has_initial_state = a.room(KDA_BOOL, {N});
  t.spec_sequence_masks = a.room(KDA_BOOL, {N});
  t.chunk_indices = a.room(KDA_INT32, {chunks, 2});
  t.chunk_offsets = a.room(KDA_INT64, {N + 1});
}

}  // namespace

Workload metadata(const Setting& setting, const MetadataShape& s) {
  const auto m = std::make_shared<Memory>(setting);
  const int64_t N = s.sequences;
  const std::vector<int64_t> cu = offsets(s);
  auto d = make<kda_metadata_desc>();
  d.null_slot = -1;
  d.max_tokens = cu.back();
  d.max_sequences = N;
  d.width = static_cast<int32_t>(s.width);
  kda_plan* plan = nullptr;
  check(kda_metadata_plan_create(setting.context.get(), &d, &plan));
  m->plan.reset(plan, kda_plan_destroy);
  size_t bytes = 0;
  check(kda_plan_workspace_size(plan, &bytes));
  m->workspace = {m->arena.room(KDA_UINT8, {static_cast<int64_t>(bytes)}).data, bytes};

  std::vector<int64_t> computed(static_cast<size_t>(N), 100), slots;
  for (int64_t i = 0; i < N * s.width; ++i) slots.push_back(i);
  m->args.num_tokens = cu.back();
  m->args.step.query_start_loc = m->arena.ints(cu);
  m->args.step.computed = m->arena.ints(computed);
  m->args.slot_table = m->arena.ints(slots);
  m->args.slot_table.rank = 2;
  m->args.slot_table.shape[0] = N;
  m->args.slot_table.shape[1] = m->args.slot_table.strides[0] = s.width;
  m->args.slot_table.strides[1] = 1;
  make_tables(m->arena, N, cu.back(), s.width, KDA_PREFILL_GRID, m->args.tables);

  Workload w;
  w.name = "metadata";
  w.parameters = {
      {"sequences", std::to_string(N)}, {"tokens", std::to_string(cu.back())}, {"width", std::to_string(s.width)}};
  w.backend = kda_plan_backend(plan);
  w.isa = kda_plan_isa(plan);
  const int builds = setting.on_device() ? 1 : 20;  // a sample
  const auto variant = [&](const char* label) {
    return Variant{label,
                   [m, builds](int64_t, void* stream) {
                     for (int i = 0; i < builds; ++i)
                       check(kda_metadata_run(m->plan.get(), &m->args, m->workspace, stream));
                   },
                   static_cast<double>(builds), Unit::kCall, w.backend};
  };
  w.variants = {variant("build"), variant("build again")};
  w.ratios = {{"build / build again (A/A)", "build", {"build again"}}};
  return w;
}

}  // namespace kda::bench

// prefill, segment_summary, segment_merge.
#include "attention.h"

namespace kda::torch_ops {
namespace {

// `k`: the token tensor that gives H and the io dtype.
kda_prefill_desc describe(const Words& words, const kda_tensor& k, const kda_tensor& v, const kda_tensor& gate,
                          const kda_tensor& beta, kda_dtype state, const Counts& counts) {
  auto d = zeroed<kda_prefill_desc>();
  d.attention = attention_spec(words, size_from_end(k, 2), gate, v, k.dtype, beta.dtype, state);
  d.max_tokens = bound(words.max_tokens, counts.tokens);
  d.max_sequences = bound(words.max_sequences, counts.sequences);
  d.null_slot = words.null_slot;
  d.flags = words.flags();
  return d;
}

}  // namespace

void prefill(StableIValue* stack, uint64_t arguments, uint64_t) {
  Arguments a(stack, arguments);
  auto args = zeroed<kda_prefill_args>();
  args.q = a.tensor("q");
  args.k = a.tensor("k");
  args.v = a.tensor("v");
  args.gate = a.tensor("gate");
  args.beta = a.tensor("beta");
  args.out = a.tensor("out");
  args.state = a.optional_tensor("state");
  const std::string_view text = a.text();
  args.slots = a.optional_tensor("slots");
  args.write_slots = a.optional_tensor("write_slots");
  args.has_initial_state = a.optional_tensor("has_initial_state");
  args.final_state = a.optional_tensor("final_state");
  const auto [A_log, dt_bias] = read_gate_parameters(a);
  args.A_log = A_log;
  args.dt_bias = dt_bias;
  args.sequences = read_sequences(a);
  args.checkpoint_offsets = a.optional_tensor("checkpoint_offsets");
  args.checkpoint_slots = a.optional_tensor("checkpoint_slots");
  args.checkpoint_states = a.optional_tensor("checkpoint_states");
  args.chunk_indices = a.optional_tensor("chunk_indices");
  args.chunk_offsets = a.optional_tensor("chunk_offsets");
  args.out_rows = a.optional_tensor("out_rows");
  const kda_tensor stages = a.optional_tensor("stages");
  if (present(stages) && stages.shape[0] > 0) args.stages = stages;
  a.finish();
  const Words& words = read_words(text, KDA_FORM_WORDS KDA_PLAN_WORDS "fresh store_final");

  args.no_final_state = words.store_final ? 0 : 1;
  const kda_dtype state = present(args.state) ? args.state.dtype : args.final_state.dtype;
  kda_prefill_desc d = describe(words, args.q, args.v, args.gate, args.beta, state, count(args.sequences, args.q, 3));
  d.initial_state = present(args.has_initial_state)       ? KDA_INITIAL_FLAGS
                    : words.fresh || !present(args.state) ? KDA_INITIAL_NONE
                                                          : KDA_INITIAL_ALL;
  if (present(args.checkpoint_offsets)) d.max_checkpoints = size_from_end(args.checkpoint_offsets, 1);
  const uint64_t layouts[] = {layout_class(args.q), layout_class(args.k), layout_class(args.v),
                              layout_class(args.gate), layout_class(args.out)};
  const PlanRequest request{KDA_OP_PREFILL, args.q.device, words.backend, layouts, std::size(layouts)};
  const kda_plan* plan =
      plan_of(request, d, kda_prefill_plan_create, [&](kda_prefill_desc& desc) { desc.example = &args; });
  run(plan, kda_prefill_run, args, args.q.device);
}

namespace {

// segment_summary, and with the queries what it leaves for a prefill.
void summarize(StableIValue* stack, uint64_t arguments, bool prepares) {
  Arguments a(stack, arguments);
  auto args = zeroed<kda_segment_summary_args>();
  if (prepares) args.q = a.tensor("q");
  args.k = a.tensor("k");
  args.v = a.tensor("v");
  args.gate = a.tensor("gate");
  args.beta = a.tensor("beta");
  const std::string_view text = a.text();
  const auto [A_log, dt_bias] = read_gate_parameters(a);
  args.A_log = A_log;
  args.dt_bias = dt_bias;
  args.sequences = read_sequences(a);
  a.finish();
  const Words& words = read_words(text, KDA_FORM_WORDS KDA_PLAN_WORDS);

  const Counts counts = count(args.sequences, args.k, 3);
  const kda_device device = args.k.device;
  const kda_prefill_desc d = describe(words, args.k, args.v, args.gate, args.beta, KDA_FP32, counts);
  const kda_plan* plan = plan_of({KDA_OP_SEGMENT_SUMMARY, device, words.backend}, d, kda_segment_summary_plan_create);
  const int64_t keys = d.attention.key_dim;
  const int64_t shape[] = {counts.sequences, d.attention.num_value_heads, d.attention.value_dim + keys, keys};
  const torch::stable::Tensor summary(empty(shape, 4, KDA_FP32, device));
  args.summary = view(summary.get());
  if (!prepares) {
    run(plan, kda_segment_summary_run, args, device);
    stack[0] = torch::stable::detail::from(summary);
    return;
  }
  size_t bytes = 0;
  check(kda_segment_stages_size(plan, counts.sequences, counts.tokens, &bytes));
  const auto size = static_cast<int64_t>(bytes);
  const torch::stable::Tensor stages(empty(&size, 1, KDA_UINT8, device));
  if (size > 0) args.stages = view(stages.get());
  else args.q = {};
  run(plan, kda_segment_summary_run, args, device);
  stack[0] = torch::stable::detail::from(summary);
  stack[1] = torch::stable::detail::from(stages);
}

}  // namespace

void segment_summary(StableIValue* stack, uint64_t arguments, uint64_t) { summarize(stack, arguments, false); }
void segment_prepare(StableIValue* stack, uint64_t arguments, uint64_t) { summarize(stack, arguments, true); }

void segment_merge(StableIValue* stack, uint64_t arguments, uint64_t) {
  Arguments a(stack, arguments);
  auto args = zeroed<kda_segment_merge_args>();
  args.summaries = a.tensor("summaries");
  args.initial_state = a.optional_tensor("initial_state");
  args.present = a.optional_tensor("present");
  const std::string_view backend = a.optional_text();
  a.finish();

  if (args.summaries.rank != 4 || args.summaries.shape[2] < args.summaries.shape[3]) {
    bad_argument("summaries: wanted [P, HV, V+K, K], got rank " + std::to_string(args.summaries.rank));
  }
  const int64_t *s = args.summaries.shape, keys = s[3], values = s[2] - s[3];
  auto d = zeroed<kda_segment_merge_desc>();
  d.num_value_heads = s[1];
  d.key_dim = keys;
  d.value_dim = values;
  d.max_segments = bound(0, s[0]);
  const kda_device device = args.summaries.device;
  const kda_plan* plan = plan_of({KDA_OP_SEGMENT_MERGE, device, backend}, d, kda_segment_merge_plan_create);
  const int64_t shape[] = {s[0], s[1], values, keys};
  const torch::stable::Tensor starts(empty(shape, 4, KDA_FP32, device)), final(empty(shape + 1, 3, KDA_FP32, device));
  args.start_states = view(starts.get());
  args.final_state = view(final.get());
  run(plan, kda_segment_merge_run, args, device);
  stack[0] = torch::stable::detail::from(starts);
  stack[1] = torch::stable::detail::from(final);
}

}  // namespace kda::torch_ops

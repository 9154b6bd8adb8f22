// conv_prefill, conv_update, gated_norm.
#include "attention.h"

namespace kda::torch_ops {
namespace {

struct ConvTensors {
  Parts x, weight, state, out, bias;
  std::string_view plan;
};

// x, weight, state, out, plan, bias
ConvTensors read_conv_tensors(Arguments& a) {
  ConvTensors t;
  t.x = a.parts("x");
  t.weight = a.parts("weight");
  t.state = a.optional_parts("state");
  t.out = a.parts("out");
  t.plan = a.text();
  t.bias = a.optional_parts("bias");
  return t;
}

void match(const char* name, const Parts& parts, const Parts& x, bool optional) {
  if (parts.count == x.count || (optional && parts.count == 0)) return;
  bad_argument(std::string(name) + ": wanted as many tensors as x has (" + std::to_string(x.count) + "), got " +
               std::to_string(parts.count));
}

// The description's part that both modes share, and the arguments' tensors.
void fill(const ConvTensors& t, const Words& words, kda_conv_args& args, kda_conv_desc& d) {
  match("weight", t.weight, t.x, false);
  match("state", t.state, t.x, true);
  match("out", t.out, t.x, false);
  match("bias", t.bias, t.x, true);
  for (int i = 0; i < t.x.count; ++i) {
    args.x[i] = t.x.part[i];
    args.weight[i] = t.weight.part[i];
    args.state[i] = t.state.part[i];
    args.out[i] = t.out.part[i];
    args.bias[i] = t.bias.part[i];
    d.channels[i] = size_from_end(t.x.part[i], 1);
  }
  d.parts = t.x.count;
  d.width = static_cast<int32_t>(size_from_end(t.weight.part[0], 1));
  d.io_dtype = t.x.part[0].dtype;
  d.state_dtype = t.state.part[0].dtype;
  d.layout = words.layout;
  d.no_activation = words.activation ? 0 : 1;
  const Counts counts = count(args.sequences, t.x.part[0], 2);
  d.max_tokens = bound(words.max_tokens, counts.tokens);
  d.max_sequences = bound(words.max_sequences, counts.sequences);
  d.null_slot = words.null_slot;
  d.flags = words.flags();
}

void run_conv(const kda_conv_desc& d, const kda_conv_args& args, std::string_view backend) {
  const kda_device device = args.x[0].device;
  run(plan_of({KDA_OP_CONV, device, backend}, d, kda_conv_plan_create), kda_conv_run, args, device);
}

}  // namespace

void conv_prefill(StableIValue* stack, uint64_t arguments, uint64_t) {
  Arguments a(stack, arguments);
  auto args = zeroed<kda_conv_args>();
  auto d = zeroed<kda_conv_desc>();
  const ConvTensors t = read_conv_tensors(a);
  args.slots = a.optional_tensor("slots");
  args.write_slots = a.optional_tensor("write_slots");
  args.has_initial_state = a.optional_tensor("has_initial_state");
  args.sequences = read_sequences(a);
  args.checkpoint_offsets = a.optional_tensor("checkpoint_offsets");
  args.checkpoint_slots = a.optional_tensor("checkpoint_slots");
  args.out_rows = a.optional_tensor("out_rows");
  a.finish();
  const Words& words = read_words(t.plan, KDA_PLAN_WORDS "fresh activation layout");

  d.mode = KDA_CONV_PREFILL;
  d.initial_state = present(args.has_initial_state)     ? KDA_INITIAL_FLAGS
                    : words.fresh || t.state.count == 0 ? KDA_INITIAL_NONE
                                                        : KDA_INITIAL_ALL;
  if (present(args.checkpoint_offsets)) d.max_checkpoints = size_from_end(args.checkpoint_offsets, 1);
  fill(t, words, args, d);
  run_conv(d, args, words.backend);
}

void conv_update(StableIValue* stack, uint64_t arguments, uint64_t) {
  Arguments a(stack, arguments);
  auto args = zeroed<kda_conv_args>();
  auto d = zeroed<kda_conv_desc>();
  const ConvTensors t = read_conv_tensors(a);
  args.slots = a.optional_tensor("slots");
  args.write_slots = a.optional_tensor("write_slots");
  args.has_initial_state = a.optional_tensor("has_initial_state");
  args.accepted = a.optional_tensor("accepted");
  args.record_count = a.optional_tensor("record_count");
  args.record_rows = a.optional_tensor("record_rows");
  args.sequences = read_sequences(a);
  args.out_rows = a.optional_tensor("out_rows");
  a.finish();
  const Words& words = read_words(t.plan, KDA_PLAN_WORDS "width records fold fresh activation layout");

  d.mode = words.records ? KDA_CONV_RECORDS : KDA_CONV_COLUMNS;
  d.fold = words.fold ? 1 : 0;
  d.verify_width = static_cast<int32_t>(words.width);
  d.initial_state = present(args.has_initial_state) ? KDA_INITIAL_FLAGS
                    : words.fresh                   ? KDA_INITIAL_NONE
                                                    : KDA_INITIAL_ALL;
  fill(t, words, args, d);
  run_conv(d, args, words.backend);
}

void gated_norm(StableIValue* stack, uint64_t arguments, uint64_t) {
  Arguments a(stack, arguments);
  auto args = zeroed<kda_gated_norm_args>();
  args.o = a.tensor("o");
  args.z = a.tensor("z");
  args.weight = a.tensor("weight");
  args.out = a.tensor("out");
  const double eps = a.number();
  const std::string_view backend = a.optional_text();
  const int64_t max_tokens = a.integer();
  a.finish();

  auto d = zeroed<kda_gated_norm_desc>();
  d.num_value_heads = size_from_end(args.o, 2);
  d.value_dim = size_from_end(args.o, 1);
  d.io_dtype = args.o.dtype;
  d.eps = eps;
  d.max_tokens = bound(max_tokens, count({}, args.o, 3).tokens);
  const kda_device device = args.o.device;
  run(plan_of({KDA_OP_GATED_NORM, device, backend}, d, kda_gated_norm_plan_create), kda_gated_norm_run, args, device);
}

}  // namespace kda::torch_ops

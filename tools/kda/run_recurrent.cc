// The operators that decode and keep windows.
#include <memory>

#include "run_shapes.h"

namespace kda::tools {
namespace {

// "x", or "x.0" to "x.2" for three parts: whichever is given is used.
std::string part_name(const std::string& name, int i) { return i == 0 ? name : name + "." + std::to_string(i); }

class DecodeCall : public OperatorCall {
 public:
  explicit DecodeCall(kda_operator op) : op_(op), args_(make<kda_decode_step_args>()) {
    kda_decode_args& d = args_.decode;
    d.struct_size = sizeof d;
    bind_gates(d);
    bind({{"slots", &d.slots},
          {"write_slots", &d.write_slots},
          {"accepted", &d.accepted},
          {"has_initial_state", &d.has_initial_state},
          {"out_rows", &d.out_rows}});
    bind("", d.sequences);
    bind("state", d.state, Role::kChange);
    bind(d.records);
    bind("out", d.out, Role::kOut);
    if (op == KDA_OP_DECODE) {
      bind_qkv(d);
      return;
    }
    for (int i = 0; i < 3; ++i) {
      bind(part_name("x", i), args_.x[i]);
      bind(part_name("conv_weight", i), args_.conv_weight[i]);
      bind(part_name("conv_state", i), args_.conv_state[i], Role::kChange);
    }
    bind("z", args_.z);
    bind("norm_weight", args_.norm_weight);
  }

  void prepare(const Context&, ProblemOptions& p, const CLI::App& verb) override {
    kda_decode_args& d = args_.decode;
    settle_attention(verb, p, d.gate, d.beta);
    settle_states(verb, p, d.state);
    if (present(d.state) && d.state.rank == 4) settle(verb, "--value-dim", p.attention.value_dim, d.state.shape[2]);
    const int64_t tokens = tokens_of(d.gate, 3);
    if (op_ == KDA_OP_DECODE) {
      require("q", d.q, 3);
      settle_io(verb, p, d.q);
      settle(verb, "--heads", p.attention.num_heads, d.q.shape[d.q.rank - 2]);
    } else {
      prepare_step(p, verb);
    }
    if (present(d.slots) && d.slots.rank == 2)
      settle(verb, "--width", p.width, static_cast<int32_t>(d.slots.shape[1]));
    settle(verb, "--max-tokens", p.max_tokens, tokens);
    settle(verb, "--max-sequences", p.max_sequences,
           present(d.slots) ? d.slots.shape[0] : sequences_of(d.sequences, d.gate, 3));
    settle(verb, "--initial", p.initial, present(d.has_initial_state) ? KDA_INITIAL_FLAGS : KDA_INITIAL_ALL);
    std::vector<int64_t> shape(d.gate.shape, d.gate.shape + d.gate.rank);
    shape.back() = p.attention.value_dim;
    d.out = shaped(p.attention.out_dtype != 0 ? p.attention.out_dtype : p.attention.io_dtype, shape);
  }

  void run(const Context& context, const ProblemOptions& p) override {
    const Plan plan = create_plan(context, op_, p);
    backend = op_ == KDA_OP_DECODE ? run_plan(context, plan, args_.decode) : run_plan(context, plan, args_);
  }

 private:
  void prepare_step(ProblemOptions& p, const CLI::App& verb) {
    require("x", args_.x[0], 2);
    require("conv_weight", args_.conv_weight[0], 2);
    settle_io(verb, p, args_.x[0]);
    const kda_tensor& w = args_.conv_weight[0];
    settle(verb, "--conv-parts", p.conv_parts, present(args_.x[1]) ? 3 : 1);
    settle(verb, "--conv-width", p.conv_width, static_cast<int32_t>(w.shape[w.rank - 1]));
    if (present(args_.conv_state[0])) settle(verb, "--conv-dtype", p.conv_dtype, args_.conv_state[0].dtype);
    settle(verb, "--no-norm", p.no_norm, !present(args_.z));
    // Rows of q and k, then those of v.
    const int64_t values = p.attention.num_value_heads * p.attention.value_dim;
    const int64_t keys = p.conv_parts == 3 ? args_.x[0].shape[args_.x[0].rank - 1]
                                           : (args_.x[0].shape[args_.x[0].rank - 1] - values) / 2;
    if (p.attention.key_dim > 0) settle(verb, "--heads", p.attention.num_heads, keys / p.attention.key_dim);
  }

  kda_operator op_;
  kda_decode_step_args args_;
};

class CommitCall final : public PlanCall<kda_commit_args, KDA_OP_COMMIT> {
 public:
  CommitCall() {
    bind("A_log", args_.A_log);
    bind("dt_bias", args_.dt_bias);
    bind("slots", args_.slots);
    bind("accepted", args_.accepted);
    bind("num_active", args_.num_active);
    bind("state", args_.state, Role::kChange);
    bind(args_.records);
    for (int i = 0; i < 3; ++i) bind(part_name("conv_state", i), args_.conv_state[i], Role::kChange);
  }
  void prepare(const Context&, ProblemOptions& p, const CLI::App& verb) override {
    require("state", args_.state, 4);
    require("records.u", args_.records.u, 4);
    require("records.kg", args_.records.kg, 4);
    require("slots", args_.slots, 1);
    settle_states(verb, p, args_.state);
    settle_io(verb, p, args_.records.kg);
    settle(verb, "--value-heads", p.attention.num_value_heads, args_.state.shape[1]);
    settle(verb, "--heads", p.attention.num_heads, args_.state.shape[1]);
    settle(verb, "--value-dim", p.attention.value_dim, args_.state.shape[2]);
    settle(verb, "--key-dim", p.attention.key_dim, args_.state.shape[3]);
    settle(verb, "--width", p.width, static_cast<int32_t>(args_.records.u.shape[2]));
    settle(verb, "--max-sequences", p.max_sequences, args_.slots.shape[0]);
    settle(verb, "--conv-parts", p.conv_parts, present(args_.conv_state[1]) ? 3 : 1);
    if (!present(args_.conv_state[0])) settle(verb, "--conv-width", p.conv_width, 0);
    else settle(verb, "--conv-dtype", p.conv_dtype, args_.conv_state[0].dtype);
  }
};

class ConvCall final : public OperatorCall {
 public:
  ConvCall() : args_(make<kda_conv_args>()) {
    bind({{"slots", &args_.slots},
          {"write_slots", &args_.write_slots},
          {"has_initial_state", &args_.has_initial_state},
          {"accepted", &args_.accepted},
          {"record_count", &args_.record_count},
          {"record_rows", &args_.record_rows},
          {"checkpoint_offsets", &args_.checkpoint_offsets},
          {"checkpoint_slots", &args_.checkpoint_slots},
          {"out_rows", &args_.out_rows}});
    bind("", args_.sequences);
    for (int i = 0; i < 3; ++i) {
      bind(part_name("x", i), args_.x[i]);
      bind(part_name("weight", i), args_.weight[i]);
      bind(part_name("bias", i), args_.bias[i]);
      bind(part_name("state", i), args_.state[i], Role::kChange);
      bind(part_name("out", i), args_.out[i], Role::kOut);
    }
  }
  void prepare(const Context&, ProblemOptions& p, const CLI::App& verb) override {
    require("x", args_.x[0], 2);
    require("weight", args_.weight[0], 2);
    settle_io(verb, p, args_.x[0]);
    const kda_tensor& w = args_.weight[0];
    settle(verb, "--conv-width", p.conv_width, static_cast<int32_t>(w.shape[w.rank - 1]));
    settle(verb, "--conv-parts", p.conv_parts, present(args_.x[1]) ? 3 : 1);
    if (present(args_.state[0])) settle(verb, "--conv-dtype", p.conv_dtype, args_.state[0].dtype);
    settle(verb, "--max-tokens", p.max_tokens, tokens_of(args_.x[0], 2));
    settle(verb, "--max-sequences", p.max_sequences, sequences_of(args_.sequences, args_.x[0], 2));
    if (present(args_.checkpoint_offsets) && args_.checkpoint_offsets.rank == 2) {
      settle(verb, "--max-checkpoints", p.max_checkpoints, args_.checkpoint_offsets.shape[1]);
    }
    settle(verb, "--initial", p.initial, initial_of(args_.has_initial_state, args_.state[0]));
    for (int i = 0; i < p.conv_parts && i < 3; ++i) {
      if (present(args_.x[i])) args_.out[i] = like(args_.x[i], p.attention.out_dtype);
    }
  }
  // Channels are the tensors' own: heads and dims say nothing here.
  void run(const Context& context, const ProblemOptions& p) override {
    kda_conv_desc d = conv_desc(p);
    for (int i = 0; i < 3; ++i) d.channels[i] = present(args_.x[i]) ? args_.x[i].shape[args_.x[i].rank - 1] : 0;
    backend = run_plan(context, Plan(context, d), args_);
  }

 private:
  kda_conv_args args_;
};

}  // namespace

std::unique_ptr<OperatorCall> recurrent_call(kda_operator op) {
  switch (op) {
    case KDA_OP_CONV: return std::make_unique<ConvCall>();
    case KDA_OP_COMMIT: return std::make_unique<CommitCall>();
    case KDA_OP_DECODE:
    case KDA_OP_DECODE_STEP: return std::make_unique<DecodeCall>(op);
    default: throw UsageError("OPERATOR: wanted one that runs on tensors");
  }
}

}  // namespace kda::tools

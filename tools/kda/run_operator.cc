// The attention operators without windows, the norm, and the whole layer.
#include <memory>

#include "run_shapes.h"

namespace kda::tools {
namespace {

class PrefillCall final : public PlanCall<kda_prefill_args, KDA_OP_PREFILL> {
 public:
  PrefillCall() {
    bind_qkv(args_);
    bind_gates(args_);
    bind({{"slots", &args_.slots},
          {"write_slots", &args_.write_slots},
          {"has_initial_state", &args_.has_initial_state},
          {"checkpoint_offsets", &args_.checkpoint_offsets},
          {"checkpoint_slots", &args_.checkpoint_slots},
          {"out_rows", &args_.out_rows}});
    bind("", args_.sequences);
    bind("state", args_.state, Role::kChange);
    bind("final_state", args_.final_state, Role::kOut);
    bind("checkpoint_states", args_.checkpoint_states, Role::kOut);
    bind("out", args_.out, Role::kOut);
  }
  void prepare(const Context&, ProblemOptions& p, const CLI::App& verb) override {
    require("q", args_.q, 3);
    require("v", args_.v, 3);
    settle_io(verb, p, args_.q);
    settle_states(verb, p, args_.state);
    settle_attention(verb, p, args_.gate, args_.beta);
    settle(verb, "--heads", p.attention.num_heads, args_.q.shape[args_.q.rank - 2]);
    settle(verb, "--value-dim", p.attention.value_dim, args_.v.shape[args_.v.rank - 1]);
    const int64_t N = sequences_of(args_.sequences, args_.q, 3), HV = p.attention.num_value_heads;
    const kda_dtype states = p.attention.state_dtype != 0 ? p.attention.state_dtype : KDA_FP32;
    settle(verb, "--max-tokens", p.max_tokens, tokens_of(args_.q, 3));
    settle(verb, "--max-sequences", p.max_sequences, N);
    if (present(args_.checkpoint_offsets) && args_.checkpoint_offsets.rank == 2) {
      const int64_t Ck = args_.checkpoint_offsets.shape[1];
      settle(verb, "--max-checkpoints", p.max_checkpoints, Ck);
      if (!present(args_.checkpoint_slots)) {
        args_.checkpoint_states = shaped(states, {N, Ck, HV, p.attention.value_dim, p.attention.key_dim});
      }
    }
    settle(verb, "--initial", p.initial, initial_of(args_.has_initial_state, args_.state));
    // Without a pool the final states go apart; packed ones without slots are read as they are.
    if (!present(args_.state)) {
      args_.final_state = shaped(states, {N, HV, p.attention.value_dim, p.attention.key_dim});
    }
    args_.out = like(args_.v, p.attention.out_dtype);
  }
};

class SummaryCall final : public PlanCall<kda_segment_summary_args, KDA_OP_SEGMENT_SUMMARY> {
 public:
  SummaryCall() {
    bind_qkv(args_);
    bind_gates(args_);
    bind("", args_.sequences);
    bind("summary", args_.summary, Role::kOut);
  }
  void prepare(const Context&, ProblemOptions& p, const CLI::App& verb) override {
    require("k", args_.k, 3);
    require("v", args_.v, 3);
    settle_io(verb, p, args_.k);
    settle_attention(verb, p, args_.gate, args_.beta);
    settle(verb, "--heads", p.attention.num_heads, args_.k.shape[args_.k.rank - 2]);
    settle(verb, "--value-dim", p.attention.value_dim, args_.v.shape[args_.v.rank - 1]);
    const int64_t N = sequences_of(args_.sequences, args_.k, 3), K = p.attention.key_dim;
    settle(verb, "--max-tokens", p.max_tokens, tokens_of(args_.k, 3));
    settle(verb, "--max-sequences", p.max_sequences, N);
    args_.summary = shaped(KDA_FP32, {N, p.attention.num_value_heads, p.attention.value_dim + K, K});
  }
};

class MergeCall final : public PlanCall<kda_segment_merge_args, KDA_OP_SEGMENT_MERGE> {
 public:
  MergeCall() {
    bind("initial_state", args_.initial_state);
    bind("summaries", args_.summaries);
    bind("present", args_.present);
    bind("start_states", args_.start_states, Role::kOut);
    bind("final_state", args_.final_state, Role::kOut);
  }
  void prepare(const Context&, ProblemOptions& p, const CLI::App& verb) override {
    require("summaries", args_.summaries, 4);
    const int64_t* s = args_.summaries.shape;
    settle(verb, "--heads", p.attention.num_heads, s[1]);
    settle(verb, "--key-dim", p.attention.key_dim, s[3]);
    settle(verb, "--value-dim", p.attention.value_dim, s[2] - s[3]);
    settle(verb, "--max-sequences", p.max_sequences, s[0]);
    args_.start_states = shaped(KDA_FP32, {s[0], s[1], std::max<int64_t>(0, s[2] - s[3]), s[3]});
    args_.final_state = shaped(KDA_FP32, {s[1], std::max<int64_t>(0, s[2] - s[3]), s[3]});
  }
};

class NormCall final : public PlanCall<kda_gated_norm_args, KDA_OP_GATED_NORM> {
 public:
  NormCall() {
    bind("o", args_.o);
    bind("z", args_.z);
    bind("weight", args_.weight);
    bind("out", args_.out, Role::kOut);
  }
  void prepare(const Context&, ProblemOptions& p, const CLI::App& verb) override {
    require("o", args_.o, 3);
    settle_io(verb, p, args_.o);
    settle(verb, "--value-heads", p.attention.num_value_heads, args_.o.shape[args_.o.rank - 2]);
    settle(verb, "--value-dim", p.attention.value_dim, args_.o.shape[args_.o.rank - 1]);
    settle(verb, "--max-tokens", p.max_tokens, tokens_of(args_.o, 3));
    args_.out = like(args_.o, p.attention.out_dtype);
  }
};

class ResidualCall final : public PlanCall<kda_residual_norm_args, KDA_OP_RESIDUAL_NORM> {
 public:
  ResidualCall() {
    bind("residual", args_.residual, Role::kChange);
    bind("add", args_.add);
    bind("weight", args_.weight);
    bind("out", args_.out, Role::kOut);
  }
  void prepare(const Context&, ProblemOptions& p, const CLI::App& verb) override {
    require("residual", args_.residual, 2);
    settle_io(verb, p, args_.residual);
    settle(verb, "--hidden", p.hidden, args_.residual.shape[1]);
    settle(verb, "--max-tokens", p.max_tokens, args_.residual.shape[0]);
    args_.out = like(args_.residual, p.attention.out_dtype);
  }
};

class LayerCall final : public OperatorCall {
 public:
  explicit LayerCall(const LayerOptions& options) : options_(options), args_(make<kda_layer_args>()) {
    bind("hidden", args_.hidden);
    for (const auto& [prefix, group] :
         {std::pair<std::string, kda_layer_group*>{"chunk.", &args_.chunk}, {"recurrent.", &args_.recurrent}}) {
      bind(prefix, group->sequences);
      bind(prefix + "slots", group->slots);
      bind(prefix + "write_slots", group->write_slots);
    }
    bind("chunk.has_initial_state", args_.chunk.has_initial_state);
    bind("chunk.checkpoint_offsets", args_.chunk.checkpoint_offsets);
    bind("chunk.checkpoint_slots", args_.chunk.checkpoint_slots);
    bind("recurrent.accepted", args_.recurrent.accepted);
    bind("state", args_.state, Role::kChange);
    bind("conv_state", args_.conv_state, Role::kChange);
    bind(args_.records);
    bind("normed", args_.normed, Role::kOut);
    bind("out", args_.out, Role::kOut);
  }
  void prepare(const Context& context, ProblemOptions& p, const CLI::App& verb) override {
    require("hidden", args_.hidden, 2);
    settle_io(verb, p, args_.hidden);
    settle_states(verb, p, args_.state);
    const Checkpoint checkpoint(options_.checkpoint);
    auto load = make<kda_layer_load_options>();
    load.io_dtype = p.attention.io_dtype;
    load.projection =
        p.backend == "reference" && options_.projection == "auto" ? "reference" : options_.projection.c_str();
    load.ranks = options_.ranks;
    load.rank = options_.rank;
    load.lower_bound = p.attention.lower_bound;
    weights_ = std::make_unique<LayerWeights>(context, checkpoint, options_.layer, load);
    const kda_layer_spec s = weights_->spec();
    const int64_t T = args_.hidden.shape[0], N = std::max(sequences_of(args_.chunk.sequences, args_.hidden, 2),
                                                          sequences_of(args_.recurrent.sequences, args_.hidden, 2));
    settle(verb, "--max-tokens", p.max_tokens, T);
    settle(verb, "--max-sequences", p.max_sequences, N);
    if (args_.chunk.checkpoint_offsets.rank == 2) {
      settle(verb, "--max-checkpoints", p.max_checkpoints, args_.chunk.checkpoint_offsets.shape[1]);
    }
    const bool slots = present(args_.chunk.slots) || present(args_.recurrent.slots);
    alone_ = !slots && !present(args_.state) && !present(args_.chunk.sequences.cu_seqlens) &&
             !present(args_.chunk.sequences.begin) && !present(args_.recurrent.sequences.begin);
    if (alone_) {  // nothing but rows: one fresh sequence, its state and window in the output
      args_.chunk.sequences.cu_seqlens = shaped(KDA_INT64, {2});
      args_.chunk.slots = shaped(KDA_INT64, {1});
      cu_ = {0, T};
      args_.chunk.sequences.cu_seqlens.data = cu_.data();
      args_.chunk.slots.data = &slot_;
      args_.state = shaped(p.attention.state_dtype != 0 ? p.attention.state_dtype : KDA_FP32,
                           {1, s.num_value_heads, s.value_dim, s.key_dim});
      args_.conv_state = shaped(p.conv_dtype != 0 ? p.conv_dtype : p.attention.io_dtype,
                                {1, s.conv_width - 1, 2 * s.num_heads * s.key_dim + s.num_value_heads * s.value_dim});
    }
    settle(verb, "--initial", p.initial,
           alone_ ? KDA_INITIAL_NONE : initial_of(args_.chunk.has_initial_state, args_.state));
    const kda_dtype out = p.attention.out_dtype;
    args_.out = like(args_.hidden, out);
    args_.normed = shaped(out != KDA_DTYPE_NONE ? out : p.attention.io_dtype, {T, s.num_value_heads, s.value_dim});
  }
  void run(const Context& context, const ProblemOptions& p) override {
    auto d = make<kda_layer_desc>();
    d.layer = weights_->spec();
    d.backend = p.backend.c_str();
    d.projection =
        p.backend == "reference" && options_.projection == "auto" ? "reference" : options_.projection.c_str();
    d.io_dtype = p.attention.io_dtype;
    d.state_dtype = p.attention.state_dtype;
    d.conv_dtype = p.conv_dtype;
    d.out_dtype = p.attention.out_dtype;
    d.max_tokens = p.max_tokens;
    d.max_sequences = p.max_sequences;
    d.width = p.width;
    d.mode = p.records ? KDA_DECODE_RECORDS : KDA_DECODE_COLUMNS;
    d.fold = p.fold;
    d.initial_state = p.initial;
    d.conv_layout = p.conv_layout;
    d.null_slot = p.null_slot;
    d.max_checkpoints = p.max_checkpoints;
    d.segments = p.no_segments ? KDA_SEGMENTS_OFF : KDA_SEGMENTS_AUTO;
    d.flags = (p.batch_invariant ? KDA_PLAN_BATCH_INVARIANT : 0) | (p.checked ? KDA_PLAN_CHECKED : 0);
    args_.weights = weights_->get();
    backend = run_plan(context, Plan(context, d), args_);
  }

 private:
  LayerOptions options_;
  kda_layer_args args_;
  std::unique_ptr<LayerWeights> weights_;
  bool alone_ = false;
  std::vector<int64_t> cu_;
  int64_t slot_ = 0;
};

}  // namespace

std::unique_ptr<OperatorCall> layer_call(const LayerOptions& options) { return std::make_unique<LayerCall>(options); }

std::unique_ptr<OperatorCall> operator_call(kda_operator op) {
  switch (op) {
    case KDA_OP_PREFILL: return std::make_unique<PrefillCall>();
    case KDA_OP_SEGMENT_SUMMARY: return std::make_unique<SummaryCall>();
    case KDA_OP_SEGMENT_MERGE: return std::make_unique<MergeCall>();
    case KDA_OP_GATED_NORM: return std::make_unique<NormCall>();
    case KDA_OP_RESIDUAL_NORM: return std::make_unique<ResidualCall>();
    default: return recurrent_call(op);
  }
}

void OperatorCall::bind(const std::string& prefix, kda_sequences& s) {
  bind(prefix + "cu_seqlens", s.cu_seqlens);
  bind(prefix + "begin", s.begin);
  bind(prefix + "length", s.length);
  bind(prefix + "num_active", s.num_active);
}

void OperatorCall::bind(kda_records& r) {
  bind("records.u", r.u, Role::kChange);
  bind("records.kg", r.kg, Role::kChange);
  bind("records.count", r.count, Role::kChange);
  bind("records.record_rows", r.record_rows);
}

}  // namespace kda::tools

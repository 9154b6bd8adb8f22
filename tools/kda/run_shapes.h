// kda run: shapes of outputs and fields of the description that follow from the tensors that were given.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "conformance/api.h"
#include "run_operator.h"
#include "verb.h"

namespace kda::tools {

inline bool present(const kda_tensor& t) { return t.dtype != KDA_DTYPE_NONE; }

inline kda_tensor shaped(kda_dtype dtype, const std::vector<int64_t>& shape) {
  kda_tensor t{};
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  std::copy_n(shape.begin(), std::min<size_t>(shape.size(), KDA_MAX_RANK), t.shape);
  check(kda_tensor_make_dense(&t));
  return t;
}
inline kda_tensor like(const kda_tensor& t, kda_dtype dtype) {
  return shaped(dtype != KDA_DTYPE_NONE ? dtype : t.dtype, {t.shape, t.shape + t.rank});
}

inline void require(const char* name, const kda_tensor& t, int rank) {
  if (present(t) && t.rank >= rank) return;
  throw UsageError(fmt::format("--in: wanted a tensor '{}' of at least {} dimensions, got {}", name, rank,
                               present(t) ? fmt::format("{}", t.rank) : "none"));
}

inline int64_t sequences_of(const kda_sequences& s, const kda_tensor& token, int dims) {
  if (present(s.cu_seqlens)) return std::max<int64_t>(0, s.cu_seqlens.shape[0] - 1);
  if (present(s.length)) return s.length.shape[0];
  return token.rank > dims ? token.shape[0] : 1;
}
inline int64_t tokens_of(const kda_tensor& t, int dims) {
  return (t.rank > dims ? t.shape[0] : 1) * t.shape[t.rank - dims];
}

// A field takes what the tensors say unless its option was given.
template <class T>
void settle(const CLI::App& verb, const char* option, T& field, T value) {
  if (verb.count(option) == 0) field = value;
}

inline kda_initial_state initial_of(const kda_tensor& flags, const kda_tensor& state) {
  return present(flags) ? KDA_INITIAL_FLAGS : present(state) ? KDA_INITIAL_ALL : KDA_INITIAL_NONE;
}

inline void settle_io(const CLI::App& verb, ProblemOptions& p, const kda_tensor& t) {
  settle(verb, "--io", p.attention.io_dtype, t.dtype);
}
inline void settle_states(const CLI::App& verb, ProblemOptions& p, const kda_tensor& state) {
  if (present(state)) settle(verb, "--state-dtype", p.attention.state_dtype, state.dtype);
}
// Heads and dims from [.., H, K], [.., HV, V] and the gate's and beta's dtypes.
inline void settle_attention(const CLI::App& verb, ProblemOptions& p, const kda_tensor& gate,
                             const kda_tensor& beta) {
  kda_attention_spec& a = p.attention;
  require("gate", gate, 2);
  require("beta", beta, 1);
  settle(verb, "--gate-dtype", a.gate_dtype, gate.dtype);
  settle(verb, "--beta-dtype", a.beta_dtype, beta.dtype);
  settle(verb, "--value-heads", a.num_value_heads, gate.shape[gate.rank - 2]);
  settle(verb, "--key-dim", a.key_dim, gate.shape[gate.rank - 1]);
}

// Runs a plan on a workspace of its own. On a device the tensors travel there and back.
template <class Args>
std::string run_plan(const Context& context, const Plan& plan, const Args& args) {
  std::string message;
  const kda_status status = conformance::run_in(
      context.get(), args, plan.workspace_size(),
      [&](const Args& there, kda_workspace workspace) {
        plan.run(there, workspace);
        return KDA_OK;
      },
      message);
  if (status != KDA_OK) throw Error(status, message);
  return fmt::format("{} ({})", plan.backend(), plan.isa());
}

// A call that is one plan of the problem's and its arguments.
template <class Args, kda_operator Op>
class PlanCall : public OperatorCall {
 public:
  PlanCall() : args_(make<Args>()) {}
  void run(const Context& context, const ProblemOptions& p) override {
    backend = run_plan(context, create_plan(context, Op, p), args_);
  }

 protected:
  Args args_;
};

}  // namespace kda::tools

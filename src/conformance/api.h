// The C ABI made short for checks: contexts, plans that lend themselves a poisoned and guarded workspace, and whole
// calls of the attention operators from a Problem.
#pragma once

#include <kda/kda.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "conformance/device.h"
#include "conformance/distributions.h"
#include "conformance/tensor.h"

namespace kda::conformance {

// A CPU context with this many threads, made once per process.
kda_context* cpu_context(int threads = 2);

// A workspace full of NaN between guards.
class Lent {
 public:
  explicit Lent(size_t bytes);
  kda_workspace workspace();
  bool intact() const;

 private:
  size_t bytes_, first_;
  std::vector<unsigned char> memory_;
};

// Runs call(args, workspace) with a fresh workspace where the context's device reads: on the CPU at once; on another
// one the tensors of `args` travel there and back. A write outside tensors or workspace is KDA_INTERNAL. `message`:
// of what went wrong.
template <class Args, class Call>
kda_status run_in(const kda_context* context, Args args, size_t bytes, const Call& call, std::string& message) {
  std::string fault;
  kda_status status = KDA_OUT_OF_MEMORY;
  const auto run = [&](kda_workspace workspace) {
    status = call(args, workspace);
    if (status != KDA_OK) message = kda_last_error();
  };
  if (DeviceMemory* const memory = memory_of(context)) {
    Mirror mirror(*memory, tensors_of(args), bytes);
    if (mirror.ok()) run(mirror.workspace());
    fault = mirror.ok() ? mirror.back() : "no device memory";
  } else {
    Lent lent(bytes);
    run(lent.workspace());
    if (!lent.intact()) fault = "the run wrote outside its workspace";
  }
  if (fault.empty()) return status;
  message = fault;
  return KDA_INTERNAL;
}

// A plan or the reason why there is none.
class Plan {
 public:
  Plan() = default;
  // `create` is the operator's kda_..._plan_create.
  template <class Desc>
  Plan(kda_status (*create)(kda_context*, const Desc*, kda_plan**), kda_context* context, const Desc& desc)
      : context_(context) {
    kda_plan* plan = nullptr;
    status_ = create(context, &desc, &plan);
    if (status_ != KDA_OK) message_ = kda_last_error();
    plan_.reset(plan, kda_plan_destroy);
  }

  bool ok() const { return status_ == KDA_OK; }
  kda_status status() const { return status_; }
  const std::string& message() const { return message_; }  // of the last failing call
  std::string backend() const { return ok() ? kda_plan_backend(plan_.get()) : ""; }
  const kda_plan* get() const { return plan_.get(); }
  size_t workspace_bytes() const;

  kda_status run(const kda_prefill_args& args) { return run_with(kda_prefill_run, args); }
  kda_status run(const kda_decode_args& args) { return run_with(kda_decode_run, args); }
  kda_status run(const kda_commit_args& args) { return run_with(kda_commit_run, args); }
  kda_status run(const kda_decode_step_args& args) { return run_with(kda_decode_step_run, args); }
  kda_status run(const kda_conv_args& args) { return run_with(kda_conv_run, args); }
  kda_status run(const kda_gated_norm_args& args) { return run_with(kda_gated_norm_run, args); }
  kda_status run(const kda_residual_norm_args& args) { return run_with(kda_residual_norm_run, args); }
  kda_status run(const kda_segment_summary_args& args) { return run_with(kda_segment_summary_run, args); }
  kda_status run(const kda_segment_merge_args& args) { return run_with(kda_segment_merge_run, args); }

 private:
  template <class Args>
  kda_status run_with(kda_status (*call)(const kda_plan*, const Args*, kda_workspace, void*), const Args& args) {
    if (!ok()) return status_;
    return run_in(
        context_, args, workspace_bytes(),
        [&](const Args& there, kda_workspace workspace) { return call(plan_.get(), &there, workspace, nullptr); },
        message_);
  }

  const kda_context* context_ = nullptr;
  std::shared_ptr<kda_plan> plan_;
  kda_status status_ = KDA_INTERNAL;
  std::string message_ = "no plan";
};

// An args or desc struct of the C ABI with its size filled in.
template <class T>
T sized() {
  T x{};
  x.struct_size = sizeof(T);
  return x;
}

// Plans with the initialised defaults of their description. Without a context: the CPU's; for a backend called
// "cuda_portable", say, the candidate "portable" of the context of set_device().
Plan make_plan(const kda_prefill_desc& desc, kda_context* context = nullptr);
Plan make_plan(const kda_decode_desc& desc, kda_context* context = nullptr);
Plan make_plan(const kda_commit_desc& desc, kda_context* context = nullptr);
Plan make_plan(const kda_decode_step_desc& desc, kda_context* context = nullptr);
Plan make_plan(const kda_conv_desc& desc, kda_context* context = nullptr);
Plan make_plan(const kda_gated_norm_desc& desc, kda_context* context = nullptr);
Plan make_plan(const kda_residual_norm_desc& desc, kda_context* context = nullptr);
Plan make_plan(const kda_segment_merge_desc& desc, kda_context* context = nullptr);
Plan make_summary_plan(const kda_prefill_desc& desc, kda_context* context = nullptr);

// Descriptions with struct_size and the non-zero defaults (null_slot = -1).
kda_prefill_desc prefill_desc(const Problem& p, const char* backend);
kda_decode_desc decode_desc(const Problem& p, const char* backend, int32_t width = 1);
// Arguments with the token tensors of a problem; offsets, states and outputs are the caller's.
kda_prefill_args prefill_args(const Problem& p);
kda_decode_args decode_args(const Problem& p);

// One prefill over packed states [N, HV, V, K]: initial states of the problem (or fresh), final states apart.
struct Outcome {
  kda_status status = KDA_INTERNAL;
  std::string message;
  Tensor out, state;
};
struct PrefillOptions {
  const char* backend = "reference";
  uint32_t flags = 0;
  kda_dtype out_dtype = KDA_DTYPE_NONE;    // default: io
  kda_dtype state_dtype = KDA_DTYPE_NONE;  // default: the problem's, fp32
  kda_context* context = nullptr;
};
Outcome prefill(const Problem& p, const PrefillOptions& options = {});
// The oracle: fp64 out and states, nothing rounded.
Outcome oracle(const Problem& p);

}  // namespace kda::conformance

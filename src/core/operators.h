// The operators: for each, its description and argument structs (those of the C ABI, normalised) and what
// core has to know about them. A backend implements Kernel<Op> and declares Candidates (core/backend.h).
#pragma once

#include "base/status.h"
#include "kda/kda.h"

namespace kda {

// A non-owning callable (std::function may allocate, and runs must not, spec G-11).
class TensorVisitor {
 public:
  template <class F>
  TensorVisitor(const F& f)
      : object_(&f), call_([](const void* object, const char* name, const kda_tensor& tensor, bool written) {
          (*static_cast<const F*>(object))(name, tensor, written);
        }) {}
  void operator()(const char* name, const kda_tensor& tensor, bool written) const {
    call_(object_, name, tensor, written);
  }

 private:
  const void* object_;
  void (*call_)(const void*, const char*, const kda_tensor&, bool);
};

// Each operator gives:
//   kOp, kName        identity; kEnvironment: variable that names a backend, or null (spec R-7)
//   normalize(desc)   fills in defaults and validates what does not depend on a backend
//   validate(desc, args)       host checks of one run (spec G-6), nothing of device values
//   check_values(desc, args)   checked mode (spec G-7): host-readable values only
//   visit_tensors(args, fn)    every tensor, for aliasing checks (spec G-9, R-35)
#define KDA_DEFINE_OPERATOR(NAME, OP, DESC, ARGS, TEXT, ENVIRONMENT)         \
  struct NAME {                                                              \
    using Desc = DESC;                                                       \
    using Args = ARGS;                                                       \
    static constexpr kda_operator kOp = OP;                                  \
    static constexpr const char* kName = TEXT;                               \
    static constexpr const char* kEnvironment = ENVIRONMENT;                 \
    static Status normalize(Desc& desc);                                     \
    static Status validate(const Desc& desc, const Args& args);              \
    static Status check_values(const Desc& desc, const Args& args);          \
    static void visit_tensors(const Args& args, const TensorVisitor& visit); \
  }

KDA_DEFINE_OPERATOR(Prefill, KDA_OP_PREFILL, kda_prefill_desc, kda_prefill_args, "prefill", "KDA_PREFILL_BACKEND");
KDA_DEFINE_OPERATOR(Decode, KDA_OP_DECODE, kda_decode_desc, kda_decode_args, "decode", "KDA_DECODE_BACKEND");
KDA_DEFINE_OPERATOR(Commit, KDA_OP_COMMIT, kda_commit_desc, kda_commit_args, "commit", nullptr);
KDA_DEFINE_OPERATOR(DecodeStep, KDA_OP_DECODE_STEP, kda_decode_step_desc, kda_decode_step_args, "decode_step",
                    "KDA_DECODE_BACKEND");
KDA_DEFINE_OPERATOR(Conv, KDA_OP_CONV, kda_conv_desc, kda_conv_args, "conv", nullptr);
KDA_DEFINE_OPERATOR(GatedNorm, KDA_OP_GATED_NORM, kda_gated_norm_desc, kda_gated_norm_args, "gated_norm", nullptr);
KDA_DEFINE_OPERATOR(SegmentSummary, KDA_OP_SEGMENT_SUMMARY, kda_prefill_desc, kda_segment_summary_args,
                    "segment_summary", nullptr);
KDA_DEFINE_OPERATOR(SegmentMerge, KDA_OP_SEGMENT_MERGE, kda_segment_merge_desc, kda_segment_merge_args,
                    "segment_merge", nullptr);

KDA_DEFINE_OPERATOR(ResidualNorm, KDA_OP_RESIDUAL_NORM, kda_residual_norm_desc, kda_residual_norm_args,
                    "residual_norm", nullptr);

#undef KDA_DEFINE_OPERATOR

}  // namespace kda

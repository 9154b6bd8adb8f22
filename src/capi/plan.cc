// What all plans share: workspace, choice, refusals; and kda_explain.
#include "core/plan.h"

#include "capi/backends.h"
#include "capi/guard.h"
#include "core/metadata.h"
#include "core/state_copy.h"

using kda::Status;
using kda::capi::check_pointer;
using kda::capi::guard;

namespace {

template <class Op>
Status explain(const kda_context& context, const void* raw, kda_explain_fn fn, void* user) {
  typename Op::Desc desc{};
  KDA_RETURN_IF_ERROR(kda::read_struct(static_cast<const typename Op::Desc*>(raw), desc, "desc"));
  KDA_RETURN_IF_ERROR(Op::normalize(desc));
  bool found = false;
  for (const kda::Candidate<Op>* candidate : context.backends->template of<Op>()) {
    const kda::Refusals r = kda::auto_refusals_of(*candidate, desc, context);
    const bool chosen = !found && r.empty() && candidate->name() != "reference";
    found = found || chosen;
    fn(user, std::string(candidate->name()).c_str(), r.text().c_str(), chosen);
  }
  return {};
}

}  // namespace

extern "C" {

void kda_plan_destroy(kda_plan* plan) { delete plan; }

kda_status kda_plan_workspace_size(const kda_plan* plan, size_t* bytes) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("plan", plan));
    KDA_RETURN_IF_ERROR(check_pointer("bytes", bytes));
    *bytes = static_cast<size_t>(plan->book.total_bytes());
    return {};
  });
}

kda_status kda_plan_workspace_section(const kda_plan* plan, size_t i, const char** name, size_t* offset,
                                      size_t* bytes) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("plan", plan));
    const auto& sections = plan->book.sections();
    if (i >= sections.size()) return kda::not_found("section: wanted below ", sections.size(), ", got ", i);
    if (name) *name = sections[i].name.c_str();
    if (offset) *offset = static_cast<size_t>(sections[i].offset);
    if (bytes) *bytes = static_cast<size_t>(sections[i].bytes);
    return {};
  });
}

const char* kda_operator_name(kda_operator op) { return kda::operator_name(op); }
kda_operator kda_plan_operator(const kda_plan* plan) { return plan ? plan->op : kda_operator{}; }
const char* kda_plan_backend(const kda_plan* plan) { return plan ? plan->backend.c_str() : ""; }
const char* kda_plan_isa(const kda_plan* plan) { return plan ? plan->isa.c_str() : ""; }

kda_status kda_plan_refusal(const kda_plan* plan, size_t i, const char** candidate, const char** reasons) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("plan", plan));
    if (i >= plan->refused.size()) return kda::not_found("refusal: wanted below ", plan->refused.size(), ", got ", i);
    if (candidate) *candidate = plan->refused[i].candidate.c_str();
    if (reasons) *reasons = plan->refused[i].reasons.c_str();
    return {};
  });
}

kda_status kda_explain(const kda_context* context, kda_operator op, const void* desc, kda_explain_fn fn, void* user) {
  return guard([&]() -> Status {
    KDA_RETURN_IF_ERROR(check_pointer("context", context));
    KDA_RETURN_IF_ERROR(check_pointer("desc", desc));
    if (fn == nullptr) return kda::invalid_argument("fn: wanted a callback, got NULL");
    switch (op) {
      case KDA_OP_PREFILL: return explain<kda::Prefill>(*context, desc, fn, user);
      case KDA_OP_DECODE: return explain<kda::Decode>(*context, desc, fn, user);
      case KDA_OP_COMMIT: return explain<kda::Commit>(*context, desc, fn, user);
      case KDA_OP_DECODE_STEP: return explain<kda::DecodeStep>(*context, desc, fn, user);
      case KDA_OP_CONV: return explain<kda::Conv>(*context, desc, fn, user);
      case KDA_OP_GATED_NORM: return explain<kda::GatedNorm>(*context, desc, fn, user);
      case KDA_OP_RESIDUAL_NORM: return explain<kda::ResidualNorm>(*context, desc, fn, user);
      case KDA_OP_SEGMENT_SUMMARY: return explain<kda::SegmentSummary>(*context, desc, fn, user);
      case KDA_OP_SEGMENT_MERGE: return explain<kda::SegmentMerge>(*context, desc, fn, user);
      case KDA_OP_STATE_COPY:
        return kda::explain_state_copy(*context, static_cast<const kda_state_copy_desc*>(desc), fn, user);
      case KDA_OP_METADATA:
        return kda::explain_metadata(*context, kda::capi::metadata_registry(),
                                     static_cast<const kda_metadata_desc*>(desc), fn, user);
      default: return kda::unsupported("op: wanted an operator with candidates, got ", kda::operator_name(op));
    }
  });
}

}  // extern "C"

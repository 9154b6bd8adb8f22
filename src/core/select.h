// Which candidate serves a problem (spec R-6..R-18).
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/tensor.h"
#include "core/backend.h"

namespace kda {

struct Refused {
  std::string candidate;
  std::string reasons;  // one "gate: wanted ..., got ..." a line
  kda_device_type device = KDA_CPU;  // where it runs: candidates of two devices may bear one name
};

// "triton" -> "portable" and so on; INVALID_ARGUMENT that quotes an unknown name and lists the known ones.
Result<std::string> parse_backend_name(kda_operator op, const char* name, const char* where);

// What was asked for and where (spec R-7).
struct BackendRequest {
  std::string name = "auto";
  std::string source;  // "the plan" or the variable's name; "" for auto

  static BackendRequest of_plan(const char* name) {
    return name == nullptr ? BackendRequest() : BackendRequest{name, "the plan"};
  }
};

// The request after R-7: plan field, then environment, then auto. Logs once when the plan overrides.
Result<BackendRequest> requested_backend(kda_operator op, const char* plan_field, const char* environment_variable);

// Names in KDA_DISABLE; read once, at the first plan creation (spec R-15). A name that is no candidate's makes every plan
// creation INVALID_ARGUMENT: it would disable nothing, unseen.
bool backend_disabled(std::string_view name);

// Logs a choice once per distinct text: which candidate, why, how to go back, what was passed over (spec R-16).
void log_choice(kda_operator op, std::string_view chosen, const BackendRequest& request,
                const std::vector<Refused>& refused, const std::string& way_back = {});

// How the user of a candidate gets the chunked fallback instead (spec R-15); "" for the fallback itself.
std::string way_back_from(std::string_view chosen, const char* environment_variable);

const char* operator_name(kda_operator op);

template <class Op>
Refusals refusals_of(const Candidate<Op>& candidate, const typename Op::Desc& desc, const Context& context) {
  Refusals r;
  if (backend_disabled(candidate.name())) r.add("disabled", "a backend that is not in KDA_DISABLE", candidate.name());
  if (candidate.device() != context.device.type) {
    r.add("device_type", device_name(candidate.device()), device_name(context.device.type));
  }
  candidate.check(desc, context, r);
  return r;
}

// The same and what keeps a candidate from `auto` (spec N-15).
template <class Op>
Refusals auto_refusals_of(const Candidate<Op>& candidate, const typename Op::Desc& desc, const Context& context) {
  Refusals r = refusals_of(candidate, desc, context);
  if (!candidate.deviation().empty()) r.add("deviation", "the numeric contract N-1 to N-8", candidate.deviation());
  return r;
}

template <class Op>
struct Choice {
  const Candidate<Op>* candidate = nullptr;
  std::vector<Refused> refused;
};

std::string list_refusals(const std::vector<Refused>& refused);

// Explicit names may exist for several devices ("portable" on CUDA and CPU): the first without refusal wins.
template <class Op>
Result<Choice<Op>> select(const Context& context, const typename Op::Desc& desc, const std::string& request) {
  Choice<Op> choice;
  for (const Candidate<Op>* candidate : context.backends->template of<Op>()) {
    const bool by_auto = request == "auto";
    if (by_auto ? candidate->name() == "reference" : candidate->name() != request) continue;
    const Refusals r = by_auto ? auto_refusals_of(*candidate, desc, context) : refusals_of(*candidate, desc, context);
    if (r.empty()) {
      choice.candidate = candidate;
      return choice;
    }
    choice.refused.push_back({std::string(candidate->name()), r.text(), candidate->device()});
  }
  const char* asked = request == "auto" ? "auto found no candidate" : "the named backend was refused";
  return unsupported(operator_name(Op::kOp), ": backend '", request, "': ", asked, list_refusals(choice.refused));
}

}  // namespace kda

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
};

// "triton" -> "portable" and so on; INVALID_ARGUMENT that quotes an unknown name and lists the known ones.
Result<std::string> parse_backend_name(kda_operator op, const char* name, const char* where);

// The request after R-7: plan field, then environment, then auto. Logs once when the plan overrides.
Result<std::string> requested_backend(kda_operator op, const char* plan_field, const char* environment_variable);

// Names in KDA_DISABLE; read once, at the first plan creation (spec R-15).
bool backend_disabled(std::string_view name);

// Logs a choice once per distinct text when KDA_VERBOSE=1 (spec R-16).
void log_choice(kda_operator op, std::string_view chosen, const std::vector<Refused>& refused);

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
    if (request == "auto" ? candidate->name() == "reference" : candidate->name() != request) continue;
    const Refusals r = refusals_of(*candidate, desc, context);
    if (r.empty()) {
      choice.candidate = candidate;
      return choice;
    }
    choice.refused.push_back({std::string(candidate->name()), r.text()});
  }
  const char* asked = request == "auto" ? "auto found no candidate" : "the named backend was refused";
  return unsupported(operator_name(Op::kOp), ": backend '", request, "': ", asked, list_refusals(choice.refused));
}

}  // namespace kda

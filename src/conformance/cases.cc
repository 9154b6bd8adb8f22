#include "conformance/cases.h"

#include <algorithm>
#include <limits>

#include "conformance/limits.h"

namespace kda::conformance {

void Report::measure(std::string what, const Comparison& error, double limit, kda_dtype stored, int64_t elements,
                     int64_t head_elements) {
  measures_.push_back(
      {std::move(what), error, for_size(limit, stored, elements), for_size(2 * limit, stored, head_elements)});
}

void Report::expect_none(const std::string& what, const std::string& difference) {
  if (!difference.empty()) fault(what + ": " + difference);
}

bool Report::accept(kda_status status, const std::string& message, const kda_plan* plan) {
  if (status == KDA_OK) {
    backend_ = kda_plan_backend(plan);
    isa_ = kda_plan_isa(plan);
    const bool device = isa_.rfind("sm_", 0) == 0;
    const kda_operator op = kda_plan_operator(plan);
    if (device && (op == KDA_OP_PREFILL || op == KDA_OP_SEGMENT_SUMMARY) && backend_ == "fused") {
      arithmetic_ = Arithmetic::kTensorCores;
    }
    return true;
  }
  if (status == KDA_UNSUPPORTED) refusal_ = message;
  else fault(std::string("plan: ") + kda_status_name(status) + ": " + message);
  return false;
}

bool Report::succeeded(const std::string& what, kda_status status, const std::string& message) {
  if (status == KDA_OK) return true;
  // A candidate asked for by name may decline a run's layout, which it sees there first.
  if (status == KDA_UNSUPPORTED && message.find("layout:") != std::string::npos) refusal_ = message;
  else fault(what + ": " + kda_status_name(status) + ": " + message);
  return false;
}

bool Report::passed() const {
  if (!faults_.empty() || declined()) return false;
  for (const Measure& m : measures_) {
    if (!m.ok()) return false;
  }
  return true;
}

double Measure::share() const {
  if (!error.mask_fault.empty()) return std::numeric_limits<double>::infinity();
  return std::max(error.total / limit, error.worst_head / head_limit);
}

const Measure* Report::worst() const {
  const Measure* worst = nullptr;
  for (const Measure& m : measures_) {
    if (worst == nullptr || m.share() > worst->share()) worst = &m;
  }
  return worst;
}

std::vector<Case> all_cases() {
  std::vector<Case> all;
  for (const auto& make : {distribution_cases, prefill_cases, decode_cases, commit_cases, decode_step_cases,
                           conv_cases, gated_norm_cases, state_copy_cases, metadata_cases, segment_summary_cases,
                           segment_merge_cases, residual_norm_cases, layer_cases}) {
    for (Case& c : make()) all.push_back(std::move(c));
  }
  return all;
}

}  // namespace kda::conformance

#include "core/select.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "base/log.h"
#include "base/tensor.h"

namespace kda {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"auto", "portable", "fused", "reference"};

struct Alias {
  kda_operator op;
  const char* from;
  const char* to;
};
constexpr Alias kAliases[] = {
    {KDA_OP_PREFILL, "triton", "portable"},     {KDA_OP_PREFILL, "flashkda", "fused"},
    {KDA_OP_DECODE, "triton", "portable"},      {KDA_OP_DECODE, "native", "fused"},
    {KDA_OP_DECODE_STEP, "triton", "portable"}, {KDA_OP_DECODE_STEP, "native", "fused"},
};

// What KDA_DISABLE holds, read once.
const std::vector<std::string>& disabled_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found;
    const char* value = std::getenv("KDA_DISABLE");
    const std::string list = value != nullptr ? value : "";
    for (size_t begin = 0; begin < list.size();) {
      const size_t end = std::min(list.find(',', begin), list.size());
      if (end > begin) found.push_back(list.substr(begin, end - begin));
      begin = end + 1;
    }
    return found;
  }();
  return names;
}

Status check_disabled_names() {
  for (const std::string& name : disabled_names()) {
    const bool known = std::find(kNames.begin() + 1, kNames.end(), name) != kNames.end();  // all but auto
    if (!known) {
      return invalid_argument("KDA_DISABLE: wanted names out of portable, fused, reference, got \"", name, "\"");
    }
  }
  return {};
}

}  // namespace

const char* operator_name(kda_operator op) {
  switch (op) {
    case KDA_OP_PREFILL: return "prefill";
    case KDA_OP_DECODE: return "decode";
    case KDA_OP_COMMIT: return "commit";
    case KDA_OP_DECODE_STEP: return "decode_step";
    case KDA_OP_CONV: return "conv";
    case KDA_OP_GATED_NORM: return "gated_norm";
    case KDA_OP_STATE_COPY: return "state_copy";
    case KDA_OP_METADATA: return "metadata";
    case KDA_OP_SEGMENT_SUMMARY: return "segment_summary";
    case KDA_OP_SEGMENT_MERGE: return "segment_merge";
    case KDA_OP_LAYER: return "layer";
    case KDA_OP_RESIDUAL_NORM: return "residual_norm";
  }
  return "unknown";
}

Result<std::string> parse_backend_name(kda_operator op, const char* name, const char* where) {
  for (const std::string_view known : kNames) {
    if (name == known) return std::string(known);
  }
  std::string aliases;
  for (const Alias& alias : kAliases) {
    if (alias.op != op) continue;
    if (std::strcmp(name, alias.from) == 0) return std::string(alias.to);
    aliases += str_cat(", ", alias.from, " (= ", alias.to, ")");
  }
  return invalid_argument(operator_name(op), " backend (", where, "): wanted auto, portable, fused, reference",
                          aliases, "; got \"", name, "\"");
}

Result<BackendRequest> requested_backend(kda_operator op, const char* plan_field, const char* environment_variable) {
  KDA_RETURN_IF_ERROR(check_disabled_names());
  std::string plan = "auto", environment = "auto";
  if (plan_field != nullptr) {
    auto parsed = parse_backend_name(op, plan_field, "plan field");
    if (!parsed.ok()) return parsed.status();
    plan = parsed.value();
  }
  // An unknown name is an error at any level, also at one that is overridden (spec R-7).
  const char* value = environment_variable ? std::getenv(environment_variable) : nullptr;
  if (value != nullptr) {
    auto parsed = parse_backend_name(op, value, environment_variable);
    if (!parsed.ok()) return parsed.status();
    environment = parsed.value();
  }
  if (plan == "auto" && environment == "auto") return BackendRequest();
  if (plan == "auto") return BackendRequest{environment, environment_variable};
  if (environment != "auto" && environment != plan) {
    log_once(KDA_LOG_INFO, str_cat(operator_name(op), ": the plan's backend '", plan, "' overrides ",
                                   environment_variable, "=", environment));
  }
  return BackendRequest{plan, "the plan"};
}

bool backend_disabled(std::string_view name) {
  const std::vector<std::string>& list = disabled_names();
  return std::find(list.begin(), list.end(), name) != list.end();
}

std::string list_refusals(const std::vector<Refused>& refused) {
  std::string text;
  for (const Refused& r : refused) {
    std::string reasons = r.reasons;
    for (size_t at = 0; (at = reasons.find('\n', at)) != std::string::npos;) reasons.replace(at, 1, "; ");
    text += str_cat("\n  ", r.candidate, " (", device_name(r.device), "): ", reasons);
  }
  return text.empty() ? std::string(" (there is no such candidate)") : text;
}

void log_choice(kda_operator op, std::string_view chosen, const BackendRequest& request,
                const std::vector<Refused>& refused, const std::string& way_back) {
  std::string text = str_cat(operator_name(op), ": chose ", chosen, " (");
  text += request.name == "auto" ? "auto: the first without a refusal" : "named by " + request.source;
  if (!way_back.empty()) text += "; to go back: " + way_back;
  text += ")";
  if (!refused.empty()) text += str_cat("; passed over:", list_refusals(refused));
  log_once(KDA_LOG_INFO, text);
}

std::string way_back_from(std::string_view chosen, const char* environment_variable) {
  if (chosen == "portable") return {};
  std::string text = "backend 'portable'";
  if (environment_variable != nullptr) text += str_cat(" or ", environment_variable, "=portable");
  return text;
}

}  // namespace kda

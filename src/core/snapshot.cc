#include "core/snapshot.h"

#include <array>
#include <string_view>

#include "base/tensor.h"
#include "core/backend.h"

extern char** environ;

namespace kda {
namespace {

template <class Op>
void list_candidates(const Backends& backends, std::string& text) {
  for (const Candidate<Op>* candidate : backends.of<Op>()) {
    text +=
        str_cat(text.empty() ? "" : " ", Op::kName, ":", device_name(candidate->device()), ":", candidate->name());
  }
}

std::string hex(const std::array<uint8_t, 16>& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (uint8_t b : bytes) text += {kDigits[b >> 4], kDigits[b & 15]};
  return text;
}

void describe_device(const DeviceFacts& facts, Snapshot& snapshot) {
  if (facts.name.empty()) return;  // the CPU: its backend says what there is to say
  snapshot["device name"] = facts.name;
  snapshot["device compute capability"] = str_cat(facts.major, ".", facts.minor);
  snapshot["device uuid"] = hex(facts.uuid);
  snapshot["device driver"] = str_cat(facts.driver_version);
  snapshot["device runtime"] = str_cat(facts.runtime_version);
}

std::string value_text(const Snapshot& snapshot, const std::string& entry) {
  const auto at = snapshot.find(entry);
  return at == snapshot.end() ? std::string("unset") : "\"" + at->second + "\"";
}

}  // namespace

bool is_configuration_variable(std::string_view name) {
  for (std::string_view prefix : {"KDA_", "CUDA_", "CUBLAS", "NVIDIA_", "OMP_", "TBB_"}) {
    if (name.substr(0, prefix.size()) == prefix) return true;
  }
  return name == "LD_LIBRARY_PATH" || name == "LD_PRELOAD" || name == "PYTHONPATH";
}

void scan_environment(Snapshot& snapshot) {
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t end = text.find('=');
    if (end == std::string_view::npos || !is_configuration_variable(text.substr(0, end))) continue;
    snapshot["environment " + std::string(text.substr(0, end))] = std::string(text.substr(end + 1));
  }
}

void describe_library(const Context& context, Snapshot& snapshot) {
  snapshot["library version"] = str_cat(KDA_VERSION_MAJOR, ".", KDA_VERSION_MINOR, ".", KDA_VERSION_PATCH);
  snapshot["isa"] = context.isa;
  describe_device(context.facts, snapshot);
  if (context.backends == nullptr) return;
  const Backends& backends = *context.backends;
  snapshot["library source hash"] = backends.source_hash;
  std::string names;
  list_candidates<Prefill>(backends, names);
  list_candidates<Decode>(backends, names);
  list_candidates<Commit>(backends, names);
  list_candidates<DecodeStep>(backends, names);
  list_candidates<Conv>(backends, names);
  list_candidates<GatedNorm>(backends, names);
  list_candidates<SegmentSummary>(backends, names);
  list_candidates<SegmentMerge>(backends, names);
  list_candidates<ResidualNorm>(backends, names);
  snapshot["library backends"] = names;
}

Status compare_snapshots(const Snapshot& before, const Snapshot& now) {
  // The smallest entry, by name, that is not in both with one value.
  const std::string* first = nullptr;
  for (const auto& [entry, value] : before) {
    const auto at = now.find(entry);
    if (at != now.end() && at->second == value) continue;
    first = &entry;
    break;
  }
  for (const auto& [entry, value] : now) {
    if (first != nullptr && *first <= entry) break;
    if (before.count(entry) != 0) continue;
    first = &entry;
    break;
  }
  if (first == nullptr) return {};
  return failed_precondition("configuration changed since the first prepare (spec Y-11): ", *first, ": wanted ",
                             value_text(before, *first), ", got ", value_text(now, *first));
}

}  // namespace kda

#include "cpu/isa.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "cpu/simd/targets.h"

namespace kda::cpu {
namespace {

struct Entry {
  Isa isa;
  const char* name;
};
constexpr Entry kEntries[] = {{Isa::avx512, "avx512"}, {Isa::avx2, "avx2"}, {Isa::portable, "portable"}};

std::vector<Isa> find_isas() {
  std::vector<Isa> found;
  const int64_t supported = hwy::SupportedTargets();
  for (const Entry& entry : kEntries) {
    const int64_t target = target_of(entry.isa);
    const bool compiled = entry.isa == Isa::portable || (HWY_TARGETS & target) != 0;
    const bool runs = entry.isa == Isa::portable || (supported & target) != 0;
    if (compiled && runs) found.push_back(entry.isa);
  }
  return found;
}

}  // namespace

const char* isa_name(Isa isa) {
  for (const Entry& entry : kEntries) {
    if (entry.isa == isa) return entry.name;
  }
  return "unknown";
}

std::optional<Isa> isa_from_name(std::string_view name) {
  for (const Entry& entry : kEntries) {
    if (name == entry.name) return entry.isa;
  }
  return std::nullopt;
}

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> isas = find_isas();
  return isas;
}

const char* available_isa_names() {
  static const std::string names = [] {
    std::string text;
    for (Isa isa : available_isas()) {
      if (!text.empty()) text += ',';
      text += isa_name(isa);
    }
    return text;
  }();
  return names.c_str();
}

Result<Isa> choose_isa() {
  const char* forced = std::getenv("KDA_FORCE_ISA");
  if (forced == nullptr) return available_isas().front();
  const auto isa = isa_from_name(forced);
  const auto& have = available_isas();
  if (isa && std::find(have.begin(), have.end(), *isa) != have.end()) return *isa;
  return unsupported("KDA_FORCE_ISA: wanted one of ", available_isa_names(), ", got \"", forced, "\"");
}

}  // namespace kda::cpu

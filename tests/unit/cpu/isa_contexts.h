// CPU contexts of every instruction set of this machine, side by side in one process.
#pragma once

#include <cstdlib>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "conformance/api.h"

namespace kda::conformance::test {

// "avx512", "avx2", "portable": what kda_cpu_isas() names.
inline std::vector<std::string> isas() {
  std::vector<std::string> names;
  std::istringstream text(kda_cpu_isas());
  for (std::string name; std::getline(text, name, ',');) names.push_back(name);
  return names;
}

// Made once per process for each (ISA, number of threads). KDA_FORCE_ISA is read when a context is made.
inline kda_context* isa_context(const std::string& isa, int threads = 2) {
  static std::map<std::pair<std::string, int>, std::shared_ptr<kda_context>> contexts;
  auto& context = contexts[{isa, threads}];
  if (!context) {
    const char* const before = std::getenv("KDA_FORCE_ISA");
    const std::string saved = before ? before : "";
    setenv("KDA_FORCE_ISA", isa.c_str(), 1);
    auto options = sized<kda_context_options>();
    options.num_threads = threads;
    kda_context* made = nullptr;
    const kda_status status = kda_context_create(&options, &made);
    if (before) setenv("KDA_FORCE_ISA", saved.c_str(), 1);
    else unsetenv("KDA_FORCE_ISA");
    if (status != KDA_OK) return nullptr;
    context.reset(made, kda_context_destroy);
  }
  return context.get();
}

}  // namespace kda::conformance::test

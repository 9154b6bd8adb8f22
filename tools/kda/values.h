// Values of options: refused with what was wanted and what came, before CLI11 converts them its own way.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <map>
#include <string>

namespace kda::tools {

// Every option of the verb that takes numbers takes nothing else: no "", no -1 where the type has no sign.
void check_numbers(CLI::App& verb);

// A whole number from `least` to `most`.
CLI::Validator whole(int64_t least, int64_t most = INT64_MAX);
// Of --threads; more than any machine has would only fail later.
inline constexpr int64_t kMostThreads = 4096;

// One of the names, whatever their case; the option's value becomes the number beside it.
void set_names(CLI::Option& option, std::map<std::string, int> names);

}  // namespace kda::tools

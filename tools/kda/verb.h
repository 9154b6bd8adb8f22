// A verb of the program: one CLI11 subcommand, one file. main.cc lists them.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <stdexcept>

namespace kda::tools {

// Exit codes: 0 done, 1 the check or job failed, 2 bad usage or input, 130 interrupted.
enum ExitCode : int { kDone = 0, kFailed = 1, kUsage = 2, kInterrupted = 130 };

// Bad usage or input: main() prints the message and returns kUsage.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Adds the subcommand and its options to `app`; the result runs it once the options are parsed.
using AddVerb = std::function<int()> (*)(CLI::App& app);

std::function<int()> add_info(CLI::App& app);
std::function<int()> add_check(CLI::App& app);
std::function<int()> add_bench(CLI::App& app);
std::function<int()> add_replay(CLI::App& app);
std::function<int()> add_run(CLI::App& app);

}  // namespace kda::tools

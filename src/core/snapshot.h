// The configuration that a preparation depends on (spec Y-11): taken at the first prepare, compared later, and
// never while serving (Y-12).
#pragma once

#include <map>
#include <string>

#include "base/status.h"
#include "core/context.h"

namespace kda {

// Entry -> value. Ordered, so that "the first differing entry" is the same one every time.
using Snapshot = std::map<std::string, std::string>;

// Adds the environment variables that matter; tests replace it.
using EnvironmentScan = void (*)(Snapshot& snapshot);
void scan_environment(Snapshot& snapshot);
// KDA_, CUDA_, CUBLAS, NVIDIA_, OMP_, TBB_ prefixes, LD_LIBRARY_PATH, LD_PRELOAD, PYTHONPATH.
bool is_configuration_variable(std::string_view name);

// Library version and source hash, candidates, ISA, device facts; the device's copy backend adds its images.
void describe_library(const Context& context, Snapshot& snapshot);

// FAILED_PRECONDITION naming the first entry that differs, with both values.
Status compare_snapshots(const Snapshot& before, const Snapshot& now);

}  // namespace kda

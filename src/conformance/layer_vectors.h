// Whole-layer files of expected values (tests/data/vectors/README.md).
#pragma once

#include <string>

#include "conformance/cases.h"

namespace kda::conformance {

// Prefill of the first rows in one call, then one call a decode step, against the file's out, state and window.
void run_layer_vectors(const std::string& path, kda_dtype io, const Setting& setting, Report& report);

}  // namespace kda::conformance

// State copies and metadata on small shapes, for compute-sanitizer.
#pragma once

namespace kda::conformance::test {

// Number of calls that failed.
int run_copies_and_metadata();

}  // namespace kda::conformance::test

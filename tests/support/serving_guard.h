// Counts the calls that serving must not make (spec Y-12, Y-18, T-13, T-14, G-11): allocation, environment reads,
// CPU feature and cache queries, the loader, mutexes. The functions are replaced for the whole test program and
// count only while a guard lives, on every thread. Under sanitizers, which replace the allocator themselves,
// allocations are not counted.
#pragma once

#include <string>

namespace kda::conformance::test {

struct ServingCalls {
  long allocations = 0;  // malloc, calloc, realloc, aligned_alloc, posix_memalign, and so operator new
  long frees = 0;
  long environment = 0;  // getenv, secure_getenv
  long system = 0;       // sysconf, hwy::SupportedTargets
  long loader = 0;       // dlopen
  long locks = 0;        // pthread_mutex_lock; not counted under sanitizers either

  long total() const { return allocations + frees + environment + system + loader + locks; }
  std::string text() const;
};

class ServingGuard {
 public:
  ServingGuard();
  ~ServingGuard();
  ServingGuard(const ServingGuard&) = delete;
  ServingGuard& operator=(const ServingGuard&) = delete;
  // Since the guard was made.
  ServingCalls calls() const;
  // False under sanitizers.
  static bool counts_allocations();
};

}  // namespace kda::conformance::test

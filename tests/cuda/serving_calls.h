// Calls into the CUDA runtime and driver that serving must not make (spec T-14, Y-23), counted while a guard lives.
// The runtime's functions are replaced at link time; the driver's where the runtime looks them up, so that what the
// runtime does by itself (loading a module at a first launch, say) is seen too.
#pragma once

#include <map>
#include <string>

namespace kda::cuda_test {

class CudaCalls {
 public:
  CudaCalls();
  ~CudaCalls();
  CudaCalls(const CudaCalls&) = delete;
  CudaCalls& operator=(const CudaCalls&) = delete;
  // Name -> number of calls since the guard was made; launches, and memsets of a stream, under "launch". Runtime
  // names begin with "cuda", driver names with "cu" and a capital.
  std::map<std::string, long> counts() const;
  long launches() const;
  // All but launches.
  long others() const;
  std::string text() const;
};

// The next launch fails and starts nothing.
void fail_next_launch();

// Calls of operator new on any thread, those from inside a launch apart (the driver has its own allocator anyway).
class HostAllocations {
 public:
  HostAllocations();
  ~HostAllocations();
  long count() const;
};

}  // namespace kda::cuda_test

// What memory itself takes for an operator's bytes: kernels that do nothing but move them, in many forms. The fastest
// of them is what no kernel with work to do can be expected to beat, however it is written.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kda::cuda_test {

constexpr int64_t kTrafficUnit = 32 << 10;

// One call's bytes: `reads` streams of `bytes` are read, `writes` written with what the first of them held; in place:
// the first written stream is the first read. Streams lie one behind the other from `from` and `to` on. With
// `row_bytes` the read streams (or the written ones, `rows_of_target`; in place both) are rows of a pool, found by a
// table as operators find slots.
struct Traffic {
  const char* from = nullptr;
  char* to = nullptr;
  int64_t bytes = 0;  // of a stream; a multiple of kTrafficUnit
  int reads = 1, writes = 1;
  bool in_place = false;
  int64_t row_bytes = 0;  // a multiple of kTrafficUnit; 0: no rows
  bool rows_of_target = false;
  const int32_t* rows = nullptr;
};

// How it is moved.
struct TrafficForm {
  enum Kind { kRegisters, kBulk } kind;
  int shared = 0;  // bytes of shared memory a block, which say how many a multiprocessor holds
  // kRegisters:
  int threads = 256;     // of a block
  int pieces = 4;        // loads of 16 bytes that a thread has in flight
  int turns = 1;         // a thread loads and stores so often
  bool leaving = false;  // marked to leave the L2 first
  bool early = false;    // sources asked of the L2 before the wait for the grid in front
  // kBulk; without rows:
  int blocks = 1;  // a multiprocessor
  int chunk = 0;   // bytes of a copy
  int stages = 0;  // chunks in flight a block
  std::string label() const;
};

// Every form that serves these streams.
std::vector<TrafficForm> traffic_forms(const Traffic& t);

// One launch with programmatic serialisation, as the operators' own.
void move_bytes(const Traffic& t, const TrafficForm& form, cudaStream_t stream);

}  // namespace kda::cuda_test

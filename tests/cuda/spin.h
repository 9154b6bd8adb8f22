// A kernel that holds multiprocessors until it is told to stop.
#pragma once

#include <cuda_runtime_api.h>

namespace kda::cuda_test {

class Spinner {
 public:
  explicit Spinner(int multiprocessors);  // one block of all shared memory on each
  ~Spinner();
  Spinner(const Spinner&) = delete;
  Spinner& operator=(const Spinner&) = delete;
  void stop();

 private:
  cudaStream_t stream_ = nullptr;
  int* flag_ = nullptr;  // host memory that the device polls
};

}  // namespace kda::cuda_test

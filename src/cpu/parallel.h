// The built-in thread pool of CPU contexts.
#pragma once

#include <cstdint>
#include <memory>

#include "core/context.h"

namespace kda::cpu {

// Cores that this process may use (its affinity mask), at least 1.
int32_t default_num_threads();

// Owns the helpers of one context: a thread for each further core, up to num_threads in all. Task i is always
// body(arg, i); which thread runs it is left open.
//   - The calling thread works too, and never waits for a helper that has not taken a task: a call is finished by the
//     caller alone if no helper comes (a machine under load, a forked child).
//   - Calls from several threads at once are allowed; one of them gets the helpers, the others run alone.
//   - With a thread for every core, helpers are bound to the cores that the calling thread is not on.
//   - Helpers watch for the next call for a short while, then sleep. A call allocates nothing and takes no lock.
class ThreadPool {
 public:
  explicit ThreadPool(int32_t num_threads);  // 0 = default_num_threads()
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t num_threads() const { return num_threads_; }
  // The pool as a parallel-for; valid while the pool lives.
  Parallel parallel();

 private:
  struct State;
  static void run(void* self, int32_t n, void (*body)(void*, int32_t), void* arg);

  int32_t num_threads_;
  std::unique_ptr<State> state_;
};

}  // namespace kda::cpu

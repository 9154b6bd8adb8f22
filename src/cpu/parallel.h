// The built-in thread pool of CPU contexts, over oneTBB.
#pragma once

#include <cstdint>
#include <memory>

#include "core/context.h"

namespace kda::cpu {

// Cores that this process may use (its affinity mask), at least 1.
int32_t default_num_threads();

// Owns the workers of one context. Task i is always body(arg, i); which thread runs it is left open.
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
  struct Arena;
  static void run(void* self, int32_t n, void (*body)(void*, int32_t), void* arg);

  int32_t num_threads_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace kda::cpu
